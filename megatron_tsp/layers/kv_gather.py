"""Attention exchange `allgather`: local queries meet the K and V of the whole sequence.

Works on any group over which the tokens are laid out in zigzag order, and on one rank alone. Heads
go in groups: while one group's attention computes, the next group's K and V are on their way, so
at most two groups are whole in memory. The backward gathers again, unless what was gathered is kept
(`KeptKV`), and reduce-scatters dK and dV.

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

from megatron_tsp import zigzag
from megatron_tsp.layers import flash
from megatron_tsp.layers.mask import Mask, Span, Tile
from megatron_tsp.streaming import wait_all
from megatron_tsp.traffic import block


class _Layout(NamedTuple):
    """Where tokens lie: this rank's own in the local tensors, all of them among the gathered."""

    size: int
    rank: int
    chunk: int  # tokens

    def own(self) -> list[Span]:
        """This rank's chunks, in the local tensors."""
        c = self.chunk
        chunks = zigzag.chunks_of(self.rank, self.size)
        return [Span(at * c, (at + 1) * c, here * c) for here, at in enumerate(chunks)]

    def gathered(self, chunk: Span) -> slice:
        """Where a chunk lies among the gathered keys."""
        c, d = self.chunk, self.size
        at = chunk.start if d == 1 else chunk.start + d * c
        if at >= 2 * d * c:
            at = 2 * d * c - chunk.stop
        return slice(at, at + c)

    def before(self, chunk: Span) -> list[Span]:
        """The gathered keys before an own chunk: high chunks, last one first, then the low ones."""
        c, middle = self.chunk, self.size * self.chunk
        if self.size == 1:
            return []
        high = [Span(at, at + c) for at in range(chunk.start - c, middle - 1, -c)]
        high = [span._replace(at=self.gathered(span).start) for span in high]
        return [*high, Span(0, min(chunk.start, middle), middle)]

    def tiles(self, mask: Mask) -> tuple[list[Tile], list[Tile]]:
        """What own queries see of own keys, each chunk of itself, and of the gathered ones."""
        here = [tile for chunk in self.own() for tile in mask.tiles(chunk, [chunk])]
        behind = [tile for chunk in self.own() for tile in mask.tiles(chunk, self.before(chunk))]
        return here, behind


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

    def kept(self, wholes: list[Tensor], groups: list[slice]):
        """The same, from what was gathered before."""
        for heads, whole in zip(groups, wholes, strict=True):
            own = [whole[self.layout.gathered(chunk)] for chunk in self.layout.own()]
            yield heads, torch.cat(own), whole, []

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
    """q [s/D, b, n, d], k and v [s/D, b, g, d] → [s/D, b, n, d].

    Args:
        sinks: [n], one more logit of each head, with value 0; or None.
        group: the ranks over which the sequence is spread; None is one rank.
        kernel: the attention kernel, with its scale of the logits.
        mask: what a query sees.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, group, kernel, mask, keep=False):
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        layout = _Layout(size, rank, q.size(0) // (1 if size == 1 else 2))
        tiles = layout.tiles(mask)
        ctx.layout, ctx.tiles, ctx.kernel, ctx.group = layout, tiles, kernel, group
        v = v.contiguous()  # a view would keep the packed QKV alive until the backward
        ctx.kv_shape, ctx.groups = k.shape, _head_groups(k, size)
        exchange, groups = _Exchange(group, layout), ctx.groups
        rep = q.size(2) // k.size(2)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lses, kept = [], []
        with block("attention"):
            for heads, local, whole, works in exchange.each(k, v, groups):
                of_heads = _query_heads(heads, rep)
                target = out[:, :, of_heads].unflatten(2, (-1, rep))
                lses.append(
                    _attend(
                        q[:, :, of_heads], local, whole, works, _of_heads(sinks, of_heads, k),
                        target, tiles, kernel,
                    )
                )  # fmt: skip
                if keep:
                    kept.append(whole)
        kept = kept or (k, v)
        ctx.save_for_backward(q, sinks, out, torch.cat(lses), *kept)
        ctx.keeps = keep
        return out

    @staticmethod
    def backward(ctx, dout):
        q, sinks, out, lse, *kv = ctx.saved_tensors
        layout, groups = ctx.layout, ctx.groups
        exchange = _Exchange(ctx.group, layout)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = q.new_empty(ctx.kv_shape), q.new_empty(ctx.kv_shape)
        rep, batch = q.size(2) // dk.size(2), dk.size(1)
        dsinks = None if sinks is None else torch.empty_like(sinks)
        lses = iter(lse.split([(h.stop - h.start) * batch for h in groups]))
        gathered = exchange.kept(kv, groups) if ctx.keeps else exchange.each(*kv, groups)
        leaving = None
        with block("attention"):
            for heads, local, whole, works in gathered:
                of_heads, of_lse = _query_heads(heads, rep), next(lses)
                target = dq[:, :, of_heads].unflatten(2, (-1, rep))
                slices = [_by_query_group(t[:, :, of_heads], whole.size(2)) for t in (dout, q, out)]
                if sinks is not None:
                    dsink = flash.sinks_backward(
                        slices[0], slices[2], of_lse, _of_heads(sinks, of_heads, dk)
                    )
                    dsinks[of_heads] = dsink.view(batch, -1).sum(0)
                dwhole = _attend_backward(
                    *slices, local, whole, works, of_lse, target, layout, ctx.tiles, ctx.kernel
                )
                if leaving is not None:
                    _unpack(*leaving, dk, dv)
                leaving = (heads, *exchange.scatter(dwhole))
            _unpack(*leaving, dk, dv)
        return dq, dk, dv, dsinks, None, None, None


class KeptKV(GatheredKV):
    """The same, with K and V kept for the backward as they were gathered: 2·N·kv less to send, and
    2·N·kv elements a layer instead of 2·N·kv/D in memory."""

    @staticmethod
    def forward(ctx, *args):
        return GatheredKV.forward(ctx, *args, keep=True)


#: Below this many gathered bytes a smaller exchange saves little memory and costs its latency.
_WORTH_SPLITTING = 4 * 2**20
#: Above this many, fewer heads go at a time: four such buffers live in the backward.
_TOO_MANY = 128 * 2**20


def _head_groups(k: Tensor, size: int) -> list[slice]:
    """KV heads by exchange: an owner's share at a time (one head where D exceeds them), more while
    they are small, fewer where they are large."""
    heads = k.size(2)
    step = heads // size if heads % size == 0 else 1
    one = 2 * k[:, :, :1].numel() * k.element_size() * size  # bytes of a head, gathered
    step *= max(1, _WORTH_SPLITTING // (step * one))
    step = min(step, max(1, _TOO_MANY // one))
    return [slice(at, min(at + step, heads)) for at in range(0, heads, step)]


def _query_heads(kv_heads: slice, rep: int) -> slice:
    return slice(kv_heads.start * rep, kv_heads.stop * rep)


def _pack(k: Tensor, v: Tensor, heads: slice) -> Tensor:
    return torch.stack((k[:, :, heads], v[:, :, heads]), dim=3)


def _unpack(heads: slice, dkv: Tensor, works: list[dist.Work], dk: Tensor, dv: Tensor) -> None:
    wait_all(works)
    dk[:, :, heads], dv[:, :, heads] = dkv.unbind(3)


def _of_heads(sinks: Tensor | None, heads: slice, k: Tensor) -> Tensor | None:
    """The sinks of some query heads as the kernels want them: [b·g, rep]."""
    if sinks is None:
        return None
    rep = sinks.size(0) // k.size(2)
    return sinks[heads].view(-1, rep).repeat(k.size(1), 1)


def _attend(queries, local, whole, works, sinks, target, tiles, kernel) -> Tensor:
    """Write the attention of one head group into target [s/D, b, g, rep, d]; returns its lse."""
    kv_heads, batch = whole.size(2), whole.size(1)
    q = _by_query_group(queries, kv_heads)
    here, elsewhere = tiles
    # What is local comes first, before the gather is waited for.
    k, v = (_by_query_group(t, kv_heads) for t in local.unbind(3))
    part = flash.attend(q, k, v, here, kernel)
    wait_all(works)
    k, v = (_by_query_group(t, kv_heads) for t in whole.unbind(3))
    out, lse = flash.attend(q, k, v, elsewhere, kernel, part)
    if sinks is not None:
        out, lse = flash.with_sinks(out, lse, sinks)
    target.copy_(_as_tokens(out, batch))
    return lse


def _attend_backward(
    dout, q, out, local, whole, works, lse, target, layout, tiles, kernel
) -> Tensor:
    """Write dq of one head group into target; returns this rank's part of dK and dV, like whole."""
    kv_heads, batch = whole.size(2), whole.size(1)
    here, elsewhere = tiles
    dq, dlocal, dwhole = (torch.zeros_like(t) for t in (q, local, whole))

    def add(keys, dkeys, tiles):
        of_heads = (_by_query_group(t, kv_heads) for two in (keys, dkeys) for t in two.unbind(3))
        k, v, dk, dv = of_heads
        flash.attend_backward(dout, q, k, v, out, lse, tiles, kernel, dq, dk, dv)

    add(local, dlocal, here)
    for chunk in layout.own():
        dwhole[layout.gathered(chunk)] = dlocal[chunk.at : chunk.at + layout.chunk]
    wait_all(works)
    add(whole, dwhole, elsewhere)
    target.copy_(_as_tokens(dq, batch))
    return dwhole
