"""Attention exchange `allgather`: local queries meet the K and V of the whole sequence.

Works on any group over which the tokens are laid out in zigzag order, and on one rank alone. Heads
go in groups: while one group's attention computes, the next group's K and V are on their way, so
at most two groups are whole in memory. The backward gathers again and reduce-scatters dK and dV.

The gather needs no reordering. The high chunks (2D-1-r of each rank r) are gathered in front of the
low ones, which leaves the chunks in this order:

    2D-1, 2D-2, ..., D,  0, 1, ..., D-1

The keys that the rank's chunks see in full are then one piece each: for chunk 2D-1-r all that lie
behind its own, for chunk r those between the start of the low ones and its own. A softmax does not
mind the order of its keys; only on the two diagonal blocks does order count, and these are local.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp.layers import flash
from megatron_tsp.streaming import wait_all
from megatron_tsp.traffic import block


class _Layout(NamedTuple):
    """Who attends to what on this rank: slices of local queries and of gathered keys."""

    size: int
    rank: int
    chunk: int  # tokens

    def diagonals(self) -> list[tuple[slice, slice]]:
        """(local tokens, their place among the gathered keys) of each own chunk."""
        c, r, d = self.chunk, self.rank, self.size
        if d == 1:
            return [(slice(0, c), slice(0, c))]
        low = slice(0, c), slice((d + r) * c, (d + r + 1) * c)
        high = slice(c, 2 * c), slice(r * c, (r + 1) * c)
        return [low, high]

    def full(self) -> list[tuple[slice, slice] | None]:
        """For each diagonal: (local queries, keys that they all see), None if there are none."""
        c, r, d = self.chunk, self.rank, self.size
        if d == 1:
            return [None]
        low = (slice(0, c), slice(d * c, (d + r) * c)) if r else None
        return [low, (slice(c, 2 * c), slice((r + 1) * c, 2 * d * c))]


class _Exchange:
    """K and V of one head group over the group of ranks, packed side by side: [tokens, b, g, 2, d].

    With one rank nothing moves and the packed local tensor is the gathered one.
    """

    def __init__(self, group: dist.ProcessGroup | None, layout: _Layout):
        self.group, self.layout = group, layout

    def gather(self, kv: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to gather [s/D, ...]; returns [s, ...], high chunks first, and the works."""
        d, c = self.layout.size, self.layout.chunk
        if d == 1:
            return kv, []
        whole = kv.new_empty(2 * d * c, *kv.shape[1:])
        halves = ((whole[: d * c], kv[c:]), (whole[d * c :], kv[:c]))
        return whole, [
            dist.all_gather_into_tensor(to, half, group=self.group, async_op=True)
            for to, half in halves
        ]

    def each(self, k: Tensor, v: Tensor, groups: list[slice]):
        """(heads, local K and V, gathered, works) of each head group, the next one on its way."""
        packed = _pack(k, v, groups[0])
        arriving = self.gather(packed)
        for at, heads in enumerate(groups):
            local, (whole, works) = packed, arriving
            if at + 1 < len(groups):
                packed = _pack(k, v, groups[at + 1])
                arriving = self.gather(packed)
            yield heads, local, whole, works

    def scatter(self, dkv: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start to sum [s, ...] over ranks, to the tokens' owners; returns [s/D, ...], works."""
        d, c = self.layout.size, self.layout.chunk
        if d == 1:
            return dkv, []
        own = dkv.new_empty(2 * c, *dkv.shape[1:])
        halves = ((own[c:], dkv[: d * c]), (own[:c], dkv[d * c :]))
        return own, [
            dist.reduce_scatter_tensor(to, half, group=self.group, async_op=True)
            for to, half in halves
        ]


def _by_query_group(heads: Tensor, kv_heads: int) -> Tensor:
    """[s, b, g·rep, d] as the kernels want it: [b·g, rep, s, d]; a view where strides allow."""
    s, b, n, d = heads.shape
    return heads.reshape(s, b * kv_heads, n // kv_heads, d).permute(1, 2, 0, 3)


def _as_tokens(heads: Tensor, batch: int) -> Tensor:
    """The inverse, as a view [s, b, g, rep, d]."""
    n, rep, s, d = heads.shape
    return heads.view(batch, n // batch, rep, s, d).permute(3, 0, 1, 2, 4)


class GatheredKV(torch.autograd.Function):
    """q [s/D, b, n, d], k and v [s/D, b, g, d], the group, the scale → [s/D, b, n, d]."""

    @staticmethod
    def forward(ctx, q, k, v, group, scale):
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        layout = _Layout(size, rank, q.size(0) // (1 if size == 1 else 2))
        ctx.layout, ctx.scale, ctx.group = layout, scale, group
        v = v.contiguous()  # a view would keep the packed QKV alive until the backward
        exchange, groups = _Exchange(group, layout), _head_groups(k, size)
        rep = q.size(2) // k.size(2)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lses = []
        with block("attention"):
            for heads, local, whole, works in exchange.each(k, v, groups):
                queries = q[:, :, _query_heads(heads, rep)]
                target = out[:, :, _query_heads(heads, rep)].unflatten(2, (-1, rep))
                lses.append(_attend(queries, local, whole, works, target, layout, scale))
        ctx.save_for_backward(q, k, v, out, torch.cat(lses))
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        layout = ctx.layout
        exchange, groups = _Exchange(ctx.group, layout), _head_groups(k, layout.size)
        rep = q.size(2) // k.size(2)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v)
        lses = iter(lse.split([(h.stop - h.start) * k.size(1) for h in groups]))
        leaving = None
        with block("attention"):
            for heads, local, whole, works in exchange.each(k, v, groups):
                of_heads = _query_heads(heads, rep)
                target = dq[:, :, of_heads].unflatten(2, (-1, rep))
                slices = (t[:, :, of_heads] for t in (dout, q, out))
                dwhole = _attend_backward(
                    *slices, local, whole, works, next(lses), target, layout, ctx.scale
                )
                if leaving is not None:
                    _unpack(*leaving, dk, dv)
                leaving = (heads, *exchange.scatter(dwhole))
            _unpack(*leaving, dk, dv)
        return dq, dk, dv, None, None


#: Below this many gathered bytes a smaller exchange saves little memory and costs its latency.
_WORTH_SPLITTING = 4 * 2**20


def _head_groups(k: Tensor, size: int) -> list[slice]:
    """KV heads by exchange: an owner's share at a time (one head where D exceeds them), or more
    while they are small."""
    heads = k.size(2)
    step = heads // size if heads % size == 0 else 1
    gathered = 2 * k[:, :, :step].numel() * k.element_size() * size
    step *= max(1, _WORTH_SPLITTING // gathered)
    return [slice(at, min(at + step, heads)) for at in range(0, heads, step)]


def _query_heads(kv_heads: slice, rep: int) -> slice:
    return slice(kv_heads.start * rep, kv_heads.stop * rep)


def _pack(k: Tensor, v: Tensor, heads: slice) -> Tensor:
    return torch.stack((k[:, :, heads], v[:, :, heads]), dim=3)


def _unpack(heads: slice, dkv: Tensor, works: list[dist.Work], dk: Tensor, dv: Tensor) -> None:
    wait_all(works)
    dk[:, :, heads], dv[:, :, heads] = dkv.unbind(3)


def _attend(queries, local, whole, works, target, layout, scale) -> Tensor:
    """Write the attention of one head group into target [s/D, b, g, rep, d]; returns its lse."""
    kv_heads, batch = whole.size(2), whole.size(1)
    q = _by_query_group(queries, kv_heads)
    parts = []
    for own, _ in layout.diagonals():  # local, so before the gather is waited for
        k, v = (_by_query_group(t, kv_heads) for t in local[own].unbind(3))
        parts.append(flash.forward(q[:, :, own], k, v, True, scale))
    wait_all(works)
    lses = []
    for (own, _), full, (out, lse) in zip(layout.diagonals(), layout.full(), parts, strict=True):
        if full is not None:
            k, v = (_by_query_group(t, kv_heads) for t in whole[full[1]].unbind(3))
            out, lse = flash.merge(out, lse, *flash.forward(q[:, :, own], k, v, False, scale))
        target[own] = _as_tokens(out, batch)
        lses.append(lse)
    return torch.cat(lses, dim=2)


def _attend_backward(dout, queries, out, local, whole, works, lse, target, layout, scale) -> Tensor:
    """Write dq of one head group into target; returns this rank's part of dK and dV, like whole."""
    kv_heads, batch = whole.size(2), whole.size(1)
    dout, q, out = (_by_query_group(t, kv_heads) for t in (dout, queries, out))

    def part(own: slice, keys: Tensor, causal: bool) -> tuple[Tensor, list[Tensor]]:
        k, v = (_by_query_group(t, kv_heads) for t in keys.unbind(3))
        of_own = (t[:, :, own] for t in (out, lse))
        dq, *dkv = flash.backward(dout[:, :, own], q[:, :, own], k, v, *of_own, causal, scale)
        return dq, [_as_tokens(t, batch).squeeze(3) for t in dkv]

    diagonals = [part(own, local[own], True) for own, _ in layout.diagonals()]
    wait_all(works)
    dwhole = torch.empty_like(whole)
    dwhole[: layout.rank * layout.chunk] = 0  # chunks behind all local queries
    put = Tensor.copy_  # the high chunk sees all that the low one sees: it writes, the low one adds
    for at in reversed(range(len(diagonals))):
        (own, place), full, (dq, dkv) = layout.diagonals()[at], layout.full()[at], diagonals[at]
        if full is not None:
            more, more_dkv = part(own, whole[full[1]], False)
            dq = dq.add_(more)
            for total, value in zip(dwhole[full[1]].unbind(3), more_dkv, strict=True):
                put(total, value)
        for total, value in zip(dwhole[place].unbind(3), dkv, strict=True):
            put(total, value)
        target[own] = _as_tokens(dq, batch)
        put = Tensor.add_
    return dwhole
