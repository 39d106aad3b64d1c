"""The tiles of a mask: every pair that sees each other once, and no other."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tsp import zigzag
from megatron_tsp.errors import TSPError
from megatron_tsp.layers.kv_gather import _Layout
from megatron_tsp.layers.mask import Mask, Span, Tile


def _pairs(tile: Tile):
    """(query, key) places of a tile in their tensors."""
    rows = (tile.queries.stop - tile.queries.start) // tile.blocks
    columns = (tile.keys.stop - tile.keys.start) // tile.blocks
    assert rows * tile.blocks == tile.queries.stop - tile.queries.start > 0
    assert columns * tile.blocks == tile.keys.stop - tile.keys.start > 0
    assert tile.kind == "full" or rows == columns
    sees = {"full": lambda i, j: True, "causal": lambda i, j: j <= i, "edge": lambda i, j: j >= i}
    for block in range(tile.blocks):
        for i in range(rows):
            for j in filter(lambda j: sees[tile.kind](i, j), range(columns)):
                yield tile.queries.start + block * rows + i, tile.keys.start + block * columns + j


def _seen(mask, length, sample):
    """{(query, key)} by position, from the definition."""
    bounds = (0, length) if mask.documents is None else mask.documents[sample]
    window = length if mask.window is None else mask.window
    return {
        (query, key)
        for begin, end in pairwise(bounds)
        for query in range(begin, end)
        for key in range(max(begin, query - window), query + 1)
    }


@st.composite
def _masks(draw):
    degree, chunk = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    length = chunk if degree == 1 else 2 * degree * chunk
    window = draw(st.none() | st.integers(0, length + 2))
    cuts = st.sets(st.integers(1, max(length - 1, 1)), max_size=5)
    documents = draw(
        st.none()
        | st.lists(cuts.map(lambda c: tuple(sorted({0, length} | c))), min_size=1, max_size=2)
    )
    return degree, chunk, length, Mask(window, documents and tuple(documents))


@settings(deadline=None, max_examples=150)
@given(_masks())
def test_the_ranks_tiles_are_the_mask(case):
    degree, chunk, length, mask = case
    samples = len(mask.documents) if mask.documents else 1
    found = [[] for _ in range(samples)]
    gathered = {}
    for rank in range(degree):
        layout = _Layout(degree, rank, chunk)
        for span in layout.own():
            gathered.update(
                zip(range(length)[layout.gathered(span)], range(span.start, span.stop), strict=True)
            )
    for rank in range(degree):
        layout = _Layout(degree, rank, chunk)
        local = [p for own in layout.own() for p in range(own.start, own.stop)]
        here, elsewhere = layout.tiles(mask)
        for tiles, keys in ((here, local), (elsewhere, gathered)):
            for tile in tiles:
                pairs = [(local[query], keys[key]) for query, key in _pairs(tile)]
                assert len(pairs) == tile.pairs()
                found[tile.sample[0]] += pairs
    for sample, pairs in enumerate(found):
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == _seen(mask, length, sample)


@settings(deadline=None, max_examples=50)
@given(_masks())
def test_over_the_whole_sequence_every_query_is_in_one_causal_tile_and_those_come_first(case):
    _, _, length, mask = case
    tiles = mask.tiles(Span(0, length), [Span(0, length)])
    kinds = [tile.kind == "causal" for tile in tiles]
    assert kinds == sorted(kinds, reverse=True)
    for sample in range(len(mask.documents) if mask.documents else 1):
        causal = [t for t in tiles if t.kind == "causal" and t.sample[0] == sample]
        queries = sorted(q for t in causal for q in range(t.queries.start, t.queries.stop))
        assert queries == list(range(length))
        pairs = [pair for t in tiles if t.sample[0] == sample for pair in _pairs(t)]
        assert set(pairs) == _seen(mask, length, sample) and len(pairs) == len(set(pairs))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_without_window_or_documents_there_is_a_tile_for_each_chunk_and_one_for_all_before(degree):
    for rank in range(degree):
        here, elsewhere = _Layout(degree, rank, 16).tiles(Mask())
        assert [tile.kind for tile in here] == ["causal", "causal"]
        assert [tile.kind for tile in elsewhere] == ["full"] * (2 if rank else 1)
        pairs = sum(tile.pairs() for tile in here + elsewhere)
        assert pairs == zigzag.causal_pairs(32 * degree, degree, rank)


def test_a_window_in_a_long_chunk_is_few_tiles():
    here, elsewhere = _Layout(4, 1, 4096).tiles(Mask(window=100))
    assert len(here) + len(elsewhere) < 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, None), "attention window -1"),
        ((None, ((0, 4), (1, 4))), r"\(1, 4\) do not ascend from 0"),
        ((None, ((0, 4, 4),)), "do not ascend"),
    ],
)
def test_a_mask_that_is_none_is_refused(arguments, message):
    with pytest.raises(TSPError, match=message):
        Mask(*arguments)
