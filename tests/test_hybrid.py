"""The hybrid entry, end to end: layers by a pattern, through `pretrain`, against TP 1.

At TP 1 it is Megatron's own HybridModel, with the norm and the attention core of
`--tsp-baseline-core`: Megatron's stack of layers is made of Transformer Engine's modules, which a
CPU does not have. `test_a_pattern_of_pairs_is_a_gpt` ties it to Megatron's GPT.
"""

import re
from functools import partial

import pytest
from experts import same_experts
from ranks import RankFailed
from training import ULP, assert_same, train

from megatron_tsp.layers.kv_gather import _Layout

ATTENTION = "--group-query-attention --num-query-groups 2 --hybrid-layer-pattern"
DENSE = f"{ATTENTION} *-*-"
EXPERTS = (
    f"{ATTENTION} *E-*E --num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.05 "
    "--moe-shared-expert-intermediate-size 64"
)
RECURRENT = (
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    "--mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 4 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 16 "
    f"{ATTENTION} MG*-"
)
CORE = "--tsp-baseline-core"
EP = "--tsp-size {0} --expert-model-parallel-size {0} --moe-token-dispatcher-type alltoall"
SAVE = "--save {0}/ckpt --save-interval 3 --ckpt-format torch_dist"
LOAD = "--load {0}/ckpt --ckpt-format torch_dist --no-load-rng"


@pytest.fixture
def reference(reference):
    return partial(reference, before=same_experts, model="hybrid")


def _run(folder, world, flags, before=same_experts, exits=False):
    return train(folder, world, flags, before, exits, model="hybrid")


@pytest.mark.parametrize(
    ("model", "world", "flags"),
    [
        (DENSE, 2, "--tsp-size 2"),
        (DENSE, 4, "--tsp-size 2 --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --ddp-bucket-size 5000 --tsp-attention-exchange alltoall"),
        (EXPERTS, 2, EP.format(2)),
        (EXPERTS, 4, f"{EP.format(4)} --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"),
        (EXPERTS, 2, f"{EP.format(2)} --tsp-blocks mlp --recompute-granularity selective "
            "--recompute-modules mlp moe"),
    ],
)  # fmt: skip
def test_a_pattern_trains_as_at_tp_1(reference, tmp_path, model, world, flags):
    ranks = _run(tmp_path, world, f"{model} {flags}")
    assert_same(ranks, reference(f"{model} {CORE}"), loss=2.5 * ULP)


def test_a_pattern_of_pairs_is_a_gpt(reference, tmp_path):
    """`*-*-` is Megatron's GPT of two layers, from the same weights."""
    gpt = train(tmp_path, 1, DENSE.split("--hybrid")[0])
    assert_same(gpt, reference(f"{DENSE} {CORE}"))


def test_a_run_flips_in_the_middle(reference, tmp_path):
    """TP x EP, then TSP x EP in a pipeline whose stages the pattern cuts."""
    tp = f"{CORE} --tensor-model-parallel-size 2 --sequence-parallel"
    experts = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    saving = f"{EXPERTS} {tp} {experts} {SAVE.format(tmp_path)} --exit-interval 3"
    first = _run(tmp_path / "first", 2, saving, exits=True)
    staged = EXPERTS.replace("*E-*E", "*E-|*E")
    loading = f"{staged} {EP.format(2)} --pipeline-model-parallel-size 2 {LOAD.format(tmp_path)}"
    rest = _run(tmp_path / "rest", 4, loading)
    joined = [[*first[0], *next(rank for rank in rest if rank[0]["loss"] is not None)]]
    assert_same(joined, reference(f"{EXPERTS} {CORE}"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(TP 1's steps, a folder with its third one)."""
    folder = tmp_path_factory.mktemp("recurrent")
    return _run(folder, 1, f"{RECURRENT} {CORE} {SAVE.format(folder)}"), folder


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, "--tsp-size 4 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"),
        (4, "--tsp-size 2 --context-parallel-size 2"),
        (4, "--tsp-size 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"),
        (2, "--tsp-size 2 --tsp-blocks mlp"),
    ],
)  # fmt: skip
def test_mamba_and_gated_delta_nets_go_on_from_tp_1(saved, tmp_path, world, flags):
    """From a checkpoint: their own parameters start from other numbers at other sizes."""
    whole, folder = saved
    ranks = _run(tmp_path, world, f"{RECURRENT} {flags} {LOAD.format(folder)} --ckpt-step 3")
    assert_same(ranks, [whole[0][3:]])


def test_mamba_and_gated_delta_nets_flip_back(saved, tmp_path):
    """TP 1, then TSP x DP, then TP."""
    whole, folder = saved
    loading = f"--tsp-size 2 {LOAD.format(folder)} --ckpt-step 3"
    saving = f"--save {tmp_path}/ckpt --save-interval 5 --exit-interval 5"
    middle = _run(tmp_path / "tsp", 4, f"{RECURRENT} {loading} {saving}", exits=True)
    rest = _run(
        tmp_path / "tp", 2,
        f"{RECURRENT} {CORE} --tensor-model-parallel-size 2 --sequence-parallel "
        f"{LOAD.format(tmp_path)}",
    )  # fmt: skip
    assert_same([[*middle[0], *rest[0]]], [whole[0][3:]])


def _wrong_keys():
    before = _Layout.before
    _Layout.before = lambda self, chunk: [
        span._replace(at=span.at - 1) for span in before(self, chunk)
    ]


def test_twin_that_is_broken_on_purpose_differs(reference, tmp_path):
    with pytest.raises(AssertionError):
        broken = _run(tmp_path, 2, f"{DENSE} --tsp-size 2", before=_wrong_keys)
        assert_same(broken, reference(f"{DENSE} {CORE}"))


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("hybrid", "--tsp-size 2 --hybrid-layer-pattern +-", "+-: + does not work with --tsp-size"),
        ("hybrid", "--tsp-size 1", "needs --hybrid-layer-pattern"),
        ("hybrid", "--hybrid-layer-pattern *-", "pass --tsp-size D or --tsp-baseline-core"),
        ("gpt", "--hybrid-layer-pattern *-*-", "use megatron_tsp.pretrain_hybrid"),
        (
            "hybrid",
            "--tsp-size 1 --hybrid-layer-pattern *-*E --pipeline-model-parallel-size 2 "
            "--num-experts 4 --moe-aux-loss-coeff 0.1",
            "a pipeline rank has no expert layer (E)",
        ),
        (
            "hybrid",
            "--tsp-size 1 --hybrid-layer-pattern *- --reset-attention-mask",
            "--reset-attention-mask does not work with --hybrid-layer-pattern",
        ),
        ("hybrid", "--logits-load-dir x", "pretrain_hybrid does not carry --logits-load-dir"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path, model, flags, message):
    with pytest.raises(RankFailed, match=re.escape(message)):
        train(tmp_path, 1, flags, model=model)
