"""The token layout, by properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tsp import zigzag
from megatron_tsp.errors import TSPError

degrees = st.integers(1, 9)
chunks = st.integers(1, 7)


@given(degrees, chunks, st.integers(0, 2))
def test_round_trip(degree, chunk, dim):
    length = chunk * (2 * degree if degree > 1 else 1)
    shape = [2, 3, 2]
    shape[dim] = length
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [zigzag.take(full, dim, degree, rank) for rank in range(degree)]
    assert torch.equal(zigzag.to_natural(torch.cat(parts, dim), dim, degree), full)


@given(degrees, chunks)
def test_every_position_has_one_owner_and_is_where_positions_says(degree, chunk):
    length = chunk * (2 * degree if degree > 1 else 1)
    owned = [zigzag.positions(length, degree, rank) for rank in range(degree)]
    assert torch.cat(owned).sort().values.tolist() == list(range(length))
    for rank, mine in enumerate(owned):
        assert torch.equal(zigzag.take(torch.arange(length), 0, degree, rank), mine)


@given(degrees, chunks)
def test_causal_work_is_balanced_to_within_a_chunks_diagonal(degree, chunk):
    length = chunk * (2 * degree if degree > 1 else 1)
    work = [zigzag.causal_pairs(length, degree, rank) for rank in range(degree)]
    assert sum(work) == length * (length + 1) // 2
    assert max(work) - min(work) <= chunk


def test_twin_contiguous_chunks_are_not_balanced(monkeypatch):
    monkeypatch.setattr(zigzag, "chunks_of", lambda rank, degree: (2 * rank, 2 * rank + 1))
    work = [zigzag.causal_pairs(64, 4, rank) for rank in range(4)]
    assert max(work) - min(work) > 8


@given(st.integers(2, 9), st.integers(1, 200))
def test_a_length_that_does_not_fit_is_refused_with_the_nearest_that_do(degree, length):
    if length % (2 * degree) == 0:
        assert zigzag.chunk_length(length, degree) * 2 * degree == length
        return
    with pytest.raises(TSPError) as error:
        zigzag.take(torch.zeros(length), 0, degree, 0)
    above = -(-length // (2 * degree)) * 2 * degree
    assert str(above) in str(error.value) and str(length) in str(error.value)


@pytest.mark.parametrize("length", [0, -4])
def test_no_tokens_are_refused(length):
    with pytest.raises(TSPError, match="equal chunks"):
        zigzag.chunk_length(length, 2)


def test_a_degree_below_one_is_refused():
    with pytest.raises(TSPError, match="at least 1"):
        zigzag.chunk_length(4, 0)
