"""Mixtures of experts: experts spread over the TSP group, through `pretrain`, against TP 1."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from experts import same_experts
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.experts import SequentialMLP
from ranks import RankFailed
from training import assert_same, losses, train

from megatron_tsp import gradients
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
    "--moe-aux-loss-coeff 0.05 --moe-layer-freq ([0,1])"
)
QUANTILES = f"{COMMON} --moe-router-load-balancing-type quantile_balancing"
EP = "--tsp-size {0} --expert-model-parallel-size {0}"
ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"


@pytest.fixture
def reference(reference):
    return partial(reference, before=same_experts)


def _run(folder, world, flags, before=same_experts):
    return train(folder, world, flags, before=before)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{EP.format(2)} --tsp-mlp-save-activations"),
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
        (QUANTILES, EP.format(2)),
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


BF16 = f"{MIXED} --bf16 --accumulate-allreduce-grads-in-fp32 --moe-router-dtype fp32"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def _same_in_bf16(ranks, expected):
    """Seen: 2.5e-4 in the loss, 6.4e-4 of the gradient norm; 5e-3 of it where dW is 1 % off."""
    assert_same(ranks, expected, loss=1e-3, grad_norm=2e-3)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{EP.format(2)} {ALL_TO_ALL}"),
        (4, f"--tsp-size 2 --expert-model-parallel-size 4 {DISTRIBUTED} --ddp-bucket-size 5000"),
    ],
)
def test_bf16_trains_as_at_tp_1(reference, tmp_path, world, flags):
    _same_in_bf16(_run(tmp_path, world, f"{BF16} {flags}"), reference(BF16))


def _dw_a_little_off():
    same_experts()
    add = gradients.Gradients.add_product
    gradients.Gradients.add_product = lambda self, at, dy, x: add(self, at, dy, x * 1.01)


def _tokens_come_back_to_others():
    same_experts()
    forward = SequentialMLP.forward

    def broken(self, *args, **kwargs):
        output, bias = forward(self, *args, **kwargs)
        return output.roll(1, 0), bias

    SequentialMLP.forward = broken


@pytest.mark.parametrize("breaking", [_dw_a_little_off, _tokens_come_back_to_others])
def test_twin_in_bf16_differs(reference, tmp_path, breaking):
    broken = _run(tmp_path, 2, f"{BF16} {EP.format(2)}", breaking)
    with pytest.raises(AssertionError):
        _same_in_bf16(broken, reference(BF16))


SAVE = "--save {0}/ckpt --save-interval 3 --ckpt-format torch_dist"
LOAD = "--load {0}/ckpt --ckpt-format torch_dist --no-load-rng"
TP_EP = (
    "--tensor-model-parallel-size 2 --sequence-parallel --tsp-baseline-core "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)


RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize(
    ("before", "continuations"),
    [
        ((2, TP_EP), [(4, f"{EP.format(2)} {ALL_TO_ALL} --pipeline-model-parallel-size 2")]),
        ((2, EP.format(2)), [(2, TP_EP), (4, "--tsp-size 2 --expert-model-parallel-size 4")]),
        ((4, f"{EP.format(2)} {RESHARDABLE}"), [
            (4, f"{TP_EP} --expert-model-parallel-size 4 {RESHARDABLE}"),
            (2, f"--tsp-size 2 {RESHARDABLE}")]),
    ],
)  # fmt: skip
def test_a_run_flips_in_the_middle(reference, tmp_path, before, continuations):
    first = _begin(tmp_path, *before)
    for at, (world, flags) in enumerate(continuations):
        rest = train(tmp_path / f"rest{at}", world, f"{MIXED} {LOAD.format(tmp_path)} {flags}")
        joined = [[*first[0], *next(rank for rank in rest if rank[0]["loss"] is not None)]]
        assert_same(joined, reference(MIXED))


def _begin(folder, world, flags):
    """Three of six steps, saved."""
    saving = f"{MIXED} {flags} {SAVE.format(folder)} --exit-interval 3"
    return train(folder / "first", world, saving, before=same_experts, exits=True)


@pytest.mark.parametrize("before", [(1, ""), (2, EP.format(2))])
def test_weights_flip_to_and_from_tp_1(tmp_path, before):
    """Megatron does not convert the optimizer: both go on with a new one."""
    _begin(tmp_path, *before)
    loading = f"{MIXED} {LOAD.format(tmp_path)}"
    spread = f"{EP.format(4)} {ALL_TO_ALL}"
    rest = train(tmp_path / "rest", 4, f"{loading} {spread} --no-load-optim")
    assert_same(rest, train(tmp_path / "tp1", 1, f"{loading} --no-load-optim"))
    if before[0] == 1:
        with pytest.raises(RankFailed, match="an optimizer of its own for the experts"):
            train(tmp_path / "refused", 4, f"{loading} {spread}")


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
