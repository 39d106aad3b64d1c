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
from megatron_tsp.layers.mask import Span
from megatron_tsp.traffic import block as label


class ExchangedHeads(torch.autograd.Function):
    """q [s/D, b, n, d], k and v [s/D, b, g, d] → [s/D, b, n, d]; arguments as `GatheredKV`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, group, kernel, mask):
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        ctx.group, ctx.size, ctx.kernel, ctx.kv_heads = group, size, kernel, k.size(2)
        ctx.mine = slice(rank * q.size(2) // size, (rank + 1) * q.size(2) // size)
        with label("attention"):
            mine = [
                _to_heads(t, size, group) for t in (q, _for_ranks(k, size), _for_ranks(v, size))
            ]
            whole = Span(0, mine[0].size(0))
            ctx.tiles = mask.tiles(whole, [whole])
            out, lse = flash.attend(*_as_kernels(*mine), ctx.tiles, kernel)
            if sinks is not None:
                out, lse = flash.with_sinks(out, lse, _of_heads(sinks[ctx.mine], mine[1]))
            out = _as_tokens(out.to(q.dtype), mine[0].shape)
            local = _to_tokens(out, size, group)
        ctx.save_for_backward(*mine, sinks, out, lse)
        return local

    @staticmethod
    def backward(ctx, dlocal):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with label("attention"):
            dout = _to_heads(dlocal, ctx.size, ctx.group)
            grads = [torch.zeros_like(t) for t in (q, k, v)]
            dout, out = (_as_kernels(t, k, v)[0] for t in (dout, out))
            flash.attend_backward(
                dout, *_as_kernels(q, k, v), out, lse, ctx.tiles, ctx.kernel, *_as_kernels(*grads)
            )
            dq, dk, dv = (_to_tokens(t, ctx.size, ctx.group) for t in grads)
        dsinks = None
        if sinks is not None:  # of this rank's heads, for all tokens
            dsinks = torch.zeros_like(sinks)
            dsink = flash.sinks_backward(dout, out, lse, _of_heads(sinks[ctx.mine], k))
            dsinks[ctx.mine] = dsink.view(k.size(1), -1).sum(0)
        dk, dv = _summed(dk, ctx.kv_heads), _summed(dv, ctx.kv_heads)
        return dq, dk, dv, dsinks, None, None, None


def _of_heads(sinks: Tensor, k: Tensor) -> Tensor:
    """Sinks [n] as the kernels want them, beside k [s, b, g, d]: [b·g, n/g]."""
    return sinks.view(k.size(2), -1).repeat(k.size(1), 1)


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
