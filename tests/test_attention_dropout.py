"""Attention dropout: its masks, the random state that they come from, and training with it."""

import pytest
import torch
from dropout_common import kept
from layers_common import start
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from ranks import run
from training import LLAMA, TP_SP, assert_same, grad_norms, losses, train

from megatron_tsp.layers import core_attention, flash, kv_gather
from megatron_tsp.layers.dropout import Dropout, draw
from megatron_tsp.layers.kernels.tiled import Tiled
from megatron_tsp.layers.mask import Span, Tile

P, KEY = 0.1, 2**61 + 7
SAMPLES, HEADS, LENGTH = 2, 4, 256
EVERYTHING = slice(0, LENGTH)
FULL = Tile(EVERYTHING, EVERYTHING, "full")


def _between(q, key=KEY, p=P):
    whole = [Span(0, LENGTH)]
    return Dropout(p, key, SAMPLES, HEADS).of(q, whole, whole)


def _mask(key=KEY, p=P):
    """1 where a probability stays, 0 where not: [samples · heads, queries, keys]."""
    drop = _between(torch.empty(SAMPLES * HEADS, 1, LENGTH, 8), key, p).in_tile(FULL)
    return drop.keeps(*drop.hashed()).squeeze(1).double()


def _unlike(a, b):
    """Whether two parts of the mask look independent: their correlation, in standard deviations."""
    return abs((a - a.mean()).mul(b - b.mean()).mean() / (a.std() * b.std())) * a.numel() ** 0.5 < 5


def test_the_mask_is_the_defined_one():
    expected = kept(KEY, P, SAMPLES, HEADS, LENGTH).flatten(0, 1)
    assert torch.equal(_mask().bool(), expected)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_stay_as_should(p):
    mask, sigma = _mask(p=p), (p * (1 - p)) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 4 * sigma / mask.numel() ** 0.5
    for axis in range(3):  # and in each head, of each query, of each key: as of independent ones
        counts = mask.movedim(axis, 0).flatten(1)
        spread = (counts.mean(1) - (1 - p)) / sigma * counts.size(1) ** 0.5
        assert spread.abs().max() < 5 and (len(spread) < 99 or 0.7 < spread.std() < 1.3)


def test_heads_samples_positions_and_keys_have_masks_of_their_own():
    mask = _mask()
    assert _unlike(mask, _mask(KEY + 1)) and not _unlike(mask, _mask())
    for distance in (1, 2, 3, 4, 7):  # 4: another sample's same head
        assert _unlike(mask[distance:], mask[:-distance])
    for distance in (1, 2, 3, 8, 64, 128):
        assert _unlike(mask[:, distance:], mask[:, :-distance])
        assert _unlike(mask[..., distance:], mask[..., :-distance])
        assert _unlike(mask[:, distance:, distance:], mask[:, :-distance, :-distance])
    rows = mask[0] - (1 - P)
    among = (rows @ rows.T / (P * (1 - P) * LENGTH**0.5)).fill_diagonal_(0)
    assert 0.9 < among.square().sum() / (LENGTH * (LENGTH - 1)) < 1.1  # all pairs of queries


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_drops_as_many(dtype):
    """Every key weighs the same and has the value 1: the outputs' mean is the expectation, 1."""
    q = torch.zeros(SAMPLES * HEADS, 1, LENGTH, 8, dtype=dtype)
    out, lse = flash.attend(q, q, q + 1, [FULL], Tiled(1.0), None, _between(q))
    assert torch.allclose(lse, torch.full_like(lse, LENGTH).log())
    bound = 4 * (P / (1 - P) / (SAMPLES * HEADS)) ** 0.5 / LENGTH + 1e-4
    assert out.dtype == dtype and abs(out[..., 0].double().mean() - 1) < bound


def _draws():
    """Three layers' bits, the three again after the state is set back, and the next one."""
    start(2, context=2)
    states = get_cuda_rng_tracker().get_states()
    drawn = [draw() for _ in range(3)]
    get_cuda_rng_tracker().set_states(states)
    return mpu.get_data_parallel_rank(), drawn, [draw() for _ in range(3)], draw()


