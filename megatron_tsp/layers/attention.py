"""Self-attention on local tokens: every rank computes all heads, its QKV and output weights stream.

Megatron derives the heads of a partition from `pg_collection.tp` and gives its linears the same
group. Here the two part: the attention sees one rank holding all heads (tp of one rank), and the
linears the TSP group that holds their shards. Its `cp` group is the one over which the tokens are
spread (the TSP group, and context-parallel ranks beside it), so that the K/V exchange follows the
zigzag.
"""

import copy
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_tsp import parallel_state
from megatron_tsp.errors import TSPError
from megatron_tsp.layers.rope import rotate


class TSPSelfAttention(SelfAttention):
    """Megatron's `SelfAttention` with the tokens, not the heads, spread over `pg_collection.tp`.

    Args as `SelfAttention`; its linears must be TSP's. Input and output [s/D, b, h].
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args,
        pg_collection: ProcessGroupCollection,
        **kwargs,
    ):
        shards = pg_collection.tp
        local = copy.copy(pg_collection)
        local.tp = None  # Megatron's group of one rank
        local.cp = parallel_state.token_group(shards)
        submodules = replace(
            submodules,
            linear_qkv=_over(shards, submodules.linear_qkv),
            linear_proj=_over(shards, submodules.linear_proj),
            core_attention=partial(submodules.core_attention, sink_group=shards),
        )
        super().__init__(config, submodules, *args, pg_collection=local, **kwargs)
        # What is saved is sharded, or replicated, over the TSP group.
        self.tp_group = shards
        if config.fine_grained_activation_offloading:
            # The norm is part of the QKV linear: both names mean its input.
            self.offload_qkv_linear |= "attn_norm" in config.offload_modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unsupported,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's, for training: (output [s/D, b, h], the projection's bias or None).

        `rotary_pos_emb` are the angles of the local tokens, [s/D, 1 or b, 1, r]. Packed sequences
        lie as [s/D, b, h] like others.

        Raises:
            TSPError: for an inference context, or another argument of Megatron's that is not
                carried.
        """
        for name, value in unsupported.items():
            if value is not None:
                raise TSPError(f"TSP attention does not carry {name}")
        gated = self.config.attention_output_gate
        offload = Offloading(self.offload_qkv_linear, hidden_states, "qkv_linear")
        with offload as hidden_states:
            parts = self.get_query_key_value_tensors(hidden_states, output_gate=gated)
        query, key, value, *gate = offload.group_offload(parts)
        no_rope = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        if rotary_pos_emb is not None and not no_rope:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            mscale = self._yarn_concentration_factor
            query, key = (
                rotate(t, angles, self.config.rotary_interleaved, mscale)
                for t, angles in zip((query, key), pair, strict=True)
            )
        value = value.contiguous()  # a view would keep the packed QKV alive through the attention
        del parts
        attend = self.core_attention
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        offload = Offloading(self.offload_core_attention and self.training, query, "core_attn")
        with offload as query:
            attended = attend(
                query, key, value, attention_mask, attn_mask_type=self.attn_mask_type,
                packed_seq_params=packed_seq_params,
            )  # fmt: skip
        attended = offload.group_offload(attended)
        if gated:
            attended = self._apply_output_gate(attended, *gate)
        offload = Offloading(self.offload_attn_proj, attended, "attn_proj")
        with offload as attended:
            output = self.linear_proj(attended)
        return offload.group_offload(output)


def _over(group: dist.ProcessGroup, linear):
    """The builder of a linear, on `group` whatever group its caller names."""

    def build(*args, **kwargs):
        return linear(*args, **{**kwargs, "tp_group": group})

    return build
