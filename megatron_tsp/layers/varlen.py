"""Many tiles in one call: documents of all lengths, for the kernels that take them (`packs`).

Every document is a tile of its own, and so many launches of a kernel on so few tokens each would
cost more than the attention. Tiles of one kind are copied one behind the other instead, from all
samples, and the kernel gets the lengths. Tiles that share a query or a key go in different calls,
so that results can be added where they belong without two of them meeting.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_tsp.layers.kernels import Kernel, Lengths
from megatron_tsp.layers.mask import Tile

#: Up to so many tiles of a kind are called one by one, which copies nothing.
_FEW = 4


class Rows(NamedTuple):
    """Where packed tokens come from.

    Attributes:
        samples: how many the micro-batch is cut into.
        sample, place: int64 [tokens], the sample of each and its position in its tensor.
    """

    samples: int
    sample: Tensor
    place: Tensor

    def take(self, t: Tensor) -> Tensor:
        """[B, H, s, ...] → [tokens, B/samples·H, ...], a copy."""
        return self._by_sample(t)[self.sample, :, :, self.place].flatten(1, 2)

    def put(self, t: Tensor, packed: Tensor) -> None:
        """The inverse, written into t."""
        by_sample = self._by_sample(t)
        packed = packed.unflatten(1, by_sample.shape[1:3])
        by_sample[self.sample, :, :, self.place] = packed.to(t.dtype)

    def add(self, t: Tensor, packed: Tensor) -> None:
        """The inverse, added to t."""
        self.put(t, self.take(t).add_(packed))

    def _by_sample(self, t: Tensor) -> Tensor:
        return t.unflatten(0, (self.samples, -1))


class Pack(NamedTuple):
    """Tiles of one kind of which no two share a query or a key, as one call.

    Attributes:
        first: the first of the tiles, for what is the same for all of them, and to tell packs
            apart.
        queries, keys: the rows of all of them; those of an edge in reverse order.
        lengths: of the tiles.
    """

    first: Tile
    queries: Rows
    keys: Rows
    lengths: Lengths


def calls(tiles: Iterable[Tile], kernel: Kernel, q: Tensor) -> list[Tile | Pack]:
    """The tiles as they are to be called, causal ones first; packed where that is worth it."""
    tiles = list(tiles)
    if len(tiles) <= _FEW or not kernel.packs(q):
        return tiles
    return _packed(tuple(tiles), q.device)


@lru_cache(maxsize=8)  # the layers of a micro-batch have the same tiles, forward and backward
def _packed(tiles: tuple[Tile, ...], device: torch.device) -> list[Tile | Pack]:
    found: list[Tile | Pack] = []
    for kind in ("causal", "full", "edge"):
        of_kind = [tile for tile in tiles if tile.kind == kind]
        if len(of_kind) <= _FEW:
            found += of_kind
        else:
            found += [_pack(group, device) for group in _disjoint(of_kind)]
    return found


def _disjoint(tiles: Sequence[Tile]) -> list[list[Tile]]:
    """The tiles in groups, no query and no key twice in one; as few as come easily."""
    length = max(max(tile.queries.stop, tile.keys.stop) for tile in tiles)
    groups: list[list[Tile]] = []
    taken: list[dict[tuple, bytearray]] = []
    for tile in tiles:
        needed = {("queries", tile.sample): tile.queries, ("keys", tile.sample): tile.keys}
        free = (not any(1 in there[side][at] for side, at in needed.items()) for there in taken)
        group = next((number for number, is_free in enumerate(free) if is_free), len(groups))
        if group == len(groups):
            groups.append([])
            taken.append(defaultdict(lambda: bytearray(length)))
        groups[group].append(tile)
        for side, at in needed.items():
            taken[group][side][at] = b"\1" * (at.stop - at.start)
    return groups


def _pack(tiles: Sequence[Tile], device: torch.device) -> Pack:
    queries, longest_q, cumulated_q = _rows(tiles, [tile.queries for tile in tiles], device)
    keys, longest_k, cumulated_k = _rows(tiles, [tile.keys for tile in tiles], device)
    return Pack(
        tiles[0], queries, keys, Lengths(cumulated_q, cumulated_k, longest_q, longest_k)
    )


def _rows(
    tiles: Sequence[Tile], places: Sequence[slice], device: torch.device
) -> tuple[Rows, int, Tensor]:
    """(the rows, tokens of the longest sequence, cumulated lengths), a block a sequence."""
    each = [(at.stop - at.start) // tile.blocks for tile, at in zip(tiles, places, strict=True)]
    blocks = torch.tensor([tile.blocks for tile in tiles])
    lengths = torch.tensor(each).repeat_interleave(blocks)
    starts = torch.tensor(
        [at.start + n * length
         for tile, at, length in zip(tiles, places, each, strict=True)
         for n in range(tile.blocks)]
    )  # fmt: skip
    cumulated = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    place = torch.arange(int(cumulated[-1])) - cumulated[:-1].repeat_interleave(lengths)
    if tiles[0].kind == "edge":
        place = (lengths - 1).repeat_interleave(lengths) - place
    place += starts.repeat_interleave(lengths)
    sample = torch.tensor([tile.sample[0] for tile in tiles]).repeat_interleave(blocks)
    sample = sample.repeat_interleave(lengths)
    rows = Rows(tiles[0].sample[1], sample.to(device), place.to(device))
    return rows, max(each), cumulated.to(device, torch.int32)
