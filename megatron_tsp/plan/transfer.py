"""What one rank sends by one kind of collective, and the quantities that bytes are made of."""

from fractions import Fraction
from typing import NamedTuple

from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model


class Transfer(NamedTuple):
    """What one rank sends by one kind of collective.

    Attributes:
        collective, group, block: as `traffic.Counter` names them.
        sent: bytes, exactly.
    """

    collective: str
    group: str
    block: str
    sent: Fraction


Transfers = list[Transfer]


def share(ranks: int) -> Fraction:
    """(ranks - 1)/ranks."""
    return Fraction(ranks - 1, ranks)


def tokens(model: Model, layout: Layout) -> int:
    """N/C: tokens of a micro-batch in one tensor-parallel or TSP group."""
    return layout.micro_batch * model.sequence // layout.context
