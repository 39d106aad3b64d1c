"""Megatron's own layers with a flash attention, for `--spec benchmarks.stock block_spec`.

Neither Transformer Engine nor Apex runs without a GPU, and of Megatron's local modules two are of
no use here: the attention makes all s x s scores, and the norm refuses sequence parallelism. So the
attention is PyTorch's flash kernel, on Megatron's queries, keys and values as they are; the norm is
TSP's, which keeps what the kernels of Transformer Engine and Apex keep, x and the row statistics.
All else is Megatron's: linears, MLP, rotary embedding (a cos and a sin for each query and key of
each layer, where Transformer Engine's fused kernel keeps none), and its views (a value keeps the
packed queries, keys and values alive, as it does with flash-attn).
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_tsp.layers.norm import TSPNorm


class FlashAttention(MegatronModule):
    """Causal attention by PyTorch's flash kernel, in Megatron's `core_attention` slot."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__(config=config)

    def forward(self, query, key, value, attention_mask, **kwargs):
        """[s, b, n, d] each → [s, b, n·d]."""
        heads = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def block_spec(config, vp_stage=None) -> TransformerBlockSubmodules:
    """The layers of a stage that is the whole model."""
    layer = get_gpt_layer_local_spec(normalization=config.transformer.normalization)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TSPNorm
    parts.self_attention.submodules.core_attention = FlashAttention
    return TransformerBlockSubmodules(
        layer_specs=[layer] * config.transformer.num_layers, layer_norm=TSPNorm
    )
