"""How evenly attention work falls on ranks: python -m benchmarks.balance

Query-key pairs of the busiest rank over the mean, for masks of a long sequence in zigzag order, and
with contiguous chunks of s/D tokens for comparison. Counted from the tiles that the kernels get.
"""

import random

from megatron_tsp import zigzag
from megatron_tsp.layers.kv_gather import _Layout
from megatron_tsp.layers.mask import Mask, Span

LENGTH, DEGREE, SAMPLES = 128 * 1024, 8, 20


def _documents(mean: int, seed: int) -> Mask:
    """Documents of random lengths (log-normal, sigma 1) with that mean."""
    generator, bounds = random.Random(seed), [0]
    while bounds[-1] < LENGTH:
        length = int(generator.lognormvariate(0, 1) * mean / 1.6487) + 1  # its mean is e^(1/2)
        bounds.append(min(bounds[-1] + length, LENGTH))
    return Mask(documents=(tuple(bounds),))


def _of_rank(mask: Mask, rank: int) -> int:
    here, elsewhere = _Layout(DEGREE, rank, zigzag.chunk_length(LENGTH, DEGREE)).tiles(mask)
    return sum(tile.pairs() for tile in here + elsewhere)


def _contiguous(mask: Mask, rank: int) -> int:
    part = LENGTH // DEGREE
    queries = Span(rank * part, (rank + 1) * part)
    before = [Span(0, queries.start)] if rank else []
    return sum(t.pairs() for keys in ([queries], before) for t in mask.tiles(queries, keys))


def _imbalance(masks: list[Mask], pairs) -> str:
    """Busiest over mean: its mean and its worst over the masks."""
    found = []
    for mask in masks:
        of_ranks = [pairs(mask, rank) for rank in range(DEGREE)]
        found.append(max(of_ranks) * DEGREE / sum(of_ranks))
    return f"{sum(found) / len(found):.2f} ({max(found):.2f})"


def _share(masks: list[Mask]) -> float:
    """Pairs over those of a causal mask, on average."""
    pairs = sum(_of_rank(mask, rank) for mask in masks for rank in range(DEGREE))
    return pairs / len(masks) / (LENGTH * (LENGTH + 1) // 2)


def main() -> None:
    """Print the table."""
    cases = {"causal": [Mask()], "window of 4096": [Mask(window=4095)]}
    for mean in (1024, 8192, 32768):
        masks = [_documents(mean, seed) for seed in range(SAMPLES)]
        cases[f"documents of {mean} on average"] = masks
    print(f"s {LENGTH}, D {DEGREE}: busiest rank over mean, mean (worst) of {SAMPLES} samples")
    for name, masks in cases.items():
        zig, plain = _imbalance(masks, _of_rank), _imbalance(masks, _contiguous)
        print(f"{name}: {_share(masks):.3f} of causal, zigzag {zig}, contiguous {plain}")


if __name__ == "__main__":
    main()
