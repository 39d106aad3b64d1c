"""What attention's exchanges send, in closed form (docs/design.md), and which sends least.

`--tsp-attention-exchange auto` takes the cheapest for the shape.
"""

from fractions import Fraction
from typing import NamedTuple

from megatron_tsp.layers.head_shares import shares


class Shape(NamedTuple):
    """What an exchange's bytes depend on.

    Attributes:
        heads, kv_heads, channels: query heads, KV heads, and the width of one.
        tokens: of a micro-batch, the whole sequences.
        ranks: that a sequence is spread over.
        element: bytes of an activation.
        recompute: attention's forward runs again before its backward.
        save_kv: gathered K and V are kept for the backward (--tsp-save-kv).
    """

    heads: int
    kv_heads: int
    channels: int
    tokens: int
    ranks: int
    element: int
    recompute: bool = False
    save_kv: bool = False


def sent(exchange: str, shape: Shape) -> Fraction:
    """Bytes that a rank sends for a layer and micro-batch, forward and backward.

    The mean over the ranks, which send alike unless they need different numbers of KV heads.
    """
    share = Fraction(shape.ranks - 1, shape.ranks) * shape.tokens
    if exchange == "alltoall":  # q, k, v there and the output back; the same backward
        owners = shares(shape.heads, shape.kv_heads, shape.ranks)
        copies = sum(owner.kv.stop - owner.kv.start for owner in owners)
        there = (2 * shape.heads + 2 * copies) * shape.channels * shape.element
        statistic = shape.heads * max(shape.element, 4)  # backward, a number for each head's row
        return share / shape.ranks * ((2 + shape.recompute) * there + statistic)
    kv = 2 * shape.kv_heads * shape.channels * shape.element
    gathers = 1 + shape.recompute + (not shape.save_kv)
    return share * (gathers + 1) * kv  # and dK and dV


def cheapest(shape: Shape) -> tuple[str, dict[str, int]]:
    """The exchange that sends fewer bytes, and the bytes of each that is possible."""
    possible = ["allgather"]
    if shape.ranks > 1 and shape.heads % shape.ranks == 0:
        possible.append("alltoall")
    costs = {exchange: round(sent(exchange, shape)) for exchange in possible}
    return min(costs, key=costs.get), costs
