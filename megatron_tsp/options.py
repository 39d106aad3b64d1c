"""What the `--tsp-*` flags decide, as the models take it."""

from dataclasses import dataclass

from megatron_tsp.errors import TSPError
from megatron_tsp.streaming import check_schedule

BLOCKS = ("all", "mlp", "attention")
EXCHANGES = ("allgather", "alltoall")
#: The exchange that each value of Megatron's --cp-comm-type names; Megatron writes one of them both
#: ways.
CP_COMM_TYPES = {
    "p2p": "ring",
    "all_gather": "allgather",
    "allgather": "allgather",
    "a2a": "alltoall",
}


@dataclass(frozen=True, kw_only=True)
class TSPOptions:
    """Settings of TSP that Megatron's configs have no field for.

    Attributes:
        blocks: which blocks of a layer stream their weights, one of `BLOCKS`; the rest is
            Megatron's tensor and sequence parallelism.
        attention_schedule, mlp_schedule, vocab_schedule: how the weights of each kind of block
            travel; keys of `streaming.SCHEDULES`. The first two defaults are the paper's.
        attention_exchange: how queries meet the keys of other ranks, one of `EXCHANGES`.
        save_kv: keep gathered K and V for the backward instead of gathering them again.
        wide_grads: sum dW of low-precision weights in fp32, on the wire too.
        mlp_save_activations: keep the MLP's hidden activations instead of computing them again.
        loss_chunk: tokens whose logits exist at a time in the loss.
    """

    blocks: str = "all"
    attention_schedule: str = "broadcast"
    mlp_schedule: str = "ring"
    vocab_schedule: str = "ring"
    attention_exchange: str = "allgather"
    save_kv: bool = False
    wide_grads: bool = True
    mlp_save_activations: bool = False
    loss_chunk: int = 1024

    def __post_init__(self):
        if self.blocks not in BLOCKS:
            raise TSPError(f"TSP blocks {self.blocks!r}: not one of {', '.join(BLOCKS)}")
        if self.attention_exchange not in EXCHANGES:
            raise TSPError(
                f"TSP attention exchange {self.attention_exchange!r}: not one of "
                f"{', '.join(EXCHANGES)}"
            )
        if self.save_kv and self.attention_exchange != "allgather":
            raise TSPError(
                f"TSP save_kv is for the exchange allgather: {self.attention_exchange} keeps what "
                "it exchanged anyway"
            )
        for kind in ("attention", "mlp", "vocab"):
            check_schedule(getattr(self, f"{kind}_schedule"), f"TSP {kind} schedule")
        if self.loss_chunk < 1:
            raise TSPError(f"TSP loss chunk {self.loss_chunk!r}: it takes at least 1 token")

    @property
    def streams_mlp(self) -> bool:
        """Whether MLP weights travel."""
        return self.blocks in ("all", "mlp")

    @property
    def streams_attention(self) -> bool:
        """Whether attention weights travel; tokens are then in zigzag order."""
        return self.blocks in ("all", "attention")
