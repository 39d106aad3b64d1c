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
from megatron_tsp.streaming import Gradients, Stream, stream
from megatron_tsp.traffic import block


def _features(owner: int, size: int) -> slice:
    """The owner's part of a feature dimension cut in parts of `size`."""
    return slice(owner * size, (owner + 1) * size)


class _ColumnLinear(torch.autograd.Function):
    """y[:, owner's part] = x·W_ownerᵀ + b_owner, for each owner."""

    @staticmethod
    def forward(ctx, x, weight, bias, walk: Stream, kind: str):
        ctx.walk, ctx.kind, ctx.has_bias = walk, kind, bias is not None
        shards = (weight, bias) if ctx.has_bias else (weight,)
        ctx.save_for_backward(x, *shards)
        part = weight.size(0)
        rows = x.reshape(-1, x.size(-1))
        y = rows.new_empty(rows.size(0), walk.size * part)
        with block(kind):
            for owner, (w, *b) in walk.forward(shards):
                columns = y[:, _features(owner, part)]
                if b:
                    torch.addmm(b[0], rows, w.t(), out=columns)
                else:
                    torch.mm(rows, w.t(), out=columns)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, *shards = ctx.saved_tensors
        part = shards[0].size(0)
        rows, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
        grads = Gradients(shards, ctx.needs_input_grad[1 : 1 + len(shards)])
        dx = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        with block(ctx.kind):
            for owner, (w, *_) in ctx.walk.backward(shards, grads):
                dy_part = dy[:, _features(owner, part)]
                if dx is not None:
                    dx.addmm_(dy_part, w)
                grads.add_product(0, dy_part, rows)
                if ctx.has_bias:
                    grads.add(1, dy_part.sum(0))
        dw, db = (*grads.result, None)[:2]
        return (dx.view_as(x) if dx is not None else None), dw, db, None, None


class _RowLinear(torch.autograd.Function):
    """y = Σ over owners of x[:, owner's part]·W_ownerᵀ."""

    @staticmethod
    def forward(ctx, x, weight, walk: Stream, kind: str):
        ctx.walk, ctx.kind = walk, kind
        ctx.save_for_backward(x, weight)
        part = weight.size(1)
        rows = x.reshape(-1, x.size(-1))
        y = rows.new_zeros(rows.size(0), weight.size(0))
        with block(kind):
            for owner, (w,) in walk.forward((weight,)):
                y.addmm_(rows[:, _features(owner, part)], w.t())
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        part = weight.size(1)
        rows, dy = x.reshape(-1, x.size(-1)), dy.reshape(-1, dy.size(-1))
        grads = Gradients((weight,), ctx.needs_input_grad[1:2])
        dx = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        with block(ctx.kind):
            for owner, (w,) in ctx.walk.backward((weight,), grads):
                columns = _features(owner, part)
                if dx is not None:
                    torch.mm(dy, w, out=dx[:, columns])
                grads.add_product(0, dy, rows[:, columns])
        return (dx.view_as(x) if dx is not None else None), grads.result[0], None, None


def _refuse(module, **settings) -> None:
    """Raise for constructor arguments whose meaning TSP would not keep."""
    for name, value in settings.items():
        if value:
            raise TSPError(f"{type(module).__name__}: {name}={value} is not supported by TSP")


class TSPColumnParallelLinear(ColumnParallelLinear):
    """Y = X·Aᵀ + b for A sharded along its output features.

    Args as `ColumnParallelLinear`, and:
        schedule: how the shards travel, a key of `streaming.SCHEDULES`.
        kind: the block that its traffic is counted under.

    Input [s/D, b, in], output [s/D, b, out]: the local tokens, all features, in the input's dtype.

    Raises:
        TSPError: for `gather_output` and `is_expert`.
    """

    def __init__(self, *args, schedule: str = "broadcast", kind: str = "attention", **kwargs):
        super().__init__(*args, **kwargs)
        _refuse(self, gather_output=self.gather_output, is_expert=self.is_expert)
        self.set_schedule(schedule, kind)

    def set_schedule(self, schedule: str, kind: str) -> None:
        """Choose how the shards travel, and the block that this is counted under."""
        self.walk = stream(schedule, parallel_state.weight_group(self.tp_group))
        self.kind = kind

    def forward(self, input_, weight=None, runtime_gather_output=None, *, shards_only=False):
        """As Megatron's: (output, the bias where `skip_bias_add`: all features, gathered).

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
        bias = None if self.skip_bias_add else self.bias
        output = _ColumnLinear.apply(input_, weight, bias, self.walk, self.kind)
        if self.skip_bias_add and self.bias is not None:
            raise TSPError("skip_bias_add needs a fused block: the bias is sharded, tokens are not")
        return output, None


class TSPRowParallelLinear(RowParallelLinear):
    """Y = X·Aᵀ + b for A sharded along its input features; b is whole on every rank.

    Args as `RowParallelLinear`, and `schedule` and `kind` as `TSPColumnParallelLinear`.

    Input [s/D, b, in], output [s/D, b, out]: the local tokens, all features, in the input's dtype.

    Raises:
        TSPError: for `is_expert`.
    """

    def __init__(self, *args, schedule: str = "broadcast", kind: str = "attention", **kwargs):
        super().__init__(*args, **kwargs)
        _refuse(self, is_expert=self.is_expert)
        self.walk = stream(schedule, parallel_state.weight_group(self.tp_group))
        self.kind = kind
        if self.bias is not None:
            # Each rank sees its own tokens only: Megatron sums such gradients over the group.
            self.bias.sequence_parallel = True

    def forward(self, input_: Tensor | None, *, shards_only=False):
        """As Megatron's: (output, the bias where `skip_bias_add`); `shards_only` as above."""
        if shards_only:
            return self.weight, self.bias
        output = _RowLinear.apply(input_, self.weight, self.walk, self.kind)
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None
