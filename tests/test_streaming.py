"""The walk over shards: what it visits, what it sums, in which order it sends."""

import pytest
import torch
import torch.distributed as dist
from layers_common import random
from ranks import RankFailed, run

from megatron_tsp.gradients import Gradients
from megatron_tsp.streaming import SCHEDULES, stream

SHAPES = ((3, 4), (4, 5), (3,))


def _shards(owner):
    return [random(*shape, seed=10 * owner + i) for i, shape in enumerate(SHAPES)]


def _walk(schedule, degree, dtype, needed, times=2):
    rank = dist.get_rank()
    walk = stream(schedule, dist.group.WORLD)
    shards = [s.to(dtype) for s in _shards(rank)]
    for _ in range(times):  # the second walk finds used slots
        seen = []
        for owner, held in walk.forward(shards):
            seen.append(owner)
            for got, want in zip(held, _shards(owner), strict=True):
                torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
        assert sorted(seen) == list(range(degree))
        grads = Gradients(shards, needed)
        x, dy = random(6, 4, seed=rank), random(6, 3, seed=9 + rank)
        for owner, held in walk.backward(shards, grads):
            for got, want in zip(held, _shards(owner), strict=True):
                torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
            scale = owner + 1
            grads.add_product(0, scale * dy[:3].to(dtype), x[:3].to(dtype))
            grads.add_product(0, scale * dy[3:].to(dtype), x[3:].to(dtype))
            grads.add(2, (scale * dy).to(dtype).sum(0))
    return [None if r is None else r.clone() for r in grads.result]


def _expected(degree, owner):
    x = torch.cat([random(6, 4, seed=r) for r in range(degree)])
    dy = torch.cat([random(6, 3, seed=9 + r) for r in range(degree)])
    return (owner + 1) * dy.t() @ x, torch.zeros(4, 5, dtype=x.dtype), (owner + 1) * dy.sum(0)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_visits_every_owner_and_brings_gradients_home(schedule, degree):
    for rank, result in enumerate(run(_walk, degree, schedule, degree, torch.float64, None)):
        for got, want in zip(result, _expected(degree, rank), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_frozen_shards_get_no_gradient(schedule):
    needed = (False, True, True)
    for rank, result in enumerate(run(_walk, 3, schedule, 3, torch.float64, needed)):
        assert result[0] is None
        torch.testing.assert_close(result[2], _expected(3, rank)[2])


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_low_precision_gradients_are_summed_in_fp32(schedule):
    for rank, result in enumerate(run(_walk, 4, schedule, 4, torch.bfloat16, None)):
        assert result[0].dtype == torch.float32
        torch.testing.assert_close(result[0].double(), _expected(4, rank)[0], rtol=2e-2, atol=2e-1)


def _dropped_contribution(schedule):
    original = Gradients.add_product

    def add_product(self, index, dy, x):
        if dist.get_rank() != 1:
            original(self, index, dy, x)

    Gradients.add_product = add_product
    result = _walk(schedule, 3, torch.float64, None)
    torch.testing.assert_close(result[0], _expected(3, dist.get_rank())[0])


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_twin_a_dropped_contribution_is_seen(schedule):
    with pytest.raises(RankFailed, match="not close"):
        run(_dropped_contribution, 3, schedule)
