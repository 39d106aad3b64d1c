"""The entry, end to end: Megatron's `pretrain` with `--tsp-size`, against TP 1."""

import os
import re
import sys

import pytest
import torch.distributed as dist
from ranks import RankFailed, run
from training import (
    GPT2,
    LLAMA,
    TINY,
    TP_SP,
    assert_same,
    grad_norms,
    losses,
    train,
    train_megatrons,
)

from megatron_tsp import zigzag
from megatron_tsp.gradients import Gradients
from megatron_tsp.layers.kv_gather import _Layout


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, "--tsp-size 1"),
        (2, "--tsp-size 2"),
        (4, "--tsp-size 4"),
        (2, TP_SP.format(2)),
        (4, "--tsp-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--ddp-bucket-size 5000"),
        (2, "--tsp-size 2 --tsp-blocks mlp"),
        (4, "--tsp-size 4 --tsp-attention-exchange alltoall"),
        (2, "--tsp-size 2 --tsp-blocks attention"),
        (2, "--tsp-size 2 --tsp-attention-schedule gather --tsp-mlp-schedule broadcast "
            "--tsp-vocab-schedule gather --tsp-mlp-save-activations"),
    ],
)  # fmt: skip
def test_llama_trains_as_at_tp_1(reference, tmp_path, world, flags):
    assert_same(train(tmp_path, world, f"{LLAMA} {flags}"), reference(LLAMA))


@pytest.mark.parametrize(("world", "flags"), [(2, "--tsp-size 2"), (4, "--tsp-size 4")])
def test_gpt2_trains_as_at_tp_1(reference, tmp_path, world, flags):
    assert_same(train(tmp_path, world, f"{GPT2} {flags}"), reference(GPT2))


def test_bf16_trains_as_at_tp_1(reference, tmp_path):
    ranks = train(tmp_path, 4, f"{LLAMA} --bf16 --tsp-size 4")
    assert_same(ranks, reference(f"{LLAMA} --bf16"), loss=2e-3, grad_norm=2e-3)


@pytest.mark.parametrize(
    "model",
    [
        "--vocab-size 126 --make-vocab-size-divisible-by 32",  # 127 with the end of document
        "--hidden-size 66 --kv-channels 8",
    ],
)
def test_sizes_that_d_does_not_divide(reference, tmp_path, model):
    ranks = train(tmp_path, 4, f"{LLAMA} {model} --tsp-size 4")
    assert_same(ranks, reference(f"{LLAMA} {model}"))


def _with_nccl_algorithm():
    os.environ["NCCL_ALGO"] = "Ring"


def test_deterministic_mode_changes_nothing(reference, tmp_path):
    flags = f"{LLAMA} --deterministic-mode --tsp-size 2"
    assert_same(train(tmp_path, 2, flags, before=_with_nccl_algorithm), reference(LLAMA))


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
        assert_same(broken, reference(LLAMA))


def _no_groups():
    def refused(*args, **kwargs):
        raise RuntimeError("a process group is being made")

    dist.new_group = refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tsp-size 2 --tensor-model-parallel-size 4", "contradicts --tsp-size 2"),
        ("--position-embedding-type mrope --mrope-section 1 1 2", "megatron_tsp.pretrain_gpt does "
         "not carry --position-embedding-type mrope"),
        ("--tsp-size 2 --attention-dropout 1", "--attention-dropout 1.0: it is a probability"),
        ("--tsp-size 2 --cross-entropy-loss-fusion", "--cross-entropy-loss-fusion does not work"),
        ("--tsp-size 3", "--num-attention-heads 8 is not divisible by --tsp-size 3: the nearest "
         "are 6 or 9"),
        ("--tsp-size 2 --seq-length 66 --max-position-embeddings 66", "the nearest are 64 or 68"),
        ("--tsp-size 2", "1 ranks are not a multiple of --tsp-size 2: the nearest are 2"),
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
        train(tmp_path, 1, flags, before=_no_groups)


def test_twin_that_is_not_refused_comes_to_making_groups(tmp_path):
    with pytest.raises(RankFailed, match="a process group is being made"):
        train(tmp_path, 1, "--tsp-size 1", before=_no_groups)
