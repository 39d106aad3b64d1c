"""What the `--tsp-*` flags decide, as the models take it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TSPOptions:
    """Settings of TSP that Megatron's configs have no field for.

    Attributes:
        attention_schedule, mlp_schedule, vocab_schedule: how the weights of each kind of block
            travel; keys of `streaming.SCHEDULES`. The first two defaults are the paper's.
        loss_chunk: tokens whose logits exist at a time in the loss.
    """

    attention_schedule: str = "broadcast"
    mlp_schedule: str = "ring"
    vocab_schedule: str = "ring"
    loss_chunk: int = 1024
