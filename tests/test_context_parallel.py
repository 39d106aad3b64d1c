"""Context parallelism, of Megatron's own model and beside TSP: in the real entry, against TP 1, and
the bytes of a layer, against the closed forms."""

import re
from fractions import Fraction
from functools import cache

import pytest
import torch
from layers_common import config, random, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import RankFailed, run
from training import grad_norms, losses, train

from megatron_tsp import parallel_state, traffic
from megatron_tsp.models.backends import BaselineSpecProvider, TSPSpecProvider, layer_spec
from megatron_tsp.options import TSPOptions

ULP = 4.8e-7  # of an fp32 loss between 4 and 8

LLAMA = "--group-query-attention --num-query-groups 2 --qk-layernorm"
GPT2 = (
    "no:--swiglu no:--disable-bias-linear no:--untie-embeddings-and-output-weights "
    "--normalization LayerNorm --position-embedding-type learned_absolute"
)
TP = "--tensor-model-parallel-size {} --sequence-parallel"
TSP = "--tsp-size 2 --context-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DISTRIBUTED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 5000"
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """TP 1 by Megatron's own model."""

    @cache
    def get(flags):
        return train(tmp_path_factory.mktemp("tp1"), 1, flags)

    return get


def _difference(ranks, expected):
    """(largest of the losses, largest of the gradient norms, relative)."""
    pairs = [zip(f(ranks), f(expected), strict=True) for f in (losses, grad_norms)]
    loss, norm = (list(pair) for pair in pairs)
    return max(abs(a - b) for a, b in loss), max(abs(a - b) / b for a, b in norm)


def _assert_same(ranks, expected):
    loss, norm = _difference(ranks, expected)
    assert loss <= 1.5 * ULP and norm <= 1e-6, (loss, norm)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--context-parallel-size 2 --cp-comm-type all_gather a2a --tsp-baseline-core"),
        (4, f"{TP.format(2)} --context-parallel-size 2 --tsp-baseline-core {DISTRIBUTED}"),
        (4, f"{TSP} --tsp-save-kv --tsp-attention-exchange auto"),
        (8, f"{TSP} {DISTRIBUTED} --tsp-attention-exchange alltoall"),
        (4, f"{TSP} --tsp-blocks mlp --cp-comm-type all_gather {RECOMPUTE}"),
        (4, f"{TSP} --tsp-blocks attention"),
    ],
)
def test_trains_as_at_tp_1(reference, tmp_path, world, flags):
    _assert_same(train(tmp_path, world, f"{LLAMA} {flags}"), reference(LLAMA))


def test_learned_positions_train_as_at_tp_1(reference, tmp_path):
    _assert_same(train(tmp_path, 4, f"{GPT2} {TSP}"), reference(GPT2))


def test_a_run_goes_on_with_pipeline_stages(reference, tmp_path):
    saving = f"--save {tmp_path}/checkpoint --save-interval 3 --ckpt-format torch_dist"
    flags = f"{LLAMA} {TSP} --use-distributed-optimizer"
    first = train(tmp_path / "first", 4, f"{flags} {saving} --exit-interval 3", exits=True)
    # Without dropout there is no random state to carry over.
    loading = f"--pipeline-model-parallel-size 2 --load {tmp_path}/checkpoint --no-load-rng"
    rest = train(tmp_path / "rest", 8, f"{flags} {loading}")
    last = next(rank for rank in rest if rank[0]["loss"] is not None)
    _assert_same([[*first[0], *last]], reference(LLAMA))


def _keep_kv_in_the_tsp_group():
    parallel_state.kv_group = lambda group: parallel_state.get_tsp_group()


def test_twin_without_the_other_groups_keys_differs(reference, tmp_path):
    flags = f"{LLAMA} --train-iters 2"
    ranks = train(tmp_path, 4, f"{flags} {TSP}", _keep_kv_in_the_tsp_group)
    assert _difference(ranks, reference(flags))[0] > 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tsp-size 1 --cp-comm-type p2p", "--tsp-attention-exchange says how"),
        ("--tsp-size 1 --context-parallel-size 3", "--context-parallel-size 3: sequence length 64"),
        ("--tsp-size 1 --context-parallel-size 2 --eod-mask-loss", "--calculate-per-token-loss"),
        ("--tsp-baseline-core --context-parallel-size 2 --cp-comm-type a2a+p2p",
         "--cp-comm-type a2a+p2p: without Transformer Engine's attention it is one of p2p"),
        ("--tsp-baseline-core --context-parallel-size 16 --cp-comm-type a2a", "the nearest are 16"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_by_name(tmp_path, flags, message):
    with pytest.raises(RankFailed, match=re.escape(message)):
        train(tmp_path, 1, flags)


SEQ, BATCH, HEADS, KV_HEADS, WIDTH, HIDDEN, FFN = 48, 2, 12, 4, 4, 48, 96
TOKENS, KV = SEQ * BATCH, KV_HEADS * WIDTH
ATTENTION, MLP = HIDDEN * (2 * HIDDEN + 2 * KV), HIDDEN * 3 * FFN


def _layers(degree, context, kinds):
    """{kind: {(group, block): bytes of a layer's forward and backward}}."""
    start(degree, context=context)
    results = {}
    for kind in kinds:
        settings = config(
            degree, hidden_size=HIDDEN, kv_channels=WIDTH, ffn_hidden_size=FFN,
            num_query_groups=KV_HEADS, params_dtype=torch.float32,
            context_parallel_size=context, cp_comm_type=kind,
        )  # fmt: skip
        if kind in ("allgather", "alltoall"):
            backend = TSPSpecProvider(TSPOptions(attention_exchange=kind))
        elif kind == "save_kv":
            backend = TSPSpecProvider(TSPOptions(save_kv=True))
        else:
            backend = BaselineSpecProvider()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        submodules = layer_spec(backend, settings).submodules
        layer = TransformerLayer(settings, submodules, pg_collection=groups)
        counter = traffic.install()
        counter.reset()
        x = random(SEQ // degree // context, BATCH, HIDDEN).float().requires_grad_()
        layer(x, None)[0].sum().backward()
        sums = {}
        for (_, group, block), size in counter.snapshot(exact=True).items():
            sums[group, block] = sums.get((group, block), 0) + size
        results[kind] = sums
    return results


def test_a_layer_sends_what_the_formula_says():
    degree, context = 2, 3
    of_context, of_all = Fraction(context - 1, context), Fraction(5, 6)
    tensor = {("tsp", "other"): Fraction(1, 2) * 10 * TOKENS // context * HIDDEN * 4}
    gathered = of_context * 6 * TOKENS * KV // degree * 4
    weights = {
        ("tsp-weights", block): Fraction(3, 2) * size * 4
        for block, size in (("attention", ATTENTION), ("mlp", MLP))
    }
    expected = {
        "p2p": {**tensor, ("cp", "attention"): gathered},
        "all_gather": {**tensor, ("cp", "attention"): gathered},
        "allgather": {**weights, ("tsp-kv", "attention"): of_all * 6 * TOKENS * KV * 4},
        "save_kv": {**weights, ("tsp-kv", "attention"): of_all * 4 * TOKENS * KV * 4},
    }
    for counted in run(_layers, degree * context, degree, context, tuple(expected)):
        assert counted == expected
