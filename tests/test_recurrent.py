"""One layer that scans the sequence, Mamba or gated delta net: output, every gradient, and bytes.

The reference is Megatron's layer between Megatron's linears, on one rank. Weights are fp64; what
Megatron's code computes in fp32, whatever the weights are, bounds the agreement.
"""

from fractions import Fraction
from types import SimpleNamespace

import pytest
from layers_common import config, random, sent, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from ranks import run
from sharded import fill, sections_of, whole

from megatron_tsp import traffic, zigzag
from megatron_tsp.layers import heads_linear
from megatron_tsp.models.backends import BaselineSpecProvider, TSPSpecProvider
from megatron_tsp.models.hybrid import stack_spec
from megatron_tsp.options import TSPOptions

SEQ, BATCH, HIDDEN = 48, 2, 24
LAYERS = {"mamba_layer": "mixer", "gdn_layer": "self_attention"}
SETTINGS = dict(
    linear_num_key_heads=6, linear_num_value_heads=12, linear_key_head_dim=4,
    linear_value_head_dim=6, mamba_num_heads=12, mamba_head_dim=4, mamba_num_groups=6,
    mamba_state_dim=3, transformer_impl="local",
)  # fmt: skip
BAR = {"mamba_layer": 1e-6, "gdn_layer": 1e-5}


def _run(degree, breaking=False):
    """{layer: ({name: tensor}, sections, bytes forward, bytes backward)} of this rank."""
    rank = start(degree).rank()
    if breaking:
        heads_linear.zigzag = SimpleNamespace(take=zigzag.take, to_natural=lambda t, *_: t)
    settings = config(degree, hidden_size=HIDDEN, **SETTINGS)
    backend = TSPSpecProvider(TSPOptions()) if degree > 1 else BaselineSpecProvider()
    groups, counter = ProcessGroupCollection.use_mpu_process_groups(), traffic.install()
    results = {}
    for kind, inner in LAYERS.items():
        spec = getattr(stack_spec(backend, settings).submodules, kind)
        layer = build_module(spec, settings, layer_number=1, pg_collection=groups)
        sections = sections_of(layer, getattr(layer, inner))
        names = {f"{inner}.in_proj.layer_norm_weight": "norm", "norm.weight": "norm",
                 "input_layernorm.weight": "norm"}  # fmt: skip
        params = {names.get(name, name): param for name, param in layer.named_parameters()}
        for name, param in params.items():
            fill(name, param, sections, degree, rank)
        x, dy = (zigzag.take(random(SEQ, BATCH, HIDDEN, seed=s), 0, degree, rank) for s in (0, 1))
        counter.reset()
        y = layer(x.requires_grad_(), None)
        y = y[0] if isinstance(y, tuple) else y
        forward = sent(counter)
        y.backward(dy)
        grads = {name: param.grad for name, param in params.items()}
        results[kind] = {"y": y.detach(), "dx": x.grad, **grads}, sections, forward, sent(counter)
    return results


def assert_same(ranks, expected):
    for kind in LAYERS:
        ours, (want, *_) = [rank[kind][0] for rank in ranks], expected[kind]
        assert ours[0].keys() == want.keys()
        for name in want:
            got = whole(name, [rank[name] for rank in ours], ranks[0][kind][1])
            error = (got - want[name]).abs().max() / want[name].abs().max()
            assert error <= BAR[kind], (kind, name, float(error))


@pytest.fixture(scope="module")
def expected():
    return run(_run, 1, 1)[0]


@pytest.mark.parametrize("degree", [2, 3])
def test_layers_are_those_of_one_rank_and_send_what_they_should(expected, degree):
    ranks = run(_run, degree, degree)
    assert_same(ranks, expected)
    between = {"mamba_layer": 2 * 48 + 2 * 18 + 12 + 48, "gdn_layer": 2 * 24 + 2 * 72 + 24 + 72}
    for kind, inner in LAYERS.items():
        want = expected[kind][0]
        weights = sum(want[f"{inner}.{name}.weight"].numel() for name in ("in_proj", "out_proj"))
        f, tokens = Fraction(degree - 1, degree), SEQ * BATCH * between[kind] // degree
        for _, _, forward, backward in (rank[kind] for rank in ranks):
            assert forward == {"attention": f * (weights + tokens) * 8}
            assert backward == {"attention": f * (2 * weights + tokens) * 8}


def test_twin_that_scans_the_zigzag_differs(expected):
    with pytest.raises(AssertionError, match="layer', 'y'"):
        assert_same(run(_run, 2, 2, True), expected)
