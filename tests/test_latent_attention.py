"""Multi-latent attention: one layer against a plain softmax, and training against TP 1.

At TP 1 it is Megatron's with our core: outside of Transformer Engine it has none that takes heads
of two sizes.
"""

import pytest
import torch
from layers_common import config, random, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from ranks import run
from sharded import fill, sections_of, whole
from training import ULP, assert_same, train

from megatron_tsp import zigzag
from megatron_tsp.layers import latent_attention
from megatron_tsp.models.backends import BaselineSpecProvider, TSPSpecProvider, attention_part
from megatron_tsp.options import TSPOptions

SEQ, BATCH, HIDDEN = 48, 2, 24
SIZES = dict(
    num_attention_heads=6, num_query_groups=6, q_lora_rank=12, kv_lora_rank=14,
    qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=3, rope_type="rope", qk_layernorm=True,
    multi_latent_attention=True, transformer_impl="local",
)  # fmt: skip
MLA = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm"
)
SAVE = "--save {0}/ckpt --save-interval 3 --exit-interval 3"
LOAD = "--load {0}/ckpt --no-load-rng"


class Softmax(torch.nn.Module):
    """Scores of s x s, as the formula has them."""

    def __init__(self, softmax_scale=None, **_):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.einsum("bnst,tbnd->sbnd", probabilities, value).flatten(2)


def _layer(degree, breaking=False):
    rank = start(degree).rank()
    if breaking:
        latent_attention._contiguous = latent_attention._zigzag
    settings = config(degree, MLATransformerConfig, **SIZES)
    backend = TSPSpecProvider(TSPOptions()) if degree > 1 else BaselineSpecProvider()
    spec = attention_part(backend, settings)["self_attention"]
    if degree == 1:
        spec.submodules.core_attention = Softmax
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec, config=settings, layer_number=1, pg_collection=groups)
    sections = sections_of(layer)
    for name, param in layer.named_parameters():
        fill(name, param, sections, degree, rank)
    x, dy = (zigzag.take(random(SEQ, BATCH, HIDDEN, seed=s), 0, degree, rank) for s in (0, 1))
    y, _ = layer(x.requires_grad_(), None)
    y.backward(dy)
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}, sections


def _assert_same(ranks, expected):
    for name, want in expected[0][0].items():
        got = whole(name, [tensors[name] for tensors, _ in ranks], ranks[0][1])
        error = (got - want).abs().max() / want.abs().max()
        assert error <= 1e-9, (name, float(error))


@pytest.mark.parametrize("degree", [2, 3])
def test_a_layer_is_a_plain_softmax(degree):
    _assert_same(run(_layer, degree, degree), run(_layer, 1, 1))


def test_twin_whose_rotary_keys_lie_in_zigzag_differs():
    with pytest.raises(AssertionError, match="'y'"):
        _assert_same(run(_layer, 2, 2, True), run(_layer, 1, 1))


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, "--tsp-size 4 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"),
        (4, "--tsp-size 2 --context-parallel-size 2"),
    ],
)  # fmt: skip
def test_trains_as_at_tp_1(reference, tmp_path, world, flags):
    ranks = train(tmp_path, world, f"{MLA} {flags}")
    assert_same(ranks, reference(f"{MLA} --tsp-baseline-core"), loss=2.5 * ULP)


def test_a_run_flips_in_the_middle(reference, tmp_path):
    saving = f"{MLA} --tsp-baseline-core {SAVE.format(tmp_path)}"
    first = train(tmp_path / "tp1", 1, saving, exits=True)
    rest = train(tmp_path / "tsp", 2, f"{MLA} --tsp-size 2 {LOAD.format(tmp_path)}")
    assert_same([[*first[0], *rest[0]]], reference(f"{MLA} --tsp-baseline-core"), loss=2.5 * ULP)
