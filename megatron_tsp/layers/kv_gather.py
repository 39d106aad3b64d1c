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

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers import flash
from megatron_tsp.layers.delta import delta, stand_in
from megatron_tsp.layers.dropout import Between, Dropout
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

    def drops(self, dropout: Dropout | None, q: Tensor) -> tuple[Between | None, Between | None]:
        """The dropout of heads q [b·g, rep, s, d] over own keys, and over the gathered ones."""
        if dropout is None:
            return None, None
        c, own = self.chunk, self.own()
        chunks = [Span(at * c, (at + 1) * c) for at in range(len(own) * self.size)]
        everywhere = [chunk._replace(at=self.gathered(chunk).start) for chunk in chunks]
        return dropout.of(q, own, own), dropout.of(q, own, everywhere)


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

    def each(self, packed: Iterable[Tensor]):
        """(local K and V, gathered, works) of each head group, the next one on its way."""
        packed = iter(packed)
        local = next(packed)
        arriving = self.gather(local)
        while local is not None:
            now = local, *arriving
            local = next(packed, None)
            arriving = None if local is None else self.gather(local)
            yield now

    def kept(self, wholes: Iterable[Tensor]):
        """The same, from what was gathered before."""
        for whole in wholes:
            own = [whole[self.layout.gathered(chunk)] for chunk in self.layout.own()]
            yield torch.cat(own), whole, []

    def scatter(self, dkv: Tensor) -> "_Leaving":
        """Start to sum [s, ...] over ranks, to the tokens' owners, who get [s/D, ...]."""
        d, c = self.layout.size, self.layout.chunk
        if d == 1:
            return _Leaving(dkv, [], dkv)
        own = dkv.new_empty(2 * c, *dkv.shape[1:])
        halves = ((own[c:], dkv[: d * c]), (own[:c], dkv[d * c :]))
        return _Leaving(own, [
            dist.reduce_scatter_tensor(to, half, group=self.group, async_op=True)
            for to, half in halves
        ], dkv)  # fmt: skip


