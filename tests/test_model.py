"""The whole model's loss and every parameter's gradient, against Megatron's own GPT at TP 1."""

import zlib
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers_common import config, random, start
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import GPTModelBuilder
from ranks import run

from megatron_tsp import zigzag
from megatron_tsp.gradients import Gradients
from megatron_tsp.layers import loss
from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig
from megatron_tsp.options import TSPOptions

SEQ, BATCH, VOCAB = 48, 2, 48
SECTION = [2, 1, 1]  # of pairs of channels: time, height, width
GPT2 = dict(
    gated_linear_unit=False, activation_func=F.gelu, add_bias_linear=True, normalization="LayerNorm"
)
MODELS = {
    "llama": (dict(num_query_groups=12), dict(position_embedding_type="rope")),
    "gqa-tied": (
        dict(num_query_groups=2, kv_channels=6),
        dict(position_embedding_type="rope", share_embeddings_and_output_weights=True),
    ),
    "mqa-qk-norm-qkv-bias": (
        dict(num_query_groups=1, kv_channels=6, qk_layernorm=True, add_qkv_bias=True),
        dict(position_embedding_type="rope", rotary_percent=0.5),
    ),
    "window-sinks-gate": (
        dict(
            num_query_groups=12,
            window_size=(10, 0),
            window_attn_skip_freq=2,
            no_rope_freq=[0, 1],
            softmax_type="learnable",
            attention_output_gate=True,
            rotary_interleaved=True,
        ),
        dict(position_embedding_type="rope"),
    ),  # fmt: skip
    "gpt2": (GPT2, dict(share_embeddings_and_output_weights=True)),
    "gpt2-rmsnorm-untied": ({**GPT2, "normalization": "RMSNorm"}, dict()),
}

#: What is the same code for every D: tried at one.
OTHERS = {
    "squared-relu": (
        {**GPT2, "activation_func": squared_relu, "softmax_scale": 0.3},
        dict(position_embedding_type="none"),
    ),
    "quick-geglu": (
        dict(activation_func=quick_gelu, kv_channels=8, rotary_interleaved=True),
        dict(position_embedding_type="rope", seq_len_interpolation_factor=2.0),
    ),
    "mrope": (
        dict(kv_channels=8, num_query_groups=12, mrope_section=SECTION),
        dict(position_embedding_type="mrope"),
    ),
    "rope-scaling": (
        dict(kv_channels=8),
        dict(position_embedding_type="rope", rope_scaling=True, rope_scaling_factor=4.0),
    ),
}


def _part(whole, param, degree, rank):
    """A rank's shard of a whole parameter, by Megatron's attributes."""
    if not getattr(param, "tensor_model_parallel", False) or degree == 1:
        return whole
    pieces = whole.chunk(degree * param.partition_stride, dim=param.partition_dim)
    return torch.cat(pieces[rank::degree], dim=param.partition_dim)


def _fused_name(key):
    """A streamed block has its norm inside its first linear."""
    key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def _set_parameters(model, degree, rank):
    """Random values, also where Megatron starts from zeros and ones."""
    for name, param in model.named_parameters():
        shape = list(param.shape)
        if getattr(param, "tensor_model_parallel", False):
            shape[param.partition_dim] *= degree
        whole = 0.2 * random(*shape, seed=zlib.crc32(_fused_name(name).encode()))
        param.data = _part(whole, param, degree, rank).to(torch.float64).contiguous()


def _batch(name):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    weights = random(BATCH, SEQ, seed=5)
    weights[0, :30] = 0  # a loss mask that is uneven over ranks
    return ids[:, :-1], _positions(name), ids[:, 1:], weights


