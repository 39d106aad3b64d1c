"""Boundaries of packed sequences, as the attention takes them."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_tsp.errors import TSPError
from megatron_tsp.layers import documents


def _packed(bounds, keys=None, padded=None, qkv_format="thd"):
    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    return PackedSeqParams(
        qkv_format=qkv_format, cu_seqlens_q=tensor(bounds), cu_seqlens_kv=tensor(keys or bounds),
        cu_seqlens_q_padded=tensor(padded), cu_seqlens_kv_padded=tensor(padded),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("packed", "samples", "length", "expected"),
    [
        (_packed([0, 3, 8]), 1, 8, ((0, 3, 8),)),
        (_packed([0, 3, 8, 8, 8]), 1, 8, ((0, 3, 8),)),  # filled up, as Megatron's data is
        (_packed([0, 3, 5]), 1, 8, ((0, 3, 5, 8),)),  # tokens behind the last one
        (_packed([0, 3, 8, 9, 16]), 2, 8, ((0, 3, 8), (0, 1, 8))),
        (_packed([0, 3, 16]), 1, 16, ((0, 3, 16),)),
        (_packed([0, 3, 16]), 2, 8, ((0, 3, 8), (0, 8))),  # a document ends with its sample
        (_packed([0, 3, 7], padded=[0, 4, 8]), 1, 8, ((0, 4, 8),)),
    ],
)
def test_boundaries_by_sample(packed, samples, length, expected):
    assert documents.boundaries(packed, samples, length) == expected


def test_positions_start_again_at_each_document():
    assert documents.positions(((0, 3, 5), (0, 5))).tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (_packed([0, 8], qkv_format="sbhd"), "'sbhd': TSP takes 'thd'"),
        (_packed([0, 3, 8], keys=[0, 4, 8]), "queries and keys differ"),
        (_packed([0, 3, 9]), "cu_seqlens from 0 to 9 for a micro-batch of 8 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(packed, message):
    with pytest.raises(TSPError, match=message):
        documents.boundaries(packed, 1, 8)
