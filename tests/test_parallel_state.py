"""The TSP dimension in grids of data, pipeline and TSP ranks."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from ranks import run

from megatron_tsp import parallel_state, traffic, zigzag
from megatron_tsp.errors import TSPError


def _grid(tsp, pipeline):
    mpu.initialize_model_parallel(tsp, pipeline)
    parallel_state.initialize_model_parallel(tsp)
    group = parallel_state.get_tsp_group()
    ranks = dist.get_process_group_ranks(group)
    extra = parallel_state.weight_group(group), parallel_state.kv_group(group)
    sums = []
    for each in extra:
        assert each is not group and dist.get_process_group_ranks(each) == ranks
        mine = torch.tensor([dist.get_rank()])
        dist.all_reduce(mine, group=each)
        sums.append(int(mine))
    assert extra[0] is not extra[1]
    other = mpu.get_data_parallel_group()  # a group that is not TSP's is its own communicator
    assert parallel_state.weight_group(other) is other and parallel_state.kv_group(None) is None
    result = ranks, parallel_state.get_tsp_rank(), parallel_state.get_tsp_world_size(), sums
    dist.barrier()  # gloo takes a peer that has left, while others still connect, for a crash
    parallel_state.destroy_model_parallel()
    assert not parallel_state.is_initialized()
    dist.barrier()
    parallel_state.initialize_model_parallel(tsp)  # and again
    dist.barrier()
    parallel_state.destroy_model_parallel()
    mpu.destroy_model_parallel()
    return result


@pytest.mark.parametrize(("world", "tsp", "pipeline"), [(4, 2, 1), (4, 2, 2), (4, 4, 1), (3, 1, 3)])
def test_groups_are_consecutive_ranks(world, tsp, pipeline):
    for rank, (ranks, tsp_rank, size, sums) in enumerate(run(_grid, world, tsp, pipeline)):
        first = rank // tsp * tsp
        assert ranks == list(range(first, first + tsp))
        assert (tsp_rank, size) == (rank - first, tsp)
        assert sums == [sum(ranks)] * 2


def _grid_of_tokens(tsp, context):
    mpu.initialize_model_parallel(tsp, context_parallel_size=context)
    parallel_state.initialize_model_parallel(tsp)
    group = parallel_state.get_tsp_group()
    tokens = parallel_state.token_group(group)
    ranks = [dist.get_process_group_ranks(g) for g in (group, tokens)]
    kv = parallel_state.kv_group(tokens)
    assert kv is not tokens and dist.get_process_group_ranks(kv) == ranks[1]
    assert dist.get_process_group_ranks(parallel_state.weight_group(group)) == ranks[0]
    other = mpu.get_context_parallel_group()
    assert parallel_state.token_group(other) is other and parallel_state.kv_group(other) is other
    names = [traffic.group_name(g) for g in (kv, tokens, other)]
    # Megatron's cut of the sequence, then TSP's, is the zigzag over all of them
    positions = torch.arange(8 * tsp * context)
    cut = zigzag.take(positions, 0, context, mpu.get_context_parallel_rank())
    assert zigzag.take(cut, 0, tsp, group.rank()).equal(
        zigzag.positions(len(positions), tokens.size(), tokens.rank())
    )
    return (*ranks, names)


def test_tokens_are_spread_over_context_parallel_ranks_as_well():
    for rank, (shards, tokens, names) in enumerate(run(_grid_of_tokens, 8, 2, 2)):
        assert shards == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert tokens == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
        assert names == ["tsp-kv", "tp-cp", "cp"]


def _misuse():
    messages = []

    def attempt(call, *args):
        with pytest.raises(TSPError) as error:
            call(*args)
        messages.append(str(error.value))

    attempt(parallel_state.initialize_model_parallel, 2)
    attempt(parallel_state.get_tsp_group)
    mpu.initialize_model_parallel(2)
    attempt(parallel_state.initialize_model_parallel, 4)
    parallel_state.initialize_model_parallel(2)
    attempt(parallel_state.initialize_model_parallel, 2)
    return messages


def test_misuse_is_an_error():
    before, missing, size, twice = run(_misuse, 2)[0]
    assert "before megatron_tsp's" in before
    assert "not initialized" in missing
    assert "TSP size 4 needs tensor parallel size 4, not 2" in size
    assert "exist already" in twice
