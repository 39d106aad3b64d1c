"""The attention of the tensor-parallel baseline: Megatron's, with the rotary embedding of `rope`.

Without Transformer Engine's fused kernel, Megatron's keeps a cos and a sin for each query and each
key of each layer: at TP 8, one [s/8, b, h] tensor a layer. TSP keeps one pair for all layers, and
an A/B run has to compare the parallelism alone.
"""

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_tsp.layers.rope import rotate


class BaselineSelfAttention(SelfAttention):
    """Megatron's `SelfAttention`; its queries and keys are rotated as they come from the linear."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params=None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's. Packed sequences, whose positions begin anew, are rotated by Megatron."""
        no_rope = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        ours = rotary_pos_emb is not None and packed_seq_params is None and not no_rope
        self._angles = rotary_pos_emb if ours else None
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=None if ours else rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )

    def get_query_key_value_tensors(self, *args, **kwargs):
        """As Megatron's, the queries and keys rotated."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._angles is not None:
            angles, self._angles = self._angles, None
            pair = angles if isinstance(angles, tuple) else (angles,) * 2
            how = self.config.rotary_interleaved, self._yarn_concentration_factor
            query, key = (
                rotate(t, turn, *how) for t, turn in zip((query, key), pair, strict=True)
            )
        return query, key, *rest