class _Leaving(NamedTuple):
    """A sum over ranks on its way: the result, what to wait for, and what is read until then."""

    own: Tensor
    works: list[dist.Work]
    sent: Tensor

    def wait(self) -> Tensor:
        """The sum, for the own tokens."""
        wait_all(self.works)
        return self.own


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

    q, k and v are kept in pieces, a head group each. The backward lets go of a piece when it has
    that piece of the gradients, so the two are never there whole at once.

    Args:
        sinks: [n], one more logit of each head, with value 0; or None.
        group: the ranks over which the sequence is spread; None is one rank.
        kernel: the attention kernel, with its scale of the logits.
        mask: what a query sees.
        dropout: of the probabilities; None: none.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, group, kernel, mask, dropout=None, keep=False):
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        layout = _Layout(size, rank, q.size(0) // (1 if size == 1 else 2))
        tiles = layout.tiles(mask)
        ctx.layout, ctx.tiles, ctx.kernel, ctx.group = layout, tiles, kernel, group
        ctx.dropout = dropout
        exchange, groups = _Exchange(group, layout), _head_groups(k, size)
        at_once, rep = _heads_backward(k, size), q.size(2) // k.size(2)
        if dropout is not None:  # a kernel's own masks are those of its call, the same backward
            groups = _cut_groups(groups, at_once)
        batch, kv_heads = k.shape[1:3]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        queries, kvs, lses = [], [], []
        with block("attention"):
            arrivals = exchange.each(torch.stack((k[:, :, h], v[:, :, h]), dim=3) for h in groups)
            for heads, (local, whole, works) in zip(groups, arrivals, strict=True):
                of_heads = slice(heads.start * rep, heads.stop * rep)
                lse = _attend(
                    q[:, :, of_heads], local, whole, works,
                    _of_heads(sinks, of_heads, kv_heads, batch),
                    out[:, :, of_heads].unflatten(2, (-1, rep)), layout, tiles, kernel,
                    dropout and dropout.of_heads(of_heads),
                )  # fmt: skip
                queries += _pieces(q[:, :, of_heads], at_once * rep, 2)
                kvs += _pieces(whole if keep else local, at_once, 2)
                lses += _pieces(lse.unflatten(0, (batch, -1)), at_once, 1)
                del local, whole, works  # before the next but one is gathered
        ctx.save_for_backward(sinks, out, *queries, *kvs, *lses)
        ctx.keeps, ctx.kv_heads = keep, kv_heads
        return out

    @staticmethod
    def backward(ctx, dout):
        sinks, out, *kept = ctx.saved_tensors
        # From here on what is kept lives as long as these names (unless the graph is retained).
        ctx.maybe_clear_saved_tensors()
        third = len(kept) // 3
        queries, kvs, lses = (deque(kept[at * third : (at + 1) * third]) for at in range(3))
        with block("attention"):
            deltas = delta(dout, out)
            del out, kept
            exchange, batch = _Exchange(ctx.group, ctx.layout), dout.size(1)
            dsinks = None if sinks is None else torch.empty_like(sinks)
            grads, leaving, first = ([], [], []), None, 0  # pieces of dq, dk, dv
            for local, whole, works in (exchange.kept if ctx.keeps else exchange.each)(_drain(kvs)):
                q, lse = queries.popleft(), lses.popleft().flatten(0, 1)
                of_heads = slice(first, first + q.size(2))
                first = of_heads.stop
                rows = dout[:, :, of_heads]
                rows = rows, q, stand_in(rows, deltas[:, :, of_heads])
                rows = [_by_query_group(t, whole.size(2)) for t in rows]
                if sinks is not None:
                    of_sinks = _of_heads(sinks, of_heads, ctx.kv_heads, batch)
                    dsink = flash.sinks_backward(rows[0], rows[2], lse, of_sinks)
                    dsinks[of_heads] = dsink.view(batch, -1).sum(0)
                dq, dwhole = _attend_backward(
                    *rows, local, whole, works, lse, ctx.layout, ctx.tiles, ctx.kernel,
                    ctx.dropout and ctx.dropout.of_heads(of_heads),
                )
                grads[0].append(_as_tokens(dq, batch).flatten(2, 3))
                if leaving is not None:
                    _unpack(leaving.wait(), *grads[1:])
                leaving = exchange.scatter(dwhole)
                del local, whole, works, q, rows, dq, dwhole  # before the next but one is gathered
            _unpack(leaving.wait(), *grads[1:])
            del leaving
        return *map(_joined, grads), dsinks, None, None, None, None


class KeptKV(GatheredKV):
    """The same, with K and V kept for the backward as they were gathered: 2·N·kv less to send, and
    2·N·kv elements a layer instead of 2·N·kv/D in memory."""

    @staticmethod
    def forward(ctx, *args):
        return GatheredKV.forward(ctx, *args, keep=True)


#: Below this many gathered bytes a smaller exchange saves little memory and costs its latency.
_WORTH_SPLITTING = 4 * 2**20
#: Above this many, fewer heads go at a time.
_TOO_MANY = 128 * 2**20
#: The same backward, where four such buffers live: what arrives and what leaves, two of each. Not
#: forward: there a kernel's parallel work is its heads and its blocks of local queries.
_TOO_MANY_BACKWARD = 64 * 2**20


def _head_groups(k: Tensor, size: int) -> list[slice]:
    """KV heads by exchange: an owner's share at a time (one head where D exceeds them), more while
    they are small, fewer where they are large."""
    heads = k.size(2)
    step = heads // size if heads % size == 0 else 1
    one = _gathered_head(k, size)
    step *= max(1, _WORTH_SPLITTING // (step * one))
    step = min(step, max(1, _TOO_MANY // one))
    return [slice(at, min(at + step, heads)) for at in range(0, heads, step)]


def _cut_groups(groups: list[slice], size: int) -> list[slice]:
    """Groups of at most `size` heads, as `_pieces` cuts the others."""
    return [
        slice(at, min(at + size, heads.stop))
        for heads in groups
        for at in range(heads.start, heads.stop, size)
    ]


def _heads_backward(k: Tensor, size: int) -> int:
    """How many KV heads of a group go at a time in the backward."""
    return max(1, _TOO_MANY_BACKWARD // _gathered_head(k, size))


def _gathered_head(k: Tensor, size: int) -> int:
    """Bytes of K and V of a head, gathered."""
    return 2 * k[:, :, :1].numel() * k.element_size() * size


def _pieces(t: Tensor, size: int, dim: int) -> list[Tensor]:
    """Memory of its own for each `size` along a dimension."""
    return [piece.contiguous() for piece in t.split(size, dim)]


def _drain(tensors: deque[Tensor]) -> Iterator[Tensor]:
    """Each in turn, which is let go."""
    while tensors:
        yield tensors.popleft()


def _unpack(dkv: Tensor, dks: list[Tensor], dvs: list[Tensor]) -> None:
    """A head group's dK and dV [s/D, b, g, 2, d] to the others, each in memory of its own."""
    for grads, grad in zip((dks, dvs), dkv.unbind(3), strict=True):
        grads.append(grad.contiguous())


def _joined(pieces: list[Tensor]) -> Tensor:
    """All heads of [s/D, b, some heads, d] each; the pieces are let go."""
    whole = torch.cat(pieces, 2)
    pieces.clear()
    return whole


def _of_heads(sinks: Tensor | None, heads: slice, kv_heads: int, batch: int) -> Tensor | None:
    """The sinks of some query heads as the kernels want them: [b·g, rep]."""
    if sinks is None:
        return None
    return sinks[heads].view(-1, sinks.size(0) // kv_heads).repeat(batch, 1)


def _attend(queries, local, whole, works, sinks, target, layout, tiles, kernel, dropout) -> Tensor:
    """Write the attention of one head group into target [s/D, b, g, rep, d]; returns its lse."""
    kv_heads, batch = whole.size(2), whole.size(1)
    q = _by_query_group(queries, kv_heads)
    (here, elsewhere), drops = tiles, layout.drops(dropout, q)
    # What is local comes first, before the gather is waited for.
    k, v = (_by_query_group(t, kv_heads) for t in local.unbind(3))
    part = flash.attend(q, k, v, here, kernel, None, drops[0])
    wait_all(works)
    k, v = (_by_query_group(t, kv_heads) for t in whole.unbind(3))
    out, lse = flash.attend(q, k, v, elsewhere, kernel, part, drops[1])
    if sinks is not None:
        out, lse = flash.with_sinks(out, lse, sinks)
    target.copy_(_as_tokens(out, batch))
    return lse


def _attend_backward(
    dout, q, out, local, whole, works, lse, layout, tiles, kernel, dropout
) -> tuple[Tensor, Tensor]:
    """dq of one head group, and this rank's part of dK and dV, like whole."""
    kv_heads = whole.size(2)
    (here, elsewhere), drops = tiles, layout.drops(dropout, q)
    dq, dlocal, dwhole = (torch.zeros_like(t) for t in (q, local, whole))

    def add(keys, dkeys, tiles, drop):
        of_heads = (_by_query_group(t, kv_heads) for two in (keys, dkeys) for t in two.unbind(3))
        k, v, dk, dv = of_heads
        flash.attend_backward(dout, q, k, v, out, lse, tiles, kernel, dq, dk, dv, drop)

    add(local, dlocal, here, drops[0])
    for chunk in layout.own():
        dwhole[layout.gathered(chunk)] = dlocal[chunk.at : chunk.at + layout.chunk]
    wait_all(works)
    add(whole, dwhole, elsewhere, drops[1])
    return dq, dwhole
