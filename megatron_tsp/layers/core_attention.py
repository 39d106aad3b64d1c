"""The attention core: which exchange, and what is refused."""

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_tsp import parallel_state
from megatron_tsp.errors import TSPError
from megatron_tsp.layers.head_exchange import ExchangedHeads
from megatron_tsp.layers.kv_gather import GatheredKV
from megatron_tsp.layers.kv_ring import RingKV
from megatron_tsp.layers.mask import Mask
from megatron_tsp.options import CP_COMM_TYPES

EXCHANGES = {"allgather": GatheredKV, "alltoall": ExchangedHeads, "ring": RingKV}


class TSPCoreAttention(MegatronModule):
    """Causal self-attention of local tokens, for Megatron's `core_attention`.

    The sequence is spread over `pg_collection.cp` in zigzag order: inside a TSP attention the ranks
    that share a sequence, in a tensor-parallel one Megatron's context-parallel group. Nothing of
    size s x s is ever made.

    Args as Megatron's core attention, and:
        softmax_scale: of the logits; by default 1/sqrt(head dimension).
        cp_comm_type: Megatron's name of the exchange, a key of `CP_COMM_TYPES`.
        exchange: a key of `EXCHANGES`, how queries meet keys of other ranks; by default what
            `cp_comm_type` says, and without it "allgather".

    Raises:
        TSPError: for what it does not carry: another mask type, attention dropout, ...
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
    ):
        super().__init__(config=config)
        if exchange is None:
            exchange = CP_COMM_TYPES[cp_comm_type or "allgather"]
        self.attend = EXCHANGES[exchange]
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise TSPError(
                f"TSP attention is causal self-attention, not {attention_type} attention "
                f"with a mask of type {attn_mask_type.name}"
            )
        if dropout:
            raise TSPError("TSP does not carry attention dropout: set --attention-dropout 0")
        self.group = parallel_state.kv_group(getattr(pg_collection, "cp", None))
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.mask = Mask()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """query [s/D, b, n, d], key and value [s/D, b, g, d] → [s/D, b, n·d].

        Raises:
            TSPError: for a mask tensor, a bias, packed sequences, or another mask type.
        """
        if attention_mask is not None:
            raise TSPError(
                "TSP attention takes no mask tensor: pass --no-create-attention-mask-in-dataloader"
            )
        if attention_bias is not None or packed_seq_params is not None:
            raise TSPError("TSP attention does not carry an attention bias or packed sequences")
        if attn_mask_type not in (None, AttnMaskType.causal):
            raise TSPError(f"TSP attention is causal, not of type {attn_mask_type.name}")
        out = self.attend.apply(query, key, value, None, self.group, self.scale, self.mask)
        return out.flatten(2)
