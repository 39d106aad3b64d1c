"""dW in low precision: the error against fp64 does not grow with D, and it lands in main_grad."""

import sys
import types

import pytest
import torch
from layers_common import config, random, start
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from ranks import run

from megatron_tsp import traffic, zigzag
from megatron_tsp.layers.core_attention import TSPCoreAttention
from megatron_tsp.layers.linear import TSPColumnParallelLinear, TSPRowParallelLinear
from megatron_tsp.layers.mlp import TSPMLP
from megatron_tsp.layers.norm import Normalize
from megatron_tsp.options import TSPOptions

SEQ, HIDDEN, FFN = 256, 64, 64


def _mlp(degree, rank, options, **changes):
    settings = config(
        degree, hidden_size=HIDDEN, num_attention_heads=8, num_query_groups=8, ffn_hidden_size=FFN,
        params_dtype=torch.bfloat16, gated_linear_unit=False, activation_func=torch.relu, **changes,
    )  # fmt: skip
    linears = [TSPColumnParallelLinear, TSPRowParallelLinear]
    how = {"schedule": options.mlp_schedule, "kind": "mlp", "wide_grads": options.wide_grads}
    builders = [lambda *a, cls=cls, **k: cls(*a, **k, **how) for cls in linears]
    mlp = TSPMLP(settings, MLPSubmodules(*builders), ffn_hidden_size=FFN)
    w1, w2 = _weights()
    mlp.linear_fc1.weight.data.copy_(w1.chunk(degree)[rank])
    mlp.linear_fc2.weight.data.copy_(w2.chunk(degree, 1)[rank])
    return mlp


def _weights():
    """Exact in bf16."""
    return random(FFN, HIDDEN, seed=1).bfloat16(), random(HIDDEN, FFN, seed=2).bfloat16()


def _tokens():
    return random(SEQ, 1, HIDDEN).bfloat16(), random(SEQ, 1, HIDDEN, seed=3).bfloat16()


def _main_grads(degree, options):
    """Each rank's dW as Megatron's optimizer sees it, after two micro-batches."""
    group = start(degree)
    mlp = _mlp(degree, group.rank(), options)
    weights = mlp.linear_fc1.weight, mlp.linear_fc2.weight
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    x, dy = (t.chunk(degree)[group.rank()] for t in _tokens())
    for _ in range(2):
        y, _ = mlp(x.clone().requires_grad_())
        y.backward(dy)
    assert all(weight.grad_added_to_main_grad for weight in weights)
    return [weight.main_grad for weight in weights]


def _reference():
    (w1, w2), (x, dy) = _weights(), _tokens()
    w1, w2, x, dy = (t.double().requires_grad_() for t in (w1, w2, x, dy))
    y = torch.relu(x @ w1.t()) @ w2.t()
    for _ in range(2):
        y.backward(dy, retain_graph=True)
    return w1.grad, w2.grad


def _error(degree, options):
    got = run(_main_grads, degree, degree, options)
    whole = torch.cat([g[0] for g in got]), torch.cat([g[1] for g in got], dim=1)
    pairs = zip(whole, _reference(), strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("schedule", ["ring", "broadcast", "gather"])
def test_the_error_does_not_grow_with_the_degree(schedule):
    options = TSPOptions(mlp_schedule=schedule)
    errors = {degree: _error(degree, options) for degree in (2, 4, 8)}
    for small, large in zip(errors[2], errors[8], strict=True):
        assert large <= 1.1 * small, errors


def test_twin_in_the_parameters_dtype_it_does():
    options = TSPOptions(wide_grads=False)
    for small, large in zip(_error(2, options), _error(8, options), strict=True):
        assert large > 1.2 * small


def _attention(degree, exchange):
    """Each rank's output and gradients of attention in bf16, with logits around 100."""
    group = start(degree)
    part = (SEQ, 1, 8, 16)
    q, k, v, dout = (random(*part, seed=seed).bfloat16() for seed in range(4))
    local = [zigzag.take(t, 0, degree, group.rank()) for t in (100 * q, k, v, dout)]
    leaves = [t.clone().requires_grad_() for t in local[:3]]
    groups = type("Groups", (), {"cp": group, "tp": None})
    settings = config(1, num_attention_heads=8, num_query_groups=8, kv_channels=16)
    core = TSPCoreAttention(
        settings, 1, AttnMaskType.causal, "self", pg_collection=groups, exchange=exchange
    )
    out = core(*leaves, None)
    out.backward(local[3].flatten(2))
    return [out.view_as(leaves[0]), *(t.grad for t in leaves)]


def _attention_error(degree, exchange):
    got = run(_attention, degree, degree, exchange)
    q, k, v, dout = (
        random(SEQ, 1, 8, 16, seed=seed).bfloat16().double().movedim(0, 2) for seed in range(4)
    )
    leaves = [t.requires_grad_() for t in ((100 * q).bfloat16().double(), k, v)]
    scores = leaves[0] @ leaves[1].mT / 4
    out = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf).softmax(-1)
    out = out @ leaves[2]
    out.backward(dout)
    errors = []
    for at, want in enumerate((out.detach(), *(t.grad for t in leaves))):
        whole = zigzag.to_natural(torch.cat([rank[at] for rank in got]), 0, degree)
        assert whole.isfinite().all()
        want = want.movedim(2, 0)
        errors.append(float((whole.double() - want).norm() / want.norm()))
    return errors


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_large_logits_in_bf16_do_not_overflow_and_the_error_does_not_grow(exchange):
    alone, many = _attention_error(1, exchange), _attention_error(8, exchange)
    for small, large in zip(alone, many, strict=True):
        assert large <= 1.2 * small + 1e-3, (alone, many)


