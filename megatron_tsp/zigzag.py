"""The token layout: which positions of the sequence a rank owns.

The sequence is cut into 2D equal chunks and rank r owns chunks r and 2D-1-r, in this order. Under
causal attention an early chunk is cheap and a late one dear; the pair costs every rank the same.
It is the layout that Megatron's context parallelism uses, so RoPE slices agree with it.

    D = 4, chunks   0  1  2  3  4  5  6  7
            rank    0  1  2  3  3  2  1  0

A tensor gathered over the ranks is *rank-major* (rank 0's tokens, then rank 1's, ...); in *natural*
order the positions ascend. With D = 1 both are the sequence itself.
"""

import torch
from torch import Tensor

from megatron_tsp.errors import TSPError


def chunk_length(seq_length: int, degree: int) -> int:
    """Tokens in one of the 2D chunks.

    Raises:
        TSPError: `seq_length` is not a positive multiple of 2 * `degree` (for degree > 1).
    """
    if degree < 1:
        raise TSPError(f"the TSP degree must be at least 1, not {degree}")
    if degree == 1:
        return seq_length
    cut = 2 * degree
    if seq_length <= 0 or seq_length % cut:
        below = seq_length // cut * cut
        near = f"{below} or {below + cut}" if below > 0 else f"{cut}"
        raise TSPError(
            f"sequence length {seq_length} cannot be cut into 2 x {degree} equal chunks; "
            f"use a multiple of {cut}: the nearest are {near}"
        )
    return seq_length // cut


def chunks_of(rank: int, degree: int) -> tuple[int, ...]:
    """The chunks that `rank` owns, in the order in which it keeps them."""
    return (0,) if degree == 1 else (rank, 2 * degree - 1 - rank)


def positions(seq_length: int, degree: int, rank: int, device=None) -> Tensor:
    """Global positions of the rank's tokens: int64 [s/D], in local order."""
    length = chunk_length(seq_length, degree)
    starts = (chunk * length for chunk in chunks_of(rank, degree))
    return torch.cat([torch.arange(s, s + length, device=device) for s in starts])


def take(full: Tensor, dim: int, degree: int, rank: int) -> Tensor:
    """The rank's tokens of a tensor that holds the whole sequence along `dim`.

    Args:
        full: [..., s, ...] in natural order, any dtype.

    Returns:
        [..., s/D, ...]; a view of `full` when D = 1, a new tensor otherwise.
    """
    length = chunk_length(full.size(dim), degree)
    if degree == 1:
        return full
    chunks = chunks_of(rank, degree)
    return torch.cat([full.narrow(dim, c * length, length) for c in chunks], dim)


def to_natural(gathered: Tensor, dim: int, degree: int) -> Tensor:
    """A rank-major tensor in natural order: the inverse of `take` over all ranks.

    Args:
        gathered: [..., s, ...], the ranks' tokens one after the other along `dim`.
    """
    length = chunk_length(gathered.size(dim), degree)
    if degree == 1:
        return gathered
    # Chunk c of the sequence is the first one of rank c, or the second one of rank 2D-1-c.
    order = [2 * c if c < degree else 2 * (2 * degree - 1 - c) + 1 for c in range(2 * degree)]
    return torch.cat([gathered.narrow(dim, at * length, length) for at in order], dim)


def causal_pairs(seq_length: int, degree: int, rank: int) -> int:
    """Query-key pairs that causal attention costs the rank: the work that zigzag balances."""
    return int((positions(seq_length, degree, rank) + 1).sum())
