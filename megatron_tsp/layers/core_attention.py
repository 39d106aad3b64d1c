"""The attention core: which exchange, what a query sees, and what is refused."""

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron_tsp import parallel_state
from megatron_tsp.errors import TSPError
from megatron_tsp.layers import documents, kernels, sinks
from megatron_tsp.layers.dropout import Dropout, draw
from megatron_tsp.layers.head_exchange import ExchangedHeads
from megatron_tsp.layers.kv_gather import GatheredKV, KeptKV
from megatron_tsp.layers.kv_ring import RingKV
from megatron_tsp.layers.mask import Mask
from megatron_tsp.options import CP_COMM_TYPES

EXCHANGES = {
    "allgather": GatheredKV,
    "allgather-kept": KeptKV,
    "alltoall": ExchangedHeads,
    "ring": RingKV,
}


class TSPCoreAttention(MegatronModule):
    """Causal self-attention of local tokens, for Megatron's `core_attention`.

    The sequence is spread over `pg_collection.cp` in zigzag order: inside a TSP attention the ranks
    that share a sequence, in a tensor-parallel one Megatron's context-parallel group. A query
    sees its past in its document, in the window that `config.window_size` gives this layer. Nothing
    of size s x s is ever made.

    Args as Megatron's core attention, and:
        softmax_scale: of the logits; by default 1/sqrt(head dimension).
        cp_comm_type: Megatron's name of the exchange, a key of `CP_COMM_TYPES`.
        exchange: a key of `EXCHANGES`, how queries meet keys of other ranks; by default what
            `cp_comm_type` says, and without it "allgather".
        sink_group: the ranks over which learnable sinks are sharded, where this rank computes all
            heads; None: it computes the heads whose sinks it holds.

    Raises:
        TSPError: for what it does not carry: another mask type, a kernel without dropout, ...
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        exchange: str | None = None,
        sink_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(config=config)
        if exchange is None:
            exchange = CP_COMM_TYPES[cp_comm_type or "allgather"]
        self.attend = EXCHANGES[exchange]
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise TSPError(
                f"TSP attention is causal self-attention, not {attention_type} attention "
                f"with a mask of type {attn_mask_type.name}"
            )
        self.group = parallel_state.kv_group(getattr(pg_collection, "cp", None))
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.heads_group = getattr(pg_collection, "tp", None)  # each of its ranks has other heads
        self.kernel, self.dropout_kernel = (
            kernels.choose(
                config.attention_backend.name, config.flash_attention_version, dropout=dropout,
                engine=config.transformer_impl == "transformer_engine",
            )(softmax_scale or config.kv_channels**-0.5)
            for dropout in (False, self.dropout > 0)
        )
        self.window = _window(config, layer_number)
        self.sink_group = sink_group
        if config.softmax_type == "learnable":
            shards = sink_group or getattr(pg_collection, "tp", None)
            self.softmax_offset = sinks.parameter(config, shards)
            self.shards = shards

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [s/D, b, n, d], key and value [s/D, b, g, d] → [s/D, b, n·d].

        With `packed_seq_params` tokens see their own document only; Megatron's own layers then
        pass [s, n, d] and get [s, n·d].

        Raises:
            TSPError: for a mask tensor, a bias, or another mask type.
        """
        if attention_mask is not None:
            raise TSPError(
                "TSP attention takes no mask tensor: pass --no-create-attention-mask-in-dataloader"
            )
        if attention_bias is not None:
            raise TSPError("TSP attention does not carry an attention bias")
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise TSPError(f"TSP attention is causal, not of type {attn_mask_type.name}")
        flat = query.dim() == 3
        if flat:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        mask = self._mask(packed_seq_params, query)
        of_heads = self._sinks(query)
        dropout = self._dropout(query)
        kernel = self.kernel if dropout is None else self.dropout_kernel
        out = self.attend.apply(query, key, value, of_heads, self.group, kernel, mask, dropout)
        return out.flatten(1) if flat else out.flatten(2)

    def _mask(self, packed: PackedSeqParams | None, query: Tensor) -> Mask:
        if packed is None:
            return Mask(self.window)
        length = query.size(0) * (1 if self.group is None else self.group.size())
        return Mask(self.window, documents.boundaries(packed, query.size(1), length))

    def _dropout(self, query: Tensor) -> Dropout | None:
        """Of the query's heads, drawn anew each time; None outside training."""
        if not self.dropout or not self.training:
            return None
        samples, heads = query.shape[1:3]
        first = 0 if self.heads_group is None else self.heads_group.rank() * heads
        return Dropout(self.dropout, draw(), samples, self.config.num_attention_heads, first)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """[n] of the query's heads, fp32 (fp64 for fp64); None without sinks."""
        wide = torch.promote_types(query.dtype, torch.float32)
        if self.config.softmax_type == "vanilla":
            return None
        if self.config.softmax_type == "off-by-one":
            return query.new_zeros(query.size(2), dtype=wide)
        own = self.softmax_offset.to(wide)
        return own if self.sink_group is None else sinks.gather(own, self.sink_group)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> ShardedStateDict:
        """The learnable sinks, sharded by heads, as Megatron's core attention saves them."""
        if self.config.softmax_type != "learnable":
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.shards,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """How far back this layer's queries see; None: all the way."""
    frequency = config.window_attn_skip_freq
    if not is_layer_window_attention(config.window_size, frequency, layer_number):
        return None
    left, right = config.window_size
    if right != 0 or left < -1:
        raise TSPError(
            f"attention window {config.window_size}: a causal one is (tokens back, 0), or (-1, 0)"
        )
    return None if left == -1 else left
