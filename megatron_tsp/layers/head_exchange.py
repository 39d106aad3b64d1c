"""Attention exchange `alltoall`: tokens for heads, attention, heads for tokens.

Each rank gives away all but its share of the heads (`head_shares`) and gets that share for the
whole sequence, so that plain attention does the work (DeepSpeed-Ulysses' idea, arXiv 2309.14509,
here on the axis that shards the weights as well). It moves (2h + 2kv)·N/D elements each way; the
gather moves 2·N·kv. Heads go in chunks: while one computes, the next one is on its way.

Kept for the backward are q, k and v by heads, a chunk each, which go when the chunk's gradients are
there, and the output by tokens, which the projection behind it keeps anyway. By heads it would
serve for one number a row, delta (`layers/delta.py`): that is computed where the tokens are, and
travels.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers import flash
from megatron_tsp.layers.delta import delta, stand_in
from megatron_tsp.layers.head_shares import Chunk, chunks, shares
from megatron_tsp.layers.mask import Span
from megatron_tsp.traffic import block as label

#: Below this many bytes of queries a smaller exchange saves little memory and costs its latency.
_WORTH_SPLITTING = 4 * 2**20


class _Arrival(NamedTuple):
    """What is on its way, and what makes the result of it."""

    work: dist.Work | None
    finish: Callable

    def wait(self, *args):
        """The result; `args` as `finish` takes them."""
        return self.arrived().finish(*args)

    def arrived(self) -> "_Arrival":
        """The same, there: nothing of what was sent is held any more."""
        if self.work is not None:
            self.work.wait()
        return _Arrival(None, self.finish)


class _Exchange:
    """Between [s/D, b, all heads, d] of local tokens and [s, b, own heads, d] in natural order."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    def to_heads(self, local: Tensor, parts: Sequence[slice]) -> _Arrival:
        """Start to give each rank its part of the heads, for the own tokens."""
        own = local[:, :, parts[self.rank]]
        if self.size == 1:
            return _Arrival(None, own.contiguous)
        leaving = [local[:, :, part].reshape(-1) for part in parts]
        arriving = local.new_empty(self.size * own.size(0), *own.shape[1:])
        work = self._start(arriving.view(-1), leaving, [own.numel()] * self.size)
        return _Arrival(work, lambda: zigzag.to_natural(arriving, 0, self.size))

    def to_tokens(self, heads: Tensor, parts: Sequence[slice]) -> _Arrival:
        """Start the inverse. Its result is made by finish(into, add=False): each rank's part is put
        into, or added to, its heads of `into`."""
        if self.size == 1:
            sizes, work, arriving = [heads.numel()], None, heads.reshape(-1)
        else:
            leaving = [zigzag.take(heads, 0, self.size, r).reshape(-1) for r in range(self.size)]
            own = heads[:, :, 0].numel() // self.size
            sizes = [own * (part.stop - part.start) for part in parts]
            arriving = heads.new_empty(sum(sizes))
            work = self._start(arriving, leaving, sizes)

        def finish(into: Tensor, add: bool = False) -> None:
            for part, values in zip(parts, arriving.split(sizes), strict=True):
                place = into[:, :, part]
                (place.add_ if add else place.copy_)(values.view(place.shape))

        return _Arrival(work, finish)

    def _start(self, arriving: Tensor, leaving: list[Tensor], sizes: list[int]) -> dist.Work:
        return dist.all_to_all_single(
            arriving, torch.cat(leaving), sizes, [t.numel() for t in leaving], self.group, True
        )


def _ahead(steps: Sequence[Chunk], begin: Callable) -> Iterator[tuple[Chunk, list]]:
    """(chunk, what `begin` started for it, arrived), with the next chunk's on its way."""
    begun = begin(steps[0])
    for at, chunk in enumerate(steps):
        arriving, begun = begun, begin(steps[at + 1]) if at + 1 < len(steps) else []
        yield chunk, _wait(arriving)


def _wait(arrivals: list[_Arrival], *args) -> list:
    """The results; `arrivals` is empty then: an operation keeps what it sent while it is held."""
    return [arrivals.pop(0).wait(*args) for _ in range(len(arrivals))]