def _positions(name):
    """[b, s]; of multimodal RoPE [3, b, s]: text, an image of 4 x 5 in each sample, text."""
    text = torch.arange(SEQ).expand(BATCH, SEQ)
    if "mrope" not in name:
        return text
    positions = text.repeat(3, 1, 1)
    for sample, first in enumerate((9, 21)):
        patch = torch.arange(20)
        image = torch.stack((0 * patch, patch // 5, patch % 5)) + first
        positions[:, sample, first : first + 20] = image
        positions[:, sample, first + 20 :] -= 15  # behind it: from its largest position on
    return positions


def _gpt_config(cls, name, degree, **extra):
    transformer, model = {**MODELS, **OTHERS}[name]
    settings = config(degree, transformer_impl="local", **{"kv_channels": 4, **transformer})
    return cls(transformer=settings, vocab_size=VOCAB, seq_length=SEQ, **model, **extra)


def _tsp(name, degree, breaking=None, options=None):
    group = start(degree)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    options = options or TSPOptions(loss_chunk=13)
    gpt = _gpt_config(TSPGPTModelConfig, name, degree, tsp=options)
    model = TSPGPTModelBuilder(gpt).build_model(groups)
    _set_parameters(model, degree, group.rank())
    if breaking:
        breaking()
    ids, positions, labels, weights = _batch(name)
    value = model(ids, positions, None, labels=labels)
    (value * weights).sum().backward()
    grads = {}
    for key, param in model.named_parameters():
        grad = param.grad.clone()
        replicated = "q_layernorm" in key or "k_layernorm" in key
        if getattr(param, "sequence_parallel", False) or replicated:
            dist.all_reduce(grad, group=group)  # Megatron does it after the backward
        grads[key] = grad
    shapes = {
        key: (getattr(p, "partition_dim", None), getattr(p, "partition_stride", None))
        for key, p in model.named_parameters()
        if getattr(p, "tensor_model_parallel", False)
    }
    return value.detach(), grads, shapes


def _megatron(name):
    """Megatron's own model, its own attention; the loss from its logits in fp64."""
    start(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(_gpt_config(GPTModelConfig, name, 1)).build_model(groups)
    _set_parameters(model, 1, 0)
    ids, positions, labels, weights = _batch(name)
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    logits = model(ids, positions, mask)
    value = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    (value * weights).sum().backward()
    return value.detach(), {key: p.grad.clone() for key, p in model.named_parameters()}


@cache
def _reference(name):
    return run(_megatron, 1, name)[0]


def _compare(name, degree, results):
    value, grads = _reference(name)
    for rank, (got_value, got_grads, sharded) in enumerate(results):
        torch.testing.assert_close(got_value, value, rtol=1e-9, atol=1e-9)
        grads = {_fused_name(key): whole for key, whole in grads.items()}
        assert got_grads.keys() == grads.keys()
        for key, whole in grads.items():
            if key in sharded and degree > 1:
                dim, stride = sharded[key]
                pieces = whole.chunk(degree * stride, dim=dim)
                whole = torch.cat(pieces[rank::degree], dim=dim)
            torch.testing.assert_close(
                got_grads[key], whole, rtol=1e-8, atol=1e-9,
                msg=lambda text, key=key, rank=rank: f"gradient of {key} on rank {rank}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_megatron(name, degree):
    if name == "gqa-tied" and degree == 3:
        degree = 6  # Megatron wants D to divide the KV heads, or to be a multiple of them
    _compare(name, degree, run(_tsp, degree, name, degree))


@pytest.mark.parametrize(
    ("name", "degree"), [*((name, 2) for name in OTHERS), ("mrope", 3), ("mrope", 4)]
)
def test_other_activations_and_positions_equal_megatron(name, degree):
    _compare(name, degree, run(_tsp, degree, name, degree))


@pytest.mark.parametrize("schedule", ["ring", "broadcast", "gather"])
def test_every_schedule_gives_the_same(schedule):
    kinds = ("attention_schedule", "mlp_schedule", "vocab_schedule")
    options = TSPOptions(
        **dict.fromkeys(kinds, schedule), loss_chunk=1000, mlp_save_activations=True
    )
    _compare("gqa-tied", 2, run(_tsp, 2, "gqa-tied", 2, None, options))


def _wrong_zigzag():
    zigzag.chunks_of = lambda rank, degree: (2 * rank, 2 * rank + 1)


def _dropped_dw():
    add = Gradients.add_product
    Gradients.add_product = lambda self, index, dy, x: add(
        self, index, dy if dist.get_rank() else 0 * dy, x
    )


def _doubled_loss_gradient():
    backward = loss._GatherTokens.backward
    loss._GatherTokens.backward = staticmethod(
        lambda ctx, whole: (2 * backward(ctx, whole)[0], None)
    )


def _times_for_all():
    rope = MultimodalRotaryEmbedding.forward
    MultimodalRotaryEmbedding.forward = lambda self, ids, *rest, **more: rope(
        self, ids[:1].expand(3, -1, -1), *rest, **more
    )


def _first_tokens():
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda angles, dim, group: angles[
        : len(angles) // group.size()
    ]


@pytest.mark.parametrize("breaking", [_times_for_all, _first_tokens])
def test_twin_with_positions_of_another_kind_or_rank_differs(breaking):
    results = run(_tsp, 2, "mrope", 2, breaking)
    with pytest.raises(AssertionError, match="not close|not equal"):
        _compare("mrope", 2, results)


@pytest.mark.parametrize("breaking", [_wrong_zigzag, _dropped_dw, _doubled_loss_gradient])
def test_twin_that_is_broken_on_purpose_differs(breaking):
    results = run(_tsp, 2, "llama", 2, breaking)
    with pytest.raises(AssertionError, match="not close|not equal"):
        _compare("llama", 2, results)
