"""What a layer keeps for the backward, counted in bytes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers_common import config, random, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import run

from megatron_tsp.layers import core_attention, head_exchange, kv_gather
from megatron_tsp.models.backends import TSPSpecProvider, layer_spec
from megatron_tsp.options import TSPOptions
from megatron_tsp.trace.memory import LiveBytes

SEQ, BATCH, HEADS, WIDTH, FFN = 64, 2, 4, 8, 128
HIDDEN = HEADS * WIDTH


def _saved(degree, options, changes):
    """Bytes saved for the backward by one layer, less its parameters, in [s/D, b, h] tensors."""
    start(degree)
    settings = config(
        degree, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN,
        **{"num_query_groups": HEADS, **changes},
    )  # fmt: skip
    spec = layer_spec(TSPSpecProvider(options), settings)
    layer = TransformerLayer(
        settings, spec.submodules, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    x = random(SEQ // degree, BATCH, HIDDEN).requires_grad_()
    angles = random(SEQ // degree, 1, 1, WIDTH).float()
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer(x, None, rotary_pos_emb=angles)  # what all layers share is there after the first
    shared = sum(
        t.untyped_storage().nbytes() for pair in angles._tsp_cos_sin.values() for t in pair
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, None, rotary_pos_emb=angles)
    one = x.untyped_storage().nbytes()
    tokens = SEQ // degree * BATCH
    statistics = tokens * x.element_size() * (HEADS + 2)  # lse of each head, rstd of two norms
    return (sum(kept.values()) - shared - statistics) / one


@pytest.mark.parametrize("degree", [1, 2])
def test_a_layer_keeps_six_tensors_and_the_row_statistics(degree):
    """x, q, k, v, the attention's output, x after the attention."""
    for exchange in ("allgather", "alltoall"):
        options = TSPOptions(attention_exchange=exchange)
        assert run(_saved, degree, degree, options, {}) == [6.0] * degree


def test_kept_keys_and_values_are_the_whole_sequences():
    options = TSPOptions(save_kv=True)
    assert run(_saved, 2, 2, options, {}) == [4.0 + 2 * 2] * 2


def test_grouped_queries_keep_smaller_keys_and_values():
    assert run(_saved, 2, 2, TSPOptions(), {"num_query_groups": 2}) == [5.0] * 2


def test_kept_hidden_activations_are_what_the_flag_says():
    options = TSPOptions(mlp_save_activations=True)
    assert run(_saved, 2, 2, options, {}) == [6.0 + 2 * FFN / HIDDEN] * 2


def test_a_layer_with_biases_and_layernorm_keeps_no_more():
    changes = dict(
        normalization="LayerNorm", add_bias_linear=True, gated_linear_unit=False,
        activation_func=F.gelu,
    )  # fmt: skip
    tokens = SEQ // 2 * BATCH
    means = 2 * tokens / (tokens * HIDDEN)  # LayerNorm keeps a mean as well
    for kept in run(_saved, 2, 2, TSPOptions(), changes):
        assert kept == pytest.approx(6.0 + means)


def _attention_backward(exchanges):
    """For each exchange: the most that an attention's backward holds, in [s/D, b, h] tensors: from
    its inputs' gradients to what is kept; the same with the graph kept; and whether two backwards
    agree then."""
    start(2)
    heads, width = 32, 16
    for module in (kv_gather, head_exchange):  # exchanges of a head, as at long contexts
        module._WORTH_SPLITTING = 0
    kv_gather._TOO_MANY = kv_gather._TOO_MANY_BACKWARD = 0
    groups = type("Groups", (), {"cp": dist.group.WORLD, "tp": None})
    settings = config(1, num_attention_heads=heads, num_query_groups=heads, kv_channels=width)
    results = []
    for exchange in exchanges:
        core = core_attention.TSPCoreAttention(
            settings, 1, AttnMaskType.causal, "self", pg_collection=groups, exchange=exchange
        )
        *qkv, weight = (random(SEQ, BATCH, heads, width, seed=seed) for seed in range(4))
        for t in qkv:
            t.requires_grad_()

        def backward(retain, core=core, qkv=qkv, weight=weight):
            with LiveBytes() as live:
                there = live.current
                total = (core(*qkv, None).view_as(weight) * weight).sum()
                live.reset_peak()
                grads = torch.autograd.grad(total, qkv, retain_graph=retain)
                peak = (live.peak - there) / weight.nbytes
            return peak, grads, total

        peak, grads, _ = backward(False)
        retained, first, total = backward(True)
        same = [
            all(torch.equal(*pair) for pair in zip(grads, others, strict=True))
            for others in (first, torch.autograd.grad(total, qkv))
        ]
        results.append((peak, retained, all(same)))
    return results


def test_attentions_backward_lets_go_of_what_it_has_used():
    """Of q, k, v, out, dout, dq, dk, dv no more than five are there at a time."""
    for peak, retained, same in sum(run(_attention_backward, 2, ("allgather", "alltoall")), []):
        assert peak < 5.4
        assert retained > 7.5  # the same count sees what lives on when the graph does
        assert same
