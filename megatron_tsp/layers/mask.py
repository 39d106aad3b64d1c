"""Which keys a query sees, as tiles of the sequence: no s x s mask ever exists.

A query sees its past: itself and the tokens before it, of its own document, at most `window` back.
Seen from a chunk of queries that region is a few rectangles and triangles, and any attention kernel
that knows "causal" can do each of them:

    full     every query sees every key
    causal   a square: query i sees keys 0 to i
    edge     a square: query i sees keys i to the last. The far end of a window; it is the causal
             square with queries and keys in reverse order

Plain arithmetic on positions; the tensors are `flash.attend`'s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_tsp.errors import TSPError


class Span(NamedTuple):
    """Tokens side by side: positions [start, stop) of the sequence, from `at` on in a tensor."""

    start: int
    stop: int
    at: int = 0

    def place(self, start: int, stop: int) -> slice:
        """Where positions [start, stop) of it lie in the tensor."""
        return slice(self.at + start - self.start, self.at + stop - self.start)


class Tile(NamedTuple):
    """A part of the attention that a causal kernel can compute.

    Attributes:
        queries, keys: where they lie in their tensors.
        kind: "full", "causal" or "edge".
        blocks: both are cut in so many equal pieces, and piece i meets piece i only.
        sample: (which, of how many) of the micro-batch; (0, 1) is all of it at once.
    """

    queries: slice
    keys: slice
    kind: str
    blocks: int = 1
    sample: tuple[int, int] = (0, 1)

    def pairs(self) -> int:
        """Query-key pairs that see each other, in a sample."""
        rows = (self.queries.stop - self.queries.start) // self.blocks
        columns = (self.keys.stop - self.keys.start) // self.blocks
        seen = rows * columns if self.kind == "full" else rows * (rows + 1) // 2
        return self.blocks * seen


@dataclass(frozen=True)
class Mask:
    """What a query sees of its past.

    Attributes:
        window: how many tokens before itself, as the left of Megatron's --window-size; None: all.
        documents: for each sample of the micro-batch where its documents begin, and its length, as
            cu_seqlens: (0, ..., s). None: a sample is one document.

    Raises:
        TSPError: the window is negative, or a sample's boundaries do not ascend from 0.
    """

    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 0:
            raise TSPError(f"attention window {self.window}: it is a number of tokens, from 0")
        for bounds in self.documents or ():
            if bounds[0] != 0 or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
                raise TSPError(f"document boundaries {bounds} do not ascend from 0")

    def tiles(self, queries: Span, keys: Sequence[Span]) -> list[Tile]:
        """The tiles in which `queries` see `keys`, those on the diagonal first.

        Args:
            queries: consecutive tokens, e.g. a chunk.
            keys: in the order in which they lie in their tensor. A span lies before all of the
                queries, or holds the positions of all of them, or is seen by none.
        """
        found: list[Tile] = []
        for sample, bounds in self._samples(queries.stop):
            for begin, end in zip(bounds, bounds[1:], strict=False):
                first, last = max(begin, queries.start), min(end, queries.stop)
                if first >= last:
                    continue
                for span in keys:
                    for rows, columns, kind, blocks in self._seen(first, last, begin, span):
                        tile = Tile(
                            queries.place(*rows), span.place(*columns), kind, blocks, sample
                        )
                        _append(found, tile)
        return sorted(found, key=lambda tile: tile.kind != "causal")

    def _samples(self, stop: int) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
        if self.documents is None:
            yield (0, 1), (0, stop)
        else:
            for at, bounds in enumerate(self.documents):
                yield (at, len(self.documents)), bounds

    def _seen(self, first: int, last: int, begin: int, span: Span):
        """((queries), (keys), kind, blocks), by position, of one document's queries in a span."""
        start, stop = max(span.start, begin), min(span.stop, first)
        if start < stop:
            yield from self._before(first, last, start, stop)
        if span.start <= first and last <= span.stop:
            yield from self._diagonal(first, last)

    def _diagonal(self, first: int, last: int):
        """Queries [first, last) and the same keys."""
        window, length = self.window, last - first
        if window is None or length <= window + 1:
            yield (first, last), (first, last), "causal", 1
            return
        step = max(window, 1)
        blocks, rest = divmod(length, step)
        whole = last - rest
        yield (first, whole), (first, whole), "causal", blocks
        if rest:
            yield (whole, last), (whole, last), "causal", 1
        if window and blocks > 1:  # a block and the one before it
            yield (first + step, whole), (first, whole - step), "edge", blocks - 1
        if window and rest:
            yield from self._before(whole, last, whole - step, whole)

    def _before(self, first: int, last: int, start: int, stop: int):
        """Queries [first, last) and keys [start, stop) that all lie before them."""
        if self.window is None:
            yield (first, last), (start, stop), "full", 1
            return
        start = max(start, first - self.window)
        last = min(last, stop + self.window)
        if start >= stop or first >= last:
            return
        part = min(last, start + self.window)  # from this query on, keys fall out of the window
        if first < part:
            yield (first, part), (start, stop), "full", 1
        if part < last:
            out = last - self.window
            yield (part, last), (start, out), "edge", 1
            if out < stop:
                yield (part, last), (out, stop), "full", 1


def _append(tiles: list[Tile], tile: Tile) -> None:
    """Add a tile; as part of the last one if both are full and lie side by side."""
    if tiles and tile.kind == tiles[-1].kind == "full":
        last = tiles[-1]
        same = last.queries == tile.queries and last.sample == tile.sample
        if same and last.keys.stop == tile.keys.start:
            tiles[-1] = last._replace(keys=slice(last.keys.start, tile.keys.stop))
            return
    tiles.append(tile)
