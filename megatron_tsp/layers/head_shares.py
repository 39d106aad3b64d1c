"""Which heads each rank takes when tokens are exchanged for heads, and how many at a time.

Plain arithmetic. Query heads go in order, n/D to a rank; a KV head goes to the ranks that have
queries for it and to no other, so to one rank where there are enough KV heads.
"""

from typing import NamedTuple


class Share(NamedTuple):
    """The heads of one rank: consecutive query heads, and the KV heads that these attend to."""

    query: slice
    kv: slice


class Chunk(NamedTuple):
    """Heads that are exchanged at a time.

    Attributes:
        query, kv: each rank's heads, among all.
        begins, ends: these queries are the first, the last, of these KV heads: k and v come with
            the first, dk and dv leave with the last.
        calls: (query heads, their KV heads) among the own heads of this chunk, with as many queries
            to each KV head: what a kernel can do at once.
    """

    query: list[slice]
    kv: list[slice]
    begins: bool
    ends: bool
    calls: list[tuple[slice, slice]]


def shares(heads: int, kv_heads: int, ranks: int) -> list[Share]:
    """Every rank's heads; `ranks` divides `heads`."""
    each, group = heads // ranks, heads // kv_heads
    return [
        Share(slice(first, first + each), slice(first // group, (first + each - 1) // group + 1))
        for first in range(0, heads, each)
    ]


def chunks(heads: int, kv_heads: int, ranks: int, rank: int, least: int) -> list[Chunk]:
    """Chunks of at least `least` query heads of each rank (the last may be smaller), alike on all
    ranks but for `calls`."""
    owners = shares(heads, kv_heads, ranks)
    each, group = heads // ranks, heads // kv_heads
    if each % group and group % each:  # ranks cut a KV head's queries differently: all at once
        calls = _by_kv_head(owners[rank], group)
        return [Chunk([o.query for o in owners], [o.kv for o in owners], True, True, calls)]
    # Whole KV heads with all their queries, or queries of the only one.
    step = -(-least // group) * group if each % group == 0 else least
    cuts = [(at, min(at + step, each)) for at in range(0, each, step)]
    return [
        Chunk(
            [slice(o.query.start + first, o.query.start + last) for o in owners],
            [_kv(o.query.start + first, o.query.start + last, group) for o in owners],
            begins=each % group == 0 or first == 0,
            ends=each % group == 0 or last == each,
            calls=[(slice(0, last - first), slice(0, -(-(last - first) // group)))],
        )
        for first, last in cuts
    ]


def _kv(first: int, last: int, group: int) -> slice:
    """The KV heads of query heads [first, last)."""
    return slice(first // group, (last - 1) // group + 1)


def _by_kv_head(share: Share, group: int) -> list[tuple[slice, slice]]:
    calls = []
    for at, kv in enumerate(range(share.kv.start, share.kv.stop)):
        first, last = max(kv * group, share.query.start), min((kv + 1) * group, share.query.stop)
        of_query = slice(first - share.query.start, last - share.query.start)
        calls.append((of_query, slice(at, at + 1)))
    return calls
