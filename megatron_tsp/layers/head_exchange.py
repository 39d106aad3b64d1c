"""Attention exchange `alltoall`: tokens for heads, attention, heads for tokens.

Each rank gives away all but its share of the heads and gets that share for the whole sequence, so
that one plain causal call does the work (DeepSpeed-Ulysses' idea, arXiv 2309.14509, here on the
axis that shards the weights as well). It moves (2h + 2kv)·N/D elements; the gather moves 2·N·kv.

Query heads go in order, n/D to a rank. With fewer KV heads than ranks a KV head goes to each rank
that has queries for it, and the parts of its gradient are summed where it came from.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers import flash
from megatron_tsp.traffic import block as label


class ExchangedHeads(torch.autograd.Function):
    """q [s/D, b, n, d], k and v [s/D, b, g, d], the group, the scale → [s/D, b, n, d]."""

    @staticmethod
    def forward(ctx, q, k, v, group, scale):
        size = 1 if group is None else group.size()
        ctx.group, ctx.size, ctx.scale, ctx.kv_heads = group, size, scale, k.size(2)
        with label("attention"):
            mine = [
                _to_heads(t, size, group) for t in (q, _for_ranks(k, size), _for_ranks(v, size))
            ]
            out, lse = flash.forward(*_as_kernels(*mine), True, scale)
            out = _as_tokens(out, mine[0].shape)
            local = _to_tokens(out, size, group)
        ctx.save_for_backward(*mine, out, lse)
        return local

    @staticmethod
    def backward(ctx, dlocal):
        q, k, v, out, lse = ctx.saved_tensors
        with label("attention"):
            dout = _to_heads(dlocal, ctx.size, ctx.group)
            kernels = [_as_kernels(t, k, v)[0] for t in (dout, q, out)]
            dq, dk, dv = flash.backward(
                kernels[0], kernels[1], *_as_kernels(q, k, v)[1:], kernels[2], lse, True, ctx.scale
            )
            grads = [_as_tokens(dq, q.shape), _as_tokens(dk, k.shape), _as_tokens(dv, v.shape)]
            dq, dk, dv = (_to_tokens(t, ctx.size, ctx.group) for t in grads)
        return dq, _summed(dk, ctx.kv_heads), _summed(dv, ctx.kv_heads), None, None


def _for_ranks(kv: Tensor, size: int) -> Tensor:
    """KV heads in the order in which ranks take them; each as often as it is needed."""
    heads = kv.size(2)
    return kv if heads >= size else kv.repeat_interleave(size // heads, dim=2)


def _summed(dkv: Tensor, heads: int) -> Tensor:
    """The inverse, for gradients."""
    return dkv if dkv.size(2) == heads else dkv.unflatten(2, (heads, -1)).sum(3)


def _to_heads(local: Tensor, size: int, group) -> Tensor:
    """[s/D, b, n, d], all heads of the own tokens → [s, b, n/D, d], natural order."""
    if size == 1:
        return local.contiguous()
    by_rank = local.unflatten(2, (size, -1)).movedim(2, 0).contiguous()
    arrived = torch.empty_like(by_rank)
    dist.all_to_all_single(arrived, by_rank, group=group)
    return zigzag.to_natural(arrived.flatten(0, 1), 0, size)


def _to_tokens(heads: Tensor, size: int, group) -> Tensor:
    """The inverse."""
    if size == 1:
        return heads
    by_rank = torch.stack([zigzag.take(heads, 0, size, rank) for rank in range(size)])
    arrived = torch.empty_like(by_rank)
    dist.all_to_all_single(arrived, by_rank, group=group)
    return arrived.movedim(0, 2).flatten(2, 3)


def _as_kernels(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """[s, b, n, d] and [s, b, g, d] as [b·g, n/g, s, d] and [b·g, 1, s, d]."""
    s, b, g, d = k.shape
    return [t.reshape(s, b * g, -1, d).permute(1, 2, 0, 3) for t in (q, k, v)]


def _as_tokens(heads: Tensor, shape: torch.Size) -> Tensor:
    """[b·g, r, s, d] as [s, b, g·r, d]."""
    return heads.permute(2, 0, 1, 3).reshape(shape)
