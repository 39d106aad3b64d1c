"""Documents of packed sequences: where each begins in a sample, from Megatron's `PackedSeqParams`.

cu_seqlens counts through the whole micro-batch, sample after sample, as Megatron's
`flatten_batch_for_packed_sequences` writes it. The tokens themselves may be flattened to [1, b·s]
or still lie as [b, s]: what a boundary means is the same.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_tsp.errors import TSPError


def boundaries(packed: PackedSeqParams, samples: int, length: int) -> tuple[tuple[int, ...], ...]:
    """For each sample of `length` tokens where its documents begin, and its end.

    With padding between documents a document's own padding belongs to it: it lies behind the
    document's tokens, so that none of them sees it. Tokens behind the last boundary are a document
    of their own. Read from the device once, then kept with `packed`.

    Raises:
        TSPError: not the THD format, queries and keys differ, or a boundary lies outside.
    """
    kept = packed.__dict__.setdefault("_tsp_boundaries", {})
    if (samples, length) not in kept:
        kept[samples, length] = _by_sample(_cumulative(packed), samples, length)
    return kept[samples, length]


def _cumulative(packed: PackedSeqParams) -> list[int]:
    if packed.qkv_format != "thd":
        raise TSPError(f"packed sequences of format {packed.qkv_format!r}: TSP takes 'thd'")
    queries, keys = (
        _padded_or_not(packed.cu_seqlens_q_padded, packed.cu_seqlens_q),
        _padded_or_not(packed.cu_seqlens_kv_padded, packed.cu_seqlens_kv),
    )
    if queries != keys:
        raise TSPError("packed sequences: cu_seqlens of queries and keys differ in self-attention")
    return queries


def _padded_or_not(padded: Tensor | None, plain: Tensor) -> list[int]:
    return (plain if padded is None else padded).flatten().tolist()


def _by_sample(cumulative: list[int], samples: int, length: int) -> tuple[tuple[int, ...], ...]:
    total = samples * length
    if min(cumulative) < 0 or max(cumulative) > total:
        raise TSPError(
            f"packed sequences: cu_seqlens from {min(cumulative)} to {max(cumulative)} for a "
            f"micro-batch of {total} tokens"
        )
    cut = sorted({*cumulative, *range(0, total + 1, length)})
    return tuple(
        tuple(at - begin for at in cut if begin <= at <= begin + length)
        for begin in range(0, total, length)
    )


def positions(documents: tuple[tuple[int, ...], ...]) -> Tensor:
    """Each token's position in its document: int64 [b, s], on the CPU."""
    rows = []
    for bounds in documents:
        starts = torch.tensor(bounds)
        begins = starts[:-1].repeat_interleave(starts.diff())
        rows.append(torch.arange(bounds[-1]) - begins)
    return torch.stack(rows)
