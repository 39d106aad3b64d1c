"""Attention dropout: a hash of who looks at whom says which probabilities are dropped.

Query i of head n of sample m drops key j by a function of (key, m, n, i, j), with places in the
whole batch, model and sequence. So the mask is the same however tokens and heads are spread, it is
not kept for the backward, and no part of it exists longer than its tile. `key` is drawn once for
each layer and micro-batch, from Megatron's random state (`draw`).

As in Megatron's core attention, what is left of the probabilities is scaled by 1/(1-p), and their
sum is taken before the drop. So the log-sum-exp knows of no dropout, parts of a softmax merge as
without it, and Σ dout·out is still what the backward takes from out (arXiv 2205.14135, appendix B).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from torch import Tensor

from megatron_tsp.layers.flash import cut
from megatron_tsp.layers.mask import Span, Tile

# Odd constants of the 64-bit mixer (Steele, Lea, Flood 2014; Stafford's variant 13) and of the
# 32-bit one of MurmurHash3, both in the public domain.
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MUR1, _MUR2 = 0x85EBCA6B, 0xC2B2AE35


class Dropout(NamedTuple):
    """The dropout of one layer and micro-batch.

    Attributes:
        p: probability of a drop, from 0 to below 1.
        key: 63 random bits, the same on all ranks that share a sequence.
        samples: of the micro-batch.
        heads: query heads of the layer, on all ranks.
        first: which of them comes first here.
    """

    p: float
    key: int
    samples: int
    heads: int
    first: int = 0

    def of_heads(self, some: slice) -> "Dropout":
        """The same for some of these heads."""
        return self._replace(first=self.first + some.start)

    def of(self, q: Tensor, queries: Iterable[Span], keys: Iterable[Span]) -> "Between":
        """The dropout between some queries and keys.

        Args:
            q: as a kernel takes it, [samples · G, H, sq, d]; heads ascend.
            queries, keys: where they lie in the sequence, and in their tensors.
        """
        return Between(self, q, sorted(queries, key=_place), sorted(keys, key=_place))


class Between:
    """The dropout between some queries and keys; `Dropout.of` makes it."""

    def __init__(self, dropout, q, queries, keys):
        self.dropout, self.queries, self.keys = dropout, queries, keys
        self.shape, self.device = q.shape[:2], q.device
        self._hashed: tuple[Tensor, Tensor] | None = None

    def hashed(self) -> tuple[Tensor, Tensor]:
        """Of each query 64 bits, int32 [B, H, sq, 2]; of each key 32, int32 [B, 1, sk]."""
        if self._hashed is None:
            _, key, samples, heads, first = self.dropout
            batch, each = self.shape
            head = torch.arange(batch * each // samples, device=self.device) + first
            sample = torch.arange(samples, device=self.device) * heads
            rows = (sample[:, None] + head).view(batch, each, 1) << 32
            rows = _mixed(rows + _positions(self.queries, self.device), key)
            columns = _mixed(_positions(self.keys, self.device), key ^ _GOLDEN)
            rows = torch.stack((_low(rows), _low(rows >> 32)), -1)
            self._hashed = rows, _low(columns).expand(batch, 1, -1)
        return self._hashed

    def in_tile(self, tile: Tile) -> "TileDropout":
        """What a kernel needs for one tile."""
        head = tile.sample[0] * self.dropout.heads + self.dropout.first
        where = (head, _at(self.queries, tile.queries.start), _at(self.keys, tile.keys.start))
        seed = self.dropout.key
        for place in where:
            seed = mixed(place, seed)
        return TileDropout(self.dropout.p, seed >> 1, self, tile)


class TileDropout(NamedTuple):
    """What a kernel is told of the dropout, for one call.

    A kernel with a random generator of its own takes `p` and `seed`. Another one asks `keeps`.

    Attributes:
        p: probability of a drop.
        seed: 63 bits, other ones for each call of the forward, on any rank; the same for the
            backward of the same tile.
    """

    p: float
    seed: int
    between: Between
    tile: Tile

    def hashed(self) -> tuple[Tensor, Tensor]:
        """For `keeps`: of the call's queries, int32 [B, H, sq, 2], and of its keys, [B, 1, sk]."""
        rows, columns = self.between.hashed()
        return cut(rows, self.tile, self.tile.queries), cut(columns, self.tile, self.tile.keys)

    def keeps(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Which probabilities stay: bool [..., rows, columns].

        Args:
            rows: int32 [..., rows, 2]; columns: int32 [..., columns]; parts of what `hashed`
                returns.
        """
        x = rows[..., :1] + columns.unsqueeze(-2)  # wraps around
        spare = torch.empty_like(x)
        _shift(x, 16, spare).mul_(_signed(_MUR1, 32)).bitwise_xor_(rows[..., 1:])
        _shift(x, 13, spare).mul_(_signed(_MUR2, 32))
        return x >= round(self.p * 2**32) - 2**31


def _shift(x: Tensor, bits: int, spare: Tensor) -> Tensor:
    """x ^= x >> bits, in place, as if x were unsigned."""
    torch.bitwise_right_shift(x, bits, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_(2 ** (32 - bits) - 1))


def draw() -> int:
    """63 bits for one layer and micro-batch, from Megatron's random state.

    The state is the one that the ranks of a tensor-parallel group share, and context-parallel ranks
    with them; checkpoints hold it, and recompute rewinds it. Data-parallel ranks share it too,
    unless --data-parallel-random-init is given, and have other samples: their bits differ here.
    """
    with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
        bits = _bits()
    return mixed(mpu.get_data_parallel_rank(), bits) >> 1


def _bits() -> int:
    """Drawn from the device's generator, without waiting for the device."""
    if not torch.cuda.is_available():
        return int(torch.randint(2**63 - 1, (), device="cpu").item())
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # as any operator that draws; in units of 4
    return mixed(offset, generator.initial_seed())


def mixed(number: int, key: int) -> int:
    """64 bits that depend on all bits of both."""
    x = (number * _GOLDEN + key) & (2**64 - 1)
    x = (x ^ (x >> 30)) * _MIX1 & (2**64 - 1)
    x = (x ^ (x >> 27)) * _MIX2 & (2**64 - 1)
    return x ^ (x >> 31)


def _mixed(numbers: Tensor, key: int) -> Tensor:
    """`mixed` of int64 numbers, which wrap around."""
    x = numbers * _signed(_GOLDEN, 64) + _signed(key, 64)
    for bits, factor in ((30, _MIX1), (27, _MIX2)):
        x = (x ^ ((x >> bits) & (2 ** (64 - bits) - 1))) * _signed(factor, 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def _signed(number: int, bits: int) -> int:
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def _low(x: Tensor) -> Tensor:
    """The low 32 bits of int64."""
    return ((x & (2**32 - 1)) - 2**31).to(torch.int32)


def _place(span: Span) -> int:
    return span.at


def _positions(spans: Sequence[Span], device) -> Tensor:
    """The places in the sequence of what a tensor holds: int64 [s]."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _at(spans: Iterable[Span], at: int) -> int:
    """The place in the sequence of one of them."""
    return next(s.start + at - s.at for s in spans if 0 <= at - s.at < s.stop - s.start)
