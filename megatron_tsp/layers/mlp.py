"""The MLP whose shards go round while the tokens stay: no all-reduce, no gathered activation.

For each owner j, y += act(norm(x)·W1_jᵀ + b1_j)·W2_jᵀ on the local tokens, where act is gated or
plain. Only x and the norm's row statistics are saved; the hidden activations come back, shard by
shard and some tokens at a time, in the backward walk, unless they are asked to be kept.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron_tsp.errors import TSPError
from megatron_tsp.layers.activation import Activation
from megatron_tsp.layers.block import Block, deliver
from megatron_tsp.layers.norm import Normalize

#: Tokens whose hidden activations of a shard exist at a time. Each such chunk is one more sum into
#: dW: with fewer tokens that sum, not the products, would take the time.
_CHUNK = 8192


def _chunks(*tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.split(_CHUNK) for t in tokens), strict=True)


def _hidden(x: Tensor, w1: Tensor, b1: list[Tensor]) -> Tensor:
    return torch.addmm(b1[0], x, w1.t()) if b1 else x @ w1.t()


class _StreamedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, w2, b1, gamma, beta, normalize: Normalize | None, activation, block,
                keep, training):  # fmt: skip
        ctx.activation, ctx.block, ctx.normalize = activation, block, normalize
        ctx.shards = (w1, w2) if b1 is None else (w1, w2, b1)
        rows = x.reshape(-1, x.size(-1))
        normal, statistics = rows, None
        if normalize is not None:
            normal, statistics = normalize.forward(rows, gamma, beta)
        y = torch.zeros_like(rows)
        kept: list[list[Tensor]] = [[] for _ in range(block.stream.size)]
        for owner, (v1, v2, *c1) in block.forward(ctx.shards, training):
            for normal_, y_ in _chunks(normal, y):
                hidden = _hidden(normal_, v1, c1)
                y_.addmm_(activation(hidden), v2.t())
                if keep and training:
                    kept[owner].append(hidden)
                del hidden
        ctx.save_for_backward(x, gamma, beta, statistics, *chain(*kept))
        return y.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        x, gamma, beta, statistics, *kept = ctx.saved_tensors
        rows, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
        normal, normalize = rows, ctx.normalize
        if normalize is not None:
            normal = normalize.again(rows, gamma, beta, statistics)
        grads = ctx.block.gradients(ctx.shards, ctx.needs_input_grad[1 : 1 + len(ctx.shards)])
        dx = torch.zeros_like(rows)
        each = len(kept) // ctx.block.stream.size
        for owner, (v1, v2, *c1) in ctx.block.backward(ctx.shards, grads):
            for at, (normal_, dy_, dx_) in enumerate(_chunks(normal, dy, dx)):
                hidden = kept[owner * each + at] if kept else _hidden(normal_, v1, c1)
                active, dhidden = ctx.activation.backward(hidden, dy_ @ v2, reuse=not kept)
                dx_.addmm_(dhidden, v1)
                grads.add_product(1, dy_, active)
                grads.add_product(0, dhidden, normal_)
                if c1:
                    grads.add(2, dhidden.sum(0))
                del hidden, active, dhidden  # or they would meet those of the next chunk
        del normal
        dw1, dw2, db1 = (*deliver(ctx.shards, grads), None)[:3]
        dgamma = dbeta = None
        if normalize is not None:
            dx, dgamma, dbeta = normalize.backward(dx, rows, gamma, beta, statistics, reuse=True)
        return dx.view_as(x), dw1, dw2, db1, dgamma, dbeta, *[None] * 5


class TSPMLP(MLP):
    """Megatron's dense MLP, gated or plain, computed shard by shard.

    Args as `MLP`, whose linears must be TSP's, and:
        keep_activations: keep the first linear's output for the backward, N x (its width) numbers a
            layer, instead of computing it again.

    Input and output [s/D, b, h]: the local tokens, in any order.
    """

    def __init__(self, *args, keep_activations: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = Activation(self.config)
        self.keep_activations = keep_activations
        config, norm = self.config, self.linear_fc1.norm()[-1]
        #: Whether Megatron moves the norm's input to the host; a norm outside moves its own.
        self.offload_input = (
            norm is not None
            and config.fine_grained_activation_offloading
            and "mlp_norm" in config.offload_modules
        )
        #: Both linears travel together, as the first one's block.
        self.block: Block = self.linear_fc1.block
        self.block.fetch = self._fetch

    def _fetch(self) -> tuple[Tensor, ...]:
        w1, b1 = self.linear_fc1(None, shards_only=True)
        w2, _ = self.linear_fc2(None, shards_only=True)
        return (w1, w2) if b1 is None else (w1, w2, b1)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs):
        """(output [s/D, b, h], the bias of the second linear [h] or None), as Megatron's."""
        if per_token_scale is not None:
            raise TSPError("per_token_scale belongs to MoE experts; TSP streams dense MLPs only")
        w1, w2, *b1 = self._fetch()
        norm = self.linear_fc1.norm()
        offload = Offloading(self.offload_input, hidden_states, "mlp_norm")
        with offload as hidden_states:
            y = _StreamedMLP.apply(
                hidden_states, w1, w2, b1[0] if b1 else None, *norm, self.activation, self.block,
                self.keep_activations, torch.is_grad_enabled(),
            )  # fmt: skip
        return offload.group_offload(y), self.linear_fc2.bias
