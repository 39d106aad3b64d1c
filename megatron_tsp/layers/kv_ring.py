"""Attention exchange `ring`: K and V pass from rank to rank, one hop a step, while queries stay.

Ring attention (arXiv 2310.01889) over tokens in zigzag order: what Megatron calls context
parallelism by `p2p`. With a causal mask every step after the first costs every rank the same, half
of all pairs of local tokens: all queries see the low chunk of an earlier rank, the high queries
both chunks of a later one.

K and V of all KV heads travel, so a rank holds those of two other ranks at a time, and backward the
gradients of as many, which follow one step behind and end at home (`streaming.Ring`).
"""

import torch
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.gradients import Gradients
from megatron_tsp.layers import flash
from megatron_tsp.layers.dropout import Between, Dropout
from megatron_tsp.layers.mask import Mask, Span, Tile
from megatron_tsp.streaming import Ring
from megatron_tsp.traffic import block


class RingKV(torch.autograd.Function):
    """q [s/D, b, n, d], k and v [s/D, b, g, d] → [s/D, b, n, d]; arguments as `GatheredKV`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, group, kernel, mask, dropout=None):
        k, v = k.contiguous(), v.contiguous()
        ring = Ring(group)  # its buffers go when the walk is done
        heads, so_far = _by_kv_head(q, k), None
        with block("attention"):
            for owner, kv in ring.forward((k, v)):
                tiles, keys = _tiles(ring, owner, len(q), mask), (_by_kv_head(t, k) for t in kv)
                drops = _drops(dropout, ring, owner, q, heads)
                so_far = flash.attend(heads, *keys, tiles, kernel, so_far, drops)
        out, lse = so_far
        if sinks is not None:
            out, lse = flash.with_sinks(out, lse, _of_heads(sinks, k))
        out = _by_token(out.to(q.dtype), q)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.group, ctx.kernel, ctx.mask, ctx.dropout = group, kernel, mask, dropout
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        ring, grads = Ring(ctx.group), Gradients((k, v), dtype=k.dtype)
        dout, heads, out = (_by_kv_head(t, k) for t in (dout, q, out))
        dq = torch.zeros_like(heads)
        with block("attention"):
            for owner, kv in ring.backward((k, v), grads):
                tiles, keys = _tiles(ring, owner, len(q), ctx.mask), [_by_kv_head(t, k) for t in kv]
                dkv = [torch.zeros_like(t) for t in (k, v)]
                into = (_by_kv_head(t, k) for t in dkv)
                drops = _drops(ctx.dropout, ring, owner, q, heads)
                flash.attend_backward(
                    dout, heads, *keys, out, lse, tiles, ctx.kernel, dq, *into, drops
                )
                for index, dkeys in enumerate(dkv):
                    grads.add(index, dkeys)
        dsinks = None
        if sinks is not None:
            dsinks = flash.sinks_backward(dout, out, lse, _of_heads(sinks, k))
            dsinks = dsinks.view(k.size(1), -1).sum(0).to(sinks.dtype)
        return _by_token(dq, q), *grads.result, dsinks, None, None, None, None


def _tiles(ring: Ring, owner: int, tokens: int, mask: Mask) -> list[Tile]:
    """What this rank's queries see of an owner's keys."""
    queries, keys = (_spans(rank, ring.size, tokens) for rank in (ring.rank, owner))
    tiles = [tile for chunk in queries for tile in mask.tiles(chunk, keys)]
    return sorted(tiles, key=lambda tile: tile.kind != "causal")


def _drops(
    dropout: Dropout | None, ring: Ring, owner: int, q: Tensor, heads: Tensor
) -> Between | None:
    """The dropout between this rank's queries and an owner's keys."""
    if dropout is None:
        return None
    spans = (_spans(rank, ring.size, len(q)) for rank in (ring.rank, owner))
    return dropout.of(heads, *spans)


def _spans(rank: int, size: int, tokens: int) -> list[Span]:
    """Where a rank's tokens lie in the sequence."""
    chunks = zigzag.chunks_of(rank, size)
    length = tokens // len(chunks)
    return [Span(c * length, (c + 1) * length, at * length) for at, c in enumerate(chunks)]


def _by_kv_head(t: Tensor, k: Tensor) -> Tensor:
    """[s, b, n, d] as a kernel wants it, beside k [s, b, g, d]: [b·g, n/g, s, d], a view where
    strides allow."""
    s, b, n, d = t.shape
    return t.reshape(s, b * k.size(2), -1, d).permute(1, 2, 0, 3)


def _by_token(heads: Tensor, like: Tensor) -> Tensor:
    """The inverse, shaped as `like`."""
    return heads.permute(2, 0, 1, 3).reshape(like.shape)


def _of_heads(sinks: Tensor, k: Tensor) -> Tensor:
    """Sinks [n] beside k [s, b, g, d]: [b·g, n/g]."""
    return sinks.view(k.size(2), -1).repeat(k.size(1), 1)