def _frozen():
    group = start(2)
    mlp = _mlp(2, group.rank(), TSPOptions())
    mlp.linear_fc1.weight.requires_grad_(False)
    counter = traffic.install()
    x, dy = (t.chunk(2)[group.rank()] for t in _tokens())
    y, _ = mlp(x.clone().requires_grad_())
    counter.reset()
    y.backward(dy)
    assert mlp.linear_fc1.weight.grad is None and mlp.linear_fc2.weight.grad is not None
    return counter.total()


def test_a_frozen_weight_sends_no_gradient():
    weights, dw_of_one = 2 * FFN * HIDDEN * 2, FFN * HIDDEN * 4
    assert run(_frozen, 2) == [(weights + dw_of_one) // 2] * 2


def _with_apexs_kernel():
    """A stand-in that notes its calls: the kernel itself needs a GPU."""
    calls = []

    def wgrad_gemm_accum_fp32(x, dy, target):
        calls.append(target.dtype)
        target.add_(dy.float().t() @ x.float())

    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    sys.modules[module.__name__] = module
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True
    group = start(2)
    mlp = _mlp(2, group.rank(), TSPOptions(), gradient_accumulation_fusion=True)
    x, dy = (t.chunk(2)[group.rank()] for t in _tokens())
    y, _ = mlp(x.clone().requires_grad_())
    y.backward(dy)
    assert calls == [torch.float32] * 4  # two weights, two owners
    return mlp.linear_fc1.weight.grad


def test_gradient_accumulation_fusion_uses_apexs_kernel():
    got = torch.cat(run(_with_apexs_kernel, 2))
    want = _reference()[0] / 2
    assert float((got.double() - want).norm() / want.norm()) < 0.01


@pytest.mark.parametrize("rms", [True, False])
def test_a_weight_stored_as_its_distance_from_one_counts_in_bf16(rms):
    """1 + 1/512 is 1 in bf16 (--apply-layernorm-1p)."""
    normalize = Normalize(rms=rms, eps=1e-5, zero_centered=True)
    x, dy = random(64, 32).bfloat16(), random(64, 32, seed=3).bfloat16()
    weight = torch.full((32,), 1 / 512, dtype=torch.bfloat16)
    bias = None if rms else random(32, seed=4).bfloat16()
    y, statistics = normalize.forward(x, weight, bias)
    assert y.dtype == x.dtype
    assert torch.equal(normalize.again(x, weight, bias, statistics), y)
    dx, dweight, dbias = normalize.backward(dy, x, weight, bias, statistics)

    wide = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    mean = 0 if rms else wide[0].mean(-1, keepdim=True)
    square = (wide[0] - mean).square().mean(-1, keepdim=True)
    exact = (wide[0] - mean) * (square + 1e-5).rsqrt() * (1 + wide[1])
    exact = exact if rms else exact + wide[2]
    exact.backward(dy.double())

    half_an_ulp = 2**-8  # relative, of bf16's rounding
    torch.testing.assert_close(y.double(), exact.detach(), rtol=1.01 * half_an_ulp, atol=1e-6)
    for got, want in zip((dx, dweight, dbias), wide, strict=True):
        if want is not None:
            torch.testing.assert_close(got.double(), want.grad, rtol=0.01, atol=0.01)
    without = Normalize(rms=rms, eps=1e-5, zero_centered=False)
    ones = without.forward(x, torch.ones_like(weight), bias)[0]
    assert not torch.equal(ones, y)