class ExchangedHeads(torch.autograd.Function):
    """q [s/D, b, n, d], k and v [s/D, b, g, d] → [s/D, b, n, d]; arguments as `GatheredKV`."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, group, kernel, mask, dropout=None):
        exchange = _Exchange(group)
        whole = Span(0, q.size(0) * exchange.size)
        tiles, steps = mask.tiles(whole, [whole]), _steps(q, k, exchange)
        local = torch.empty_like(q, memory_format=torch.contiguous_format)
        kept, leaving, kv = [], [], []

        def begin(chunk: Chunk) -> list[_Arrival]:
            kv = ((k, chunk.kv), (v, chunk.kv)) if chunk.begins else ()
            return [exchange.to_heads(*each) for each in ((q, chunk.query), *kv)]

        with label("attention"):
            for chunk, (queries, *arrived) in _ahead(steps, begin):
                kept += [queries, *arrived]
                kv = arrived or kv
                out = torch.empty_like(queries)
                for at, (rows, into), keys in _calls(chunk, exchange.rank, (queries, out), kv):
                    drops = dropout and dropout.of_heads(at).of(rows, [whole], [whole])
                    part, lse = flash.attend(rows, *keys, tiles, kernel, None, drops)
                    if sinks is not None:
                        part, lse = flash.with_sinks(part, lse, _of_heads(sinks[at], lse))
                    into.copy_(part)
                    kept.append(lse)
                _wait(leaving, local)
                leaving = [exchange.to_tokens(out, chunk.query)]
            _wait(leaving, local)
        ctx.group, ctx.kernel, ctx.tiles, ctx.steps = group, kernel, tiles, steps
        ctx.kv_heads, ctx.dropout, ctx.whole = k.size(2), dropout, ([whole], [whole])
        ctx.save_for_backward(local, sinks, *kept)
        return local

    @staticmethod
    def backward(ctx, dlocal):
        local, sinks, *kept = ctx.saved_tensors
        # From here on what is kept lives as long as these names (unless the graph is retained).
        ctx.maybe_clear_saved_tensors()
        kept, exchange = deque(kept), _Exchange(ctx.group)
        owners = shares(local.size(2), ctx.kv_heads, exchange.size)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        leaving, grads = [], ([], [], [])  # of q, k and v: what arrives, chunk by chunk
        with label("attention"):
            deltas = delta(dlocal, local)
            del local
            deltas = exchange.to_heads(deltas, [o.query for o in owners]).wait()
            deltas = iter(deltas.split([c.query[0].stop - c.query[0].start for c in ctx.steps], 2))
            for chunk, (dout,) in _ahead(
                ctx.steps, lambda chunk: [exchange.to_heads(dlocal, chunk.query)]
            ):
                queries = kept.popleft()
                if chunk.begins:
                    kv = kept.popleft(), kept.popleft()
                    dkv = [torch.zeros_like(t) for t in kv]
                out, dq = stand_in(dout, next(deltas)), torch.zeros_like(queries)
                by_query, by_key = (dout, queries, out, dq), (*kv, *dkv)
                for at, (*rows, drows), keys in _calls(chunk, exchange.rank, by_query, by_key):
                    lse = kept.popleft()
                    # rows: dout, q, out; keys: k, v, dk, dv
                    drops = ctx.dropout and ctx.dropout.of_heads(at).of(rows[1], *ctx.whole)
                    flash.attend_backward(
                        *rows[:2], *keys[:2], rows[2], lse, ctx.tiles, ctx.kernel, drows,
                        *keys[2:], drops,
                    )  # fmt: skip
                    if sinks is not None:
                        dsink = flash.sinks_backward(
                            rows[0], rows[2], lse, _of_heads(sinks[at], lse)
                        )
                        dsinks[at] = dsink.view(dlocal.size(1), -1).sum(0)
                _arrive(leaving, grads)
                leaving.append(exchange.to_tokens(dq, chunk.query))
                del dout, queries, out, dq, by_query, by_key, rows, drows, keys
                if chunk.ends:
                    leaving += [exchange.to_tokens(part, chunk.kv) for part in dkv]
                    del kv, dkv
            _arrive(leaving, grads)
        # Parts of one KV head's gradient from several ranks are summed in full precision.
        shared = sum(owner.kv.stop - owner.kv.start for owner in owners) > ctx.kv_heads
        dq, *dkv = (
            _whole(arrivals, dlocal, heads, shared and heads < dlocal.size(2))
            for arrivals, heads in zip(
                grads, (dlocal.size(2), ctx.kv_heads, ctx.kv_heads), strict=True
            )
        )
        return dq, *dkv, dsinks, None, None, None, None


def _arrive(leaving: list[_Arrival], grads: Sequence[list[_Arrival]]) -> None:
    """Wait for a chunk's gradients, of q and perhaps of k and v, and put each with its like."""
    for into in grads[: len(leaving)]:
        into.append(leaving.pop(0).arrived())


def _whole(arrivals: list[_Arrival], like: Tensor, heads: int, add: bool) -> Tensor:
    """[s/D, b, heads, d] of what has arrived, which is let go."""
    wide = torch.promote_types(like.dtype, torch.float32) if add else like.dtype
    result = like.new_zeros((*like.shape[:2], heads, like.size(3)), dtype=wide)
    while arrivals:
        arrivals.pop(0).finish(result, add)
    return result.to(like.dtype)


def _steps(q: Tensor, k: Tensor, exchange: _Exchange) -> list[Chunk]:
    """The chunks of heads for these tensors."""
    head = q[:, :, 0].numel() * exchange.size * q.element_size()  # bytes of one, whole sequence
    least = max(1, _WORTH_SPLITTING // head)
    return chunks(q.size(2), k.size(2), exchange.size, exchange.rank, least)


def _calls(
    chunk: Chunk, rank: int, by_query: Sequence[Tensor], by_key: Sequence[Tensor]
) -> Iterator[tuple[slice, list[Tensor], list[Tensor]]]:
    """For each call of the kernel: (query heads among all, tensors [b·g, n/g, s, d] of queries,
    tensors [b·g, 1, s, d] of keys), views all."""
    for of_query, of_kv in chunk.calls:
        groups = of_kv.stop - of_kv.start

        def views(tensors: Sequence[Tensor], heads: slice, groups=groups) -> list[Tensor]:
            parts = (t[:, :, heads] for t in tensors)
            return [t.view(len(t), t.size(1) * groups, -1, t.size(3)).permute(1, 2, 0, 3)
                    for t in parts]  # fmt: skip

        first = chunk.query[rank].start
        at = slice(first + of_query.start, first + of_query.stop)
        yield at, views(by_query, of_query), views(by_key, of_kv)


def _of_heads(sinks: Tensor, lse: Tensor) -> Tensor:
    """The sinks [n] of some heads beside their lse [b·g, n/g, s]: [b·g, n/g]."""
    return sinks.view(-1, lse.size(1)).repeat(lse.size(0) * lse.size(1) // len(sinks), 1)
