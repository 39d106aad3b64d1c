"""Multi-token prediction through `pretrain`, against Megatron's own at TP 1."""

from functools import partial

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from ranks import RankFailed
from training import ULP, assert_same, train

from megatron_tsp.layers.mtp import TSPMultiTokenPredictionLayer

LLAMA = "--group-query-attention --num-query-groups 2"
MTP = f"{LLAMA} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
REPEATED = f"{MTP} --mtp-use-repeated-layer no:--untie-embeddings-and-output-weights"
HYBRID = f"{LLAMA} --hybrid-layer-pattern *-*-/*- --mtp-loss-scaling-factor 0.5"
BAR = 2.5 * ULP  # three losses add up in one gradient
SAVE = "--save {0}/ckpt --save-interval 3 --ckpt-format torch_dist"
LOAD = "--load {0}/ckpt --ckpt-format torch_dist --no-load-rng"


def _with_hits():
    """Add what Megatron reports of the predictions, before it sums over data-parallel ranks."""
    from megatron.training import training

    step = training.train_step

    def step_with_hits(*args, **kwargs):
        result = step(*args, **kwargs)
        if result[0]:
            tracker = MTPLossLoggingHelper.tracker
            result[0]["mtp hits"] = tracker["correct_values"].sum()
            result[0]["mtp loss"] = tracker["loss_values"].sum()
        return result

    training.train_step = step_with_hits


@pytest.fixture
def reference(reference):
    return partial(reference, before=_with_hits)


def _hits(ranks):
    return [step["losses"]["mtp hits"] for step in ranks[0]]


@pytest.mark.parametrize(
    ("model", "world", "flags"),
    [
        (MTP, 2, "--tsp-size 2"),
        (MTP, 4, "--tsp-size 2 --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --ddp-bucket-size 5000 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (MTP, 2, "--tsp-size 2 --tsp-blocks mlp"),
        (REPEATED, 2, "--tsp-size 2 --tsp-blocks attention --tsp-vocab-schedule gather"),
    ],
)  # fmt: skip
def test_gpt_trains_as_at_tp_1(reference, tmp_path, model, world, flags):
    ranks, expected = train(tmp_path, world, f"{model} {flags}", _with_hits), reference(model)
    assert_same(ranks, expected, loss=BAR)
    if world == 2:  # else of a data-parallel rank's tokens only
        assert _hits(ranks) == _hits(expected) and sum(_hits(ranks)) > 0


def test_a_hybrid_model_trains_as_at_tp_1(reference, tmp_path):
    ranks = train(tmp_path, 2, f"{HYBRID} --tsp-size 2", model="hybrid")
    assert_same(ranks, reference(f"{HYBRID} --tsp-baseline-core", model="hybrid"))


def test_a_run_flips_into_a_pipeline(reference, tmp_path):
    saving = f"{MTP} {SAVE.format(tmp_path)} --exit-interval 3"
    first = train(tmp_path / "first", 1, saving, exits=True)
    loading = f"{MTP} --tsp-size 2 --pipeline-model-parallel-size 2 {LOAD.format(tmp_path)}"
    rest = train(tmp_path / "rest", 4, loading)
    joined = [[*first[0], *next(rank for rank in rest if rank[0]["loss"] is not None)]]
    assert_same(joined, reference(MTP), loss=BAR)


def _embedding_of_the_same_token():
    """The token one further on is not taken."""
    concat = TSPMultiTokenPredictionLayer._concat_embeddings
    TSPMultiTokenPredictionLayer._concat_embeddings = lambda self, hidden, further: concat(
        self, hidden, torch.roll(further, 1, 0)
    )


def test_twin_that_is_broken_on_purpose_differs(reference, tmp_path):
    broken = train(tmp_path, 2, f"{MTP} --tsp-size 2", before=_embedding_of_the_same_token)
    with pytest.raises(AssertionError):
        assert_same(broken, reference(MTP), loss=BAR)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tsp-size 1 --mtp-detach-heads", "--mtp-detach-heads does not work with --tsp-size"),
        ("--tsp-size 1 --context-parallel-size 2", "--context-parallel-size 2 does not work with"),
        ("--tsp-size 1 --reset-attention-mask", "does not work with --mtp-num-layers"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path, flags, message):
    with pytest.raises(RankFailed, match=message):
        train(tmp_path, 1, f"{MTP} {flags}")
