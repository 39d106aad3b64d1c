"""Megatron's GPTModel with local tokens inside: same parameters, same inputs, same loss."""

from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_tsp import parallel_state, zigzag
from megatron_tsp.errors import TSPError
from megatron_tsp.layers import documents
from megatron_tsp.models.local_tokens import LocalTokens


class TSPGPTModel(LocalTokens, GPTModel):
    """As `LocalTokens`; with packed sequences too."""

    def _preprocess(self, *args, packed_seq_params: PackedSeqParams | None = None, **kwargs):
        """As `GPTModel._preprocess`; in packed sequences RoPE starts again at each document.

        Multimodal RoPE goes by the position ids as they are: [3, b, s], of the whole sequence.
        """
        if not self.options.streams_attention:
            return super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        by_user = self.position_embedding_type == "mrope"
        if by_user:
            _check_positions(kwargs["position_ids"])
        embedded, angles, *rest = super()._preprocess(*args, **kwargs)
        if packed_seq_params is not None and angles is not None and not by_user:
            tokens, ids = angles.size(0), kwargs["input_ids"]
            angles = self._angles_by_document(packed_seq_params, tokens, ids)
        return embedded, angles, *rest

    def _angles_by_document(self, packed: PackedSeqParams, tokens: int, ids: Tensor | None):
        """The angles of local tokens in their documents: [s/D, b, 1, r], fp32."""
        group = parallel_state.token_group(self.pg_collection.tp)
        samples = self.decoder.input_tensor.size(1) if ids is None else ids.size(0)
        bounds = documents.boundaries(packed, samples, tokens * group.size())
        local = zigzag.take(documents.positions(bounds), 1, group.size(), group.rank())
        # Unsliced, positions 0 and 1. All of Megatron's angles are proportional to the position.
        angles = self.rotary_pos_emb(2, packed_seq=True)
        of_one = (angles[0] if isinstance(angles, tuple) else angles)[1]
        return local.t().to(of_one.device)[:, :, None, None] * of_one


def _check_positions(ids: Tensor | None) -> None:
    """Megatron stops at others with an IndexError, or takes them for something else."""
    if ids is None or ids.dim() != 3 or ids.size(0) != 3:
        given = "none" if ids is None else list(ids.shape)
        raise TSPError(
            "--position-embedding-type mrope takes position ids [3, b, s] (time, height, width) on "
            f"each pipeline stage, not {given}"
        )