def test_ranks_of_a_sequence_draw_alike_and_others_do_not():
    results = run(_draws, 8)
    by_replica = {}
    for replica, drawn, again, further in results:
        assert drawn == again and len({*drawn, further}) == 4
        by_replica.setdefault(replica, set()).add((*drawn, further))
    assert len(by_replica) == 2 and all(len(alike) == 1 for alike in by_replica.values())
    first, second = (set(*alike) for alike in by_replica.values())
    assert not first & second


class _OwnMasks(Tiled):
    """A kernel with random masks of its own: tells what it was called with."""

    calls = []

    def forward(self, q, k, v, causal, dropout):
        self.calls.append(("forward", dropout.seed, q.shape, k.shape, causal))
        return super().forward(q, k, v, causal, dropout)

    def backward(self, dout, q, k, v, out, lse, causal, dropout):
        self.calls.append(("backward", dropout.seed, q.shape, k.shape, causal))
        return super().backward(dout, q, k, v, out, lse, causal, dropout)


def _own_masks(degree):
    import test_layers

    rank = start(degree).rank()
    core_attention.kernels.choose = lambda *_, **__: _OwnMasks
    kv_gather._TOO_MANY_BACKWARD = 0  # one head at a time
    calls = {}
    for name, case in test_layers.CASES.items():
        if name.startswith("dropout") and degree in case.degrees:
            _OwnMasks.calls.clear()
            case.split = False
            case.sharded(degree, rank)
            calls[name] = list(_OwnMasks.calls)
    return calls


def test_a_kernel_with_masks_of_its_own_sees_the_same_seeds_backward():
    """And other ones in each call of the forward, on each rank."""
    results = run(_own_masks, 3, 3)
    for name in results[0]:
        forward, backward = (
            [call[1:] for calls in results for call in calls[name] if call[0] == way]
            for way in ("forward", "backward")
        )
        assert sorted(forward) == sorted(backward) and len(forward) >= 3
        assert len({seed for seed, *_ in forward}) == len(forward), name


DROPOUT = f"{LLAMA} --attention-dropout {P}"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six steps on one rank."""
    return train(tmp_path_factory.mktemp("tsp1"), 1, f"{DROPOUT} --tsp-size 1")


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--tsp-size 2"),
        (4, f"--tsp-size 4 --tsp-attention-exchange alltoall {RECOMPUTE}"),
        (4, "--tsp-size 2 --context-parallel-size 2 --tsp-save-kv"),
        (2, "--tsp-size 2 --tsp-blocks mlp --recompute-activations"),
        (2, TP_SP.format(2)),
    ],
)
def test_trains_as_on_one_rank(whole, tmp_path, world, flags):
    assert_same(train(tmp_path, world, f"{DROPOUT} {flags}"), whole)


def _a_key_for_each_rank():
    def own():
        return drawn() ^ torch.distributed.get_rank()

    drawn, core_attention.draw = core_attention.draw, own


def test_twin_with_a_key_for_each_rank_differs(whole, tmp_path):
    broken = train(tmp_path, 2, f"{DROPOUT} --tsp-size 2", before=_a_key_for_each_rank)
    with pytest.raises(AssertionError):
        assert_same(broken, whole, loss=1e-4, grad_norm=1e-4)


def test_without_dropout_the_losses_are_others(reference, whole):
    with pytest.raises(AssertionError):
        assert_same(reference(LLAMA), whole, loss=1e-4, grad_norm=1e-4)


def test_resumed_it_is_the_uninterrupted_run_to_the_bit(whole, tmp_path):
    flags = f"{DROPOUT} --tsp-size 2 --recompute-granularity selective"
    saving = f"--save {tmp_path}/ckpt --save-interval 3 --exit-interval 3"
    first = train(tmp_path / "first", 2, f"{flags} {saving}", exits=True)
    rest = train(tmp_path / "rest", 2, f"{flags} --load {tmp_path}/ckpt")
    joined = [[*one, *other] for one, other in zip(first, rest, strict=True)]
    uninterrupted = train(tmp_path / "whole", 2, flags)
    assert losses(joined) == losses(uninterrupted)
    assert grad_norms(joined) == grad_norms(uninterrupted)
    assert_same(joined, whole)
