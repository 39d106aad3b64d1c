"""The entry, end to end: Megatron's `pretrain` with `--tsp-size`, against TP 1; checkpoints."""

import os
import re
import sys
from functools import cache

import pytest
import torch.distributed as dist
from ranks import RankFailed, run
from training import TINY, grad_norms, losses, train, train_megatrons

from megatron_tsp import zigzag
from megatron_tsp.gradients import Gradients
from megatron_tsp.layers.kv_gather import _Layout

ULP = 4.8e-7  # of an fp32 loss between 4 and 8

LLAMA = "--group-query-attention --num-query-groups 2 --qk-layernorm"
GPT2 = (
    "no:--swiglu no:--disable-bias-linear no:--untie-embeddings-and-output-weights "
    "--normalization LayerNorm --position-embedding-type learned_absolute"
)
TP_SP = "--tensor-model-parallel-size {} --sequence-parallel --tsp-baseline-core"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """TP 1 by Megatron's own model, once for each set of flags."""

    @cache
    def get(flags):
        return train(tmp_path_factory.mktemp("tp1"), 1, flags)

    return get


def _assert_same(ranks, expected, loss=1.5 * ULP, grad_norm=1e-6):
    got, want = losses(ranks), losses(expected)
    assert len(got) == len(want)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= loss, (got, want)
    norms = zip(grad_norms(ranks), grad_norms(expected), strict=True)
    assert max(abs(a - b) / b for a, b in norms) <= grad_norm


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, "--tsp-size 1"),
        (2, "--tsp-size 2"),
        (4, "--tsp-size 4"),
        (2, TP_SP.format(2)),
        (4, "--tsp-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--ddp-bucket-size 5000"),
        (2, "--tsp-size 2 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"),
        (2, "--tsp-size 2 --tsp-blocks mlp"),
        (4, "--tsp-size 4 --tsp-attention-exchange alltoall"),
        (2, "--tsp-size 2 --tsp-blocks attention --tsp-mlp-save-activations"),
        (2, "--tsp-size 2 --tsp-attention-schedule gather --tsp-mlp-schedule broadcast "
            "--tsp-vocab-schedule gather --tsp-mlp-save-activations"),
        (2, "--tsp-size 2 --recompute-granularity selective --recompute-modules core_attn mlp "
            "layernorm"),
    ],
)  # fmt: skip
def test_llama_trains_as_at_tp_1(reference, tmp_path, world, flags):
    _assert_same(train(tmp_path, world, f"{LLAMA} {flags}"), reference(LLAMA))


@pytest.mark.parametrize(("world", "flags"), [(2, "--tsp-size 2"), (4, "--tsp-size 4")])
def test_gpt2_trains_as_at_tp_1(reference, tmp_path, world, flags):
    _assert_same(train(tmp_path, world, f"{GPT2} {flags}"), reference(GPT2))


def test_bf16_trains_as_at_tp_1(reference, tmp_path):
    ranks = train(tmp_path, 4, f"{LLAMA} --bf16 --tsp-size 4")
    _assert_same(ranks, reference(f"{LLAMA} --bf16"), loss=2e-3, grad_norm=2e-3)


def test_vocabulary_that_needs_padding(reference, tmp_path):
    vocabulary = f"{LLAMA} --vocab-size 126 --make-vocab-size-divisible-by 32"
    ranks = train(tmp_path, 4, f"{vocabulary} --tsp-size 4")
    _assert_same(ranks, reference(vocabulary))


CHECKOUT = os.environ.get("MEGATRON_LM_PATH")


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, LLAMA),
        (2, f"{GPT2} --tensor-model-parallel-size 2"),
        (2, f"{LLAMA} --use-distributed-optimizer"),
    ],
)
def test_without_tsp_it_is_megatron_lms_own_script_to_the_bit(tmp_path, world, flags):
    ours = train(tmp_path / "ours", world, flags)
    theirs = train_megatrons(CHECKOUT, tmp_path / "theirs", world, flags)
    assert losses(ours) == losses(theirs)
    assert grad_norms(ours) == grad_norms(theirs)


def _default_model():
    from megatron.training.models import GPTModelConfig

    from megatron_tsp.models.gpt import model_config_from_args
    from megatron_tsp.training.main import parse

    sys.argv = ["pretrain_gpt.py", *TINY]
    config = model_config_from_args(parse(on_cpu=True))
    assert type(config) is GPTModelConfig and config.transformer_layer_spec is None
    return config.get_builder_cls().__module__


def test_without_tsp_the_model_is_built_by_megatrons_builder():
    assert run(_default_model, 1) == ["megatron.training.models.gpt"]


def _wrong_keys():
    before = _Layout.before
    _Layout.before = lambda self, chunk: [
        span._replace(at=span.at - 1) for span in before(self, chunk)
    ]


def _wrong_order():
    zigzag.chunks_of = lambda rank, degree: (2 * rank, 2 * rank + 1)


def _dropped_dw():
    add = Gradients.add_product
    Gradients.add_product = lambda self, index, dy, x: add(
        self, index, dy if dist.get_rank() else 0 * dy, x
    )


@pytest.mark.parametrize("breaking", [_wrong_keys, _wrong_order, _dropped_dw])
def test_twin_that_is_broken_on_purpose_differs(reference, tmp_path, breaking):
    with pytest.raises(AssertionError):  # also of a run that ends in infinities
        broken = train(tmp_path, 2, f"{LLAMA} --tsp-size 2", before=breaking)
        _assert_same(broken, reference(LLAMA))


DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
SAVE = "--save {0}/ckpt --save-interval 3 --ckpt-format torch_dist"
LOAD = "--load {0}/ckpt --ckpt-format torch_dist"


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_saved_and_resumed_it_is_the_uninterrupted_run(tmp_path, optimizer):
    flags = f"{LLAMA} {optimizer} --tsp-size 2"
    whole = train(tmp_path / "whole", 2, flags)
    saving = f"{flags} {SAVE.format(tmp_path)} --exit-interval 3"
    first = train(tmp_path / "first", 2, saving, exits=True)
    rest = train(tmp_path / "rest", 2, f"{flags} {LOAD.format(tmp_path)}")
    assert losses(first) + losses(rest) == losses(whole)
    assert grad_norms(first) + grad_norms(rest) == grad_norms(whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, TP_SP.format(2)), (2, "--tsp-size 2")),
        ((2, "--tsp-size 2"), (2, TP_SP.format(2))),
        ((1, ""), (4, "--tsp-size 4")),
        ((4, "--tsp-size 4"), (2, "--tsp-size 2")),
        ((2, "--tsp-size 2"), (4, "--tsp-size 2 --pipeline-model-parallel-size 2")),
        ((2, f"{TP_SP.format(2)} {DISTRIBUTED}"), (4, f"--tsp-size 2 {DISTRIBUTED}")),
        ((2, f"--tsp-size 2 {DISTRIBUTED}"), (4, f"{TP_SP.format(4)} {DISTRIBUTED}")),
    ],
)
def test_a_run_flips_in_the_middle(reference, tmp_path, before, after):
    world, flags = before
    saving = f"{LLAMA} {flags} {SAVE.format(tmp_path)} --exit-interval 3"
    first = train(tmp_path / "first", world, saving, exits=True)
    world, flags = after
    # Without dropout there is no random state to carry over.
    loading = f"{LLAMA} {flags} {LOAD.format(tmp_path)} --no-load-rng"
    rest = train(tmp_path / "rest", world, loading)
    joined = [[*first[0], *next(rank for rank in rest if rank[0]["loss"] is not None)]]
    _assert_same(joined, reference(LLAMA))


def test_an_optimizer_layout_that_would_scramble_is_refused(tmp_path):
    saving = f"{LLAMA} {TP_SP.format(2)} --use-distributed-optimizer {SAVE.format(tmp_path)}"
    train(tmp_path / "first", 2, f"{saving} --exit-interval 3", exits=True)
    with pytest.raises(RankFailed, match="--dist-ckpt-optim-fully-reshardable"):
        loading = f"{LLAMA} --tsp-size 2 --use-distributed-optimizer {LOAD.format(tmp_path)}"
        train(tmp_path / "rest", 2, loading)


def test_interleaved_pipeline_continues_what_one_rank_began(reference, tmp_path):
    """Pipeline stages draw other weights: start them all from one checkpoint."""
    deep = f"{LLAMA} --num-layers 4"
    train(tmp_path / "first", 1, f"{deep} {SAVE.format(tmp_path)} --exit-interval 3", exits=True)
    grid = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    rest = train(
        tmp_path / "rest", 4, f"{deep} --tsp-size 2 {grid} {LOAD.format(tmp_path)} --no-load-rng"
    )
    last = next(rank for rank in rest if rank[0]["loss"] is not None)
    _assert_same([last], [reference(deep)[0][3:]])


def test_hidden_dropout_resumes(tmp_path):
    flags = f"{LLAMA} --hidden-dropout 0.1 --tsp-size 2"
    whole = train(tmp_path / "whole", 2, flags)
    saving = f"{flags} {SAVE.format(tmp_path)} --exit-interval 3"
    first = train(tmp_path / "first", 2, saving, exits=True)
    rest = train(tmp_path / "rest", 2, f"{flags} {LOAD.format(tmp_path)}")
    assert losses(first) + losses(rest) == losses(whole)
    assert losses(whole) != losses(train(tmp_path / "without", 2, f"{LLAMA} --tsp-size 2"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tsp-size 2 --tensor-model-parallel-size 4", "contradicts --tsp-size 2"),
        ("--tsp-size 2 --attention-dropout 0.1", "--attention-dropout 0.1 does not work"),
        ("--tsp-size 2 --window-size 8,0", "--window-size"),
        ("--tsp-size 2 --reset-position-ids", "--reset-position-ids does not work"),
        ("--tsp-size 2 --cross-entropy-loss-fusion", "--cross-entropy-loss-fusion does not work"),
        ("--tsp-size 3", "--num-attention-heads 8 is not divisible by --tsp-size 3: the nearest "
         "are 6 or 9"),
        ("--tsp-size 2 --seq-length 66 --max-position-embeddings 66", "the nearest are 64 or 68"),
        ("--tsp-size 0", "the degree is at least 1"),
        ("--tsp-loss-chunk 8", "--tsp-loss-chunk needs --tsp-size"),
        ("--tsp-size 2 --tsp-loss-chunk 0", "--tsp-loss-chunk 0"),
        ("--tsp-size 2 --tsp-baseline-core", "--tsp-baseline-core is for the runs"),
        ("--tsp-size 4 --group-query-attention --num-query-groups 8 --num-attention-heads 8 "
         "--kv-channels 8 --num-experts 4 --moe-expert-capacity-factor 1.0",
         "--moe-expert-capacity-factor 1.0 does not work"),
        ("--tsp-size 2 --num-experts 4 --moe-router-load-balancing-type sinkhorn",
         "--moe-router-load-balancing-type sinkhorn does not work"),
        ("--tsp-size 2 --num-experts 5 --expert-model-parallel-size 2", "the nearest are 4 or 6"),
        ("--tsp-size 1 --num-experts 4 --expert-model-parallel-size 2",
         "does not divide the 1 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(tmp_path, flags, message):
    with pytest.raises(RankFailed, match=re.escape(message)):
        train(tmp_path, 1, flags)
