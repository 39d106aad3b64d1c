"""Mixtures of experts: experts spread over the TSP group, through `pretrain`, against TP 1."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from experts import same_experts
from megatron.core.transformer.moe import router
from ranks import RankFailed
from reference import assert_same, references
from training import losses, train

from megatron_tsp.errors import TSPError
from megatron_tsp.layers.shared_experts import TSPSharedExpertMLP
from megatron_tsp.models import backends
from megatron_tsp.options import TSPOptions

COMMON = "--num-experts 4 --moe-ffn-hidden-size 48 --group-query-attention --num-query-groups 2"
MIXED = (
    f"{COMMON} --moe-layer-freq ([0,1]) --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate"
)
# sigmoid scores, routing by groups, balance by an expert bias and two auxiliary losses
BIASED = (
    f"{COMMON} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 1.5 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.05 0.05"
)
# one expert a token, nothing gated, tied embeddings
GPT2 = (
    "no:--swiglu no:--untie-embeddings-and-output-weights --normalization LayerNorm "
    "--position-embedding-type learned_absolute --no-bias-gelu-fusion "
    "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input "
    "--moe-aux-loss-coeff 0.05"
)
QUANTILES = f"{COMMON} --moe-router-load-balancing-type quantile_balancing"
EP = "--tsp-size {0} --expert-model-parallel-size {0}"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"


reference = references(before=same_experts)


def _run(folder, world, flags, before=same_experts):
    return train(folder, world, flags, before=before)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, EP.format(2)),
        (4, f"{EP.format(4)} {ALL_TO_ALL}"),
        (4, f"--tsp-size 4 --expert-model-parallel-size 2 {ALL_TO_ALL} "
            "--recompute-granularity selective --recompute-modules moe mlp layernorm"),
        (4, f"--tsp-size 2 --expert-model-parallel-size 4 {ALL_TO_ALL} "
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--ddp-bucket-size 5000"),
        (2, "--tsp-size 2 --expert-tensor-parallel-size 2 "
            "--recompute-granularity selective --recompute-modules shared_experts"),
        (2, f"{EP.format(2)} {ALL_TO_ALL} --tsp-blocks attention "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --tsp-baseline-core "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    ],
)  # fmt: skip
def test_dense_and_moe_layers_train_as_at_tp_1(reference, tmp_path, world, flags):
    assert_same(_run(tmp_path, world, f"{MIXED} {flags}"), reference(MIXED))


def _same_experts_and_routers():
    """And after each step the routers of a TSP group are the same, to the bit."""
    from megatron.training import training

    same_experts()
    step = training.train_step

    def step_and_compare(*args, **kwargs):
        result = step(*args, **kwargs)
        seen = 0
        for module in args[2][0].modules():
            if isinstance(module, router.Router):
                for value in module.state_dict().values():
                    others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
                    dist.all_gather(others, value.detach().contiguous())
                    assert all(torch.equal(value, other) for other in others)
                    seen += 1
        assert seen
        return result

    training.train_step = step_and_compare


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (BIASED, f"{EP.format(2)} {ALL_TO_ALL}"),
        (GPT2, f"{EP.format(2)} --tsp-blocks mlp"),
        (QUANTILES, f"{EP.format(2)} --tsp-mlp-save-activations"),
    ],
)
def test_other_routers_train_as_at_tp_1(reference, tmp_path, model, flags):
    assert_same(_run(tmp_path, 2, f"{model} {flags}", _same_experts_and_routers), reference(model))


def _router_gradients_not_summed():
    same_experts()
    reset = router.Router.reset_parameters

    def local_only(self):
        reset(self)
        self.weight.sequence_parallel = False

    router.Router.reset_parameters = local_only


def _balance_of_local_tokens():
    same_experts()
    count = router.get_tokens_per_expert_and_token_count

    def of_one_rank(routing_map, reduce_group, **kwargs):
        return count(routing_map, dist.new_subgroups(1)[0], **kwargs)

    router.get_tokens_per_expert_and_token_count = of_one_rank


@pytest.mark.parametrize("breaking", [_router_gradients_not_summed, _balance_of_local_tokens])
def test_twin_that_is_broken_on_purpose_differs(reference, tmp_path, breaking):
    broken = _run(tmp_path, 2, f"{MIXED} {EP.format(2)}", breaking)
    with pytest.raises(AssertionError):
        assert_same(broken, reference(MIXED))


SAVE = "--save {0}/ckpt --save-interval 3 --ckpt-format torch_dist"
LOAD = "--load {0}/ckpt --ckpt-format torch_dist --no-load-rng"
TP_EP = (
    "--tensor-model-parallel-size 2 --sequence-parallel --tsp-baseline-core "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, TP_EP), (4, f"{EP.format(2)} {ALL_TO_ALL} --pipeline-model-parallel-size 2")),
        ((2, EP.format(2)), (2, TP_EP)),
        ((1, ""), (4, f"{EP.format(4)} {ALL_TO_ALL} --no-load-optim")),
    ],
)
def test_a_run_flips_in_the_middle(reference, tmp_path, before, after):
    world, flags = before
    saving = f"{MIXED} {flags} {SAVE.format(tmp_path)} --exit-interval 3"
    first = train(tmp_path / "first", world, saving, before=same_experts, exits=True)
    world, flags = after
    loading = f"{MIXED} {LOAD.format(tmp_path)}"
    rest = train(tmp_path / "rest", world, f"{loading} {flags}")
    if "--no-load-optim" in flags:  # from TP 1's weights, with a new optimizer as at TP 1
        with pytest.raises(RankFailed, match="an optimizer of its own for the experts"):
            train(tmp_path / "refused", world, f"{loading} {flags.removesuffix('--no-load-optim')}")
        expected = train(tmp_path / "tp1", 1, f"{loading} --no-load-optim")
        return assert_same(rest, expected)
    joined = [[*first[0], *next(rank for rank in rest if rank[0]["loss"] is not None)]]
    assert_same(joined, reference(MIXED))


@pytest.mark.parametrize(
    "flag", ["--moe-router-force-load-balancing", "--moe-router-force-biased 0.5"]
)
def test_random_routing_trains(tmp_path, flag):
    """For benchmarks; every rank draws its own logits, so there is no reference."""
    values = losses(_run(tmp_path, 2, f"{MIXED} {EP.format(2)} {ALL_TO_ALL} {flag}"))
    assert values[-1] < values[0] < 6


def test_grouped_experts_are_transformer_engines(monkeypatch):
    config = SimpleNamespace(moe_grouped_gemm=True)
    provider = backends.TSPSpecProvider(TSPOptions())
    with pytest.raises(TSPError, match="--moe-grouped-gemm needs Transformer Engine"):
        provider.moe(config)
    asked = SimpleNamespace(grouped_mlp_modules=lambda grouped: ("grouped experts", grouped))
    monkeypatch.setattr(backends.transformer_engine, "HAVE_TE", True)
    monkeypatch.setattr(backends, "TESpecProvider", lambda: asked)
    submodules = provider.moe(config).keywords["submodules"]
    assert submodules.experts == ("grouped experts", True)
    shared = submodules.shared_experts
    assert shared.func is TSPSharedExpertMLP  # they stream all the same
