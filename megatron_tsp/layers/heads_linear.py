"""Linears around a layer that needs the whole sequence of some of its heads.

A recurrence along the sequence cannot be cut where the tokens are. Its heads can: as in the
`alltoall` attention exchange each rank takes 1/D of them, and here they are the heads whose own
parameters (a convolution, decays, biases) it holds as a shard of TP = D. So from between the pair
they look like Megatron's linears under sequence parallelism, tokens in natural order, and the layer
there is Megatron's own. Beside the weights a rank sends, with f = (D-1)/D and F_in, F_out features
behind the first and in front of the second, f·N·(F_in + F_out)/D elements, forward and backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers.linear import (
    TSPColumnParallelLinear,
    TSPLayerNormColumnParallelLinear,
    TSPRowParallelLinear,
)
from megatron_tsp.traffic import block as label


def _to_heads(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s/D, b, all features] of local tokens → [s, b, own part] in natural order."""
    size = group.size()
    leaving = local.view(*local.shape[:2], size, -1).permute(2, 0, 1, 3).contiguous()
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    return zigzag.to_natural(arriving.flatten(0, 1), 0, size)


def _to_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse."""
    size = group.size()
    leaving = torch.stack([zigzag.take(heads, 0, size, rank) for rank in range(size)])
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    return arriving.permute(1, 2, 0, 3).flatten(2)


class _Exchange(torch.autograd.Function):
    """One of the two; the backward of each is the other."""

    @staticmethod
    def forward(ctx, x, group, kind, forth, back):
        ctx.group, ctx.kind, ctx.back = group, kind, back
        with label(kind):
            return forth(x, group)

    @staticmethod
    def backward(ctx, dy):
        with label(ctx.kind):
            return ctx.back(dy.contiguous(), ctx.group), None, None, None, None


class _GivesHeads:
    """In front of a linear of local tokens: its output by heads, [s, b, out/D]."""

    def forward(self, input_, weight=None, runtime_gather_output=None, *, shards_only=False):
        """As Megatron's: (output, None); `shards_only` as in `TSPColumnParallelLinear`."""
        output, rest = super().forward(
            input_, weight, runtime_gather_output, shards_only=shards_only
        )
        if shards_only or self.tp_group.size() == 1:
            return output, rest
        exchange = self.tp_group, self.block.kind, _to_heads, _to_tokens
        return _Exchange.apply(output, *exchange), rest


class TSPLinearToHeads(_GivesHeads, TSPColumnParallelLinear):
    """Y = X·Aᵀ + b: [s/D, b, in] of local tokens → [s, b, out/D], this rank's features."""


class TSPLayerNormLinearToHeads(_GivesHeads, TSPLayerNormColumnParallelLinear):
    """The same of norm(X)."""


class TSPLinearFromHeads(TSPRowParallelLinear):
    """Y = X·Aᵀ + b: [s, b, in/D], this rank's features → [s/D, b, out] of local tokens."""

    def forward(self, input_: Tensor | None, *, shards_only=False):
        """As Megatron's: (output, bias); `shards_only` as in `TSPColumnParallelLinear`."""
        if not shards_only and self.tp_group.size() > 1:
            exchange = self.tp_group, self.block.kind, _to_tokens, _to_heads
            input_ = _Exchange.apply(input_, *exchange)
        return super().forward(input_, shards_only=shards_only)
