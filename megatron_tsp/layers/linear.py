"""Column- and row-parallel linears that stream their shards past the local tokens.

Parameters, initialization and checkpoints are those of Megatron's `ColumnParallelLinear` and
`RowParallelLinear` at TP = D. What differs is what goes in and out: local tokens with *all* their
features, so nothing is gathered, reduced or scattered but the weights.
"""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_tsp import parallel_state
from megatron_tsp.errors import TSPError
from megatron_tsp.layers.block import Block, deliver
from megatron_tsp.layers.norm import Normalize, make_parameters
from megatron_tsp.streaming import stream


def _features(owner: int, size: int) -> slice:
    """The owner's part of a feature dimension cut in parts of `size`."""
    return slice(owner * size, (owner + 1) * size)


class _ColumnLinear(torch.autograd.Function):
    """y[:, owner's part] = norm(x)·W_ownerᵀ + b_owner, for each owner; the norm may be absent.

    Saved are x and the norm's row statistics: norm(x) comes back in the backward.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, gamma, beta, normalize: Normalize | None, block, training):
        ctx.block, ctx.normalize = block, normalize
        ctx.shards = (weight,) if bias is None else (weight, bias)
        rows = x.reshape(-1, x.size(-1))
        statistics = None
        if normalize is not None:
            normal, statistics = normalize.forward(rows, gamma, beta)
        else:
            normal = rows
        ctx.save_for_backward(x, gamma, beta, statistics)
        part = weight.size(0)
        y = rows.new_empty(rows.size(0), block.stream.size * part)
        for owner, (w, *b) in block.forward(ctx.shards, training):
            columns = y[:, _features(owner, part)]
            if b:
                torch.addmm(b[0], normal, w.t(), out=columns)
            else:
                torch.mm(normal, w.t(), out=columns)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, gamma, beta, statistics = ctx.saved_tensors
        part, normalize = ctx.shards[0].size(0), ctx.normalize
        rows, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
        normal = rows
        if normalize is not None:
            normal = normalize.again(rows, gamma, beta, statistics)
        grads = ctx.block.gradients(ctx.shards, ctx.needs_input_grad[1 : 1 + len(ctx.shards)])
        dx = torch.zeros_like(rows) if ctx.needs_input_grad[0] or normalize is not None else None
        for owner, (w, *b) in ctx.block.backward(ctx.shards, grads):
            dy_part = dy[:, _features(owner, part)]
            if dx is not None:
                dx.addmm_(dy_part, w)
            grads.add_product(0, dy_part, normal)
            if b:
                grads.add(1, dy_part.sum(0))
        dw, db = (*deliver(ctx.shards, grads), None)[:2]
        dgamma = dbeta = None
        if normalize is not None:
            dx, dgamma, dbeta = normalize.backward(dx, rows, gamma, beta, statistics, reuse=True)
        return (None if dx is None else dx.view_as(x)), dw, db, dgamma, dbeta, None, None, None


class _RowLinear(torch.autograd.Function):
    """y = Σ over owners of x[:, owner's part]·W_ownerᵀ."""

    @staticmethod
    def forward(ctx, x, weight, block, training):
        ctx.block, ctx.shards = block, (weight,)
        ctx.save_for_backward(x)
        part = weight.size(1)
        rows = x.reshape(-1, x.size(-1))
        y = rows.new_zeros(rows.size(0), weight.size(0))
        for owner, (w,) in block.forward(ctx.shards, training):
            y.addmm_(rows[:, _features(owner, part)], w.t())
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        part = ctx.shards[0].size(1)
        rows, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
        grads = ctx.block.gradients(ctx.shards, ctx.needs_input_grad[1:2])
        dx = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for owner, (w,) in ctx.block.backward(ctx.shards, grads):
            columns = _features(owner, part)
            if dx is not None:
                torch.mm(dy, w, out=dx[:, columns])
            grads.add_product(0, dy, rows[:, columns])
        (dw,) = deliver(ctx.shards, grads)
        return (None if dx is None else dx.view_as(x)), dw, None, None


class _Streamed:
    """What the linears share: their block, and refusals."""

    def set_block(self, schedule: str, kind: str, wide_grads: bool) -> None:
        """Choose how the shards travel, and what this is counted under."""
        walk = stream(schedule, parallel_state.weight_group(self.tp_group))
        self.block = Block(walk, kind, self._fetch, wide_grads, self.gradient_accumulation_fusion)

    def _fetch(self) -> tuple[Tensor, ...]:
        weight, bias = self(None, shards_only=True)[:2]
        return (weight,) if bias is None or self.skip_bias_add else (weight, bias)

    def _refuse(self, **settings) -> None:
        for name, value in settings.items():
            if value:
                raise TSPError(f"{type(self).__name__}: {name}={value} is not supported by TSP")


class TSPColumnParallelLinear(_Streamed, ColumnParallelLinear):
    """Y = X·Aᵀ + b for A sharded along its output features.

    Args as `ColumnParallelLinear`, and:
        schedule: how the shards travel, a key of `streaming.SCHEDULES`.
        kind: the block that its traffic is counted under.
        wide_grads: sum dW of low-precision weights in fp32.

    Input [s/D, b, in], output [s/D, b, out]: the local tokens, all features, in the input's dtype.

    Raises:
        TSPError: for `gather_output` and `is_expert`.
    """

    def __init__(
        self,
        *args,
        schedule: str = "broadcast",
        kind: str = "attention",
        wide_grads: bool = True,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self._refuse(gather_output=self.gather_output, is_expert=self.is_expert)
        self.set_block(schedule, kind, wide_grads)

    def forward(self, input_, weight=None, runtime_gather_output=None, *, shards_only=False):
        """As Megatron's: (output, None).

        With `shards_only` it returns (weight, bias), this rank's shards, and computes nothing: a
        fused block gets at the weights through the module's call, because Megatron's
        `--overlap-param-gather` waits for them in the call's pre-hook.
        """
        if weight is None:
            weight = self.weight
        if shards_only:
            return weight, self.bias
        if runtime_gather_output:
            raise TSPError("TSP linears return local tokens with all features: nothing to gather")
        if self.skip_bias_add and self.bias is not None:
            raise TSPError("skip_bias_add needs a fused block: the bias is sharded, tokens are not")
        training = torch.is_grad_enabled()
        norm = self.norm()
        return _ColumnLinear.apply(input_, weight, self.bias, *norm, self.block, training), None

    def norm(self) -> tuple[Tensor | None, Tensor | None, Normalize | None]:
        """(weight, bias, function) of a norm that comes first; none here."""
        return None, None, None


class TSPOutputLayer(TSPColumnParallelLinear):
    """The output layer of a language model: hands hidden states on to the loss, which applies its
    weights while they stream. Logits [s/D, b, V] never exist.

    Attributes:
        hits: of the last loss, for each local token whether its label has the largest logit, bool
            [s/D, b]: what Megatron reports of multi-token prediction.
    """

    hits: Tensor | None = None

    def forward(self, input_, weight=None, runtime_gather_output=None, *, shards_only=False):
        """(input [s/D, b, h], None); with `shards_only` (weight shard, None)."""
        if shards_only:
            return super().forward(input_, weight, shards_only=True)
        return input_, None


class TSPLayerNormColumnParallelLinear(TSPColumnParallelLinear):
    """Y = norm(X)·Aᵀ + b: the norm that the config names, then the linear.

    Parameters are named as in Transformer Engine's module of this kind, which is how Megatron's
    checkpoints name a layer's norms anyway. norm(X) is not kept for the backward.
    """

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight, self.layer_norm_bias = make_parameters(config, input_size)
        self.normalize = Normalize.of(config)

    def norm(self):
        """(weight, bias, function) of the norm."""
        return self.layer_norm_weight, self.layer_norm_bias, self.normalize


class TSPRowParallelLinear(_Streamed, RowParallelLinear):
    """Y = X·Aᵀ + b for A sharded along its input features; b is whole on every rank.

    Args as `RowParallelLinear`, and `schedule`, `kind`, `wide_grads` as `TSPColumnParallelLinear`.

    Input [s/D, b, in], output [s/D, b, out]: the local tokens, all features, in the input's dtype.

    Raises:
        TSPError: for `is_expert`.
    """

    def __init__(
        self,
        *args,
        schedule: str = "broadcast",
        kind: str = "attention",
        wide_grads: bool = True,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self._refuse(is_expert=self.is_expert)
        self.set_block(schedule, kind, wide_grads)
        if self.bias is not None:
            # Each rank sees its own tokens only: Megatron sums such gradients over the group.
            self.bias.sequence_parallel = True

    def _fetch(self) -> tuple[Tensor, ...]:
        return self(None, shards_only=True)[:1]  # the bias does not travel

    def forward(self, input_: Tensor | None, *, shards_only=False):
        """As Megatron's: (output, the bias where `skip_bias_add`); `shards_only` as above."""
        if shards_only:
            return self.weight, self.bias
        output = _RowLinear.apply(input_, self.weight, self.block, torch.is_grad_enabled())
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None
