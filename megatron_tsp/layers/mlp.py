"""The MLP whose shards go round while the tokens stay: no all-reduce, no gathered activation.

For each owner j, y += act(x·W1_jᵀ + b1_j)·W2_jᵀ on the local tokens, where act is gated or plain.
Only x is saved; the hidden activations come back, shard by shard, in the backward walk.
"""

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_tsp.errors import TSPError
from megatron_tsp.layers.activation import Activation
from megatron_tsp.streaming import Gradients, Stream
from megatron_tsp.traffic import block


def _hidden(x: Tensor, w1: Tensor, b1: list[Tensor]) -> Tensor:
    return torch.addmm(b1[0], x, w1.t()) if b1 else x @ w1.t()


class _StreamedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, b1, activation: Activation, walk: Stream):
        ctx.activation, ctx.walk = activation, walk
        shards = (w1, w2) if b1 is None else (w1, w2, b1)
        ctx.save_for_backward(x, *shards)
        rows = x.reshape(-1, x.size(-1))
        y = torch.zeros_like(rows)
        with block("mlp"):
            for _, (v1, v2, *c1) in walk.forward(shards):
                y.addmm_(activation(_hidden(rows, v1, c1)), v2.t())
        return y.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        x, *shards = ctx.saved_tensors
        rows, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
        needed = (*ctx.needs_input_grad[1:3], ctx.needs_input_grad[3])[: len(shards)]
        grads = Gradients(shards, needed)
        dx = torch.zeros_like(rows)
        with block("mlp"):
            for _, (v1, v2, *c1) in ctx.walk.backward(shards, grads):
                active, dz = ctx.activation.backward(_hidden(rows, v1, c1), dy @ v2)
                dx.addmm_(dz, v1)
                grads.add_product(1, dy, active)
                grads.add_product(0, dz, rows)
                if c1:
                    grads.add(2, dz.sum(0))
        dw1, dw2, db1 = (*grads.result, None)[:3]
        return dx.view_as(x), dw1, dw2, db1, None, None


class TSPMLP(MLP):
    """Megatron's dense MLP, gated or plain, computed shard by shard.

    Its linears must be TSP's. Input and output [s/D, b, h]: the local tokens.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = Activation(self.config)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs):
        """(output [s/D, b, h], the bias of the second linear [h] or None), as Megatron's."""
        if per_token_scale is not None:
            raise TSPError("per_token_scale belongs to MoE experts; TSP streams dense MLPs only")
        w1, b1 = self.linear_fc1(None, shards_only=True)
        w2, b2 = self.linear_fc2(None, shards_only=True)
        y = _StreamedMLP.apply(hidden_states, w1, w2, b1, self.activation, self.linear_fc1.walk)
        return y, b2
