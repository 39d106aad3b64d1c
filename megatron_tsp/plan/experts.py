"""A mixture of experts in closed form: what its dispatcher sends, what it holds.

n = N/(C·D) tokens of a rank, k experts a token, E experts spread over X ranks (`Layout.expert`,
each expert whole), f = (X-1)/X, r bytes of a router's number. A balanced router, as the tracer
takes it: each rank sends as many (token, expert) pairs to every expert, and works on k·n of them.

    alltoall   forward f·k·n pairs there, h elements and a probability each, and h elements back;
               f·X·E integers to agree on the counts. Backward the same but for the counts
    allgather  forward f·X·n·(h elements, E probabilities, E bytes of map) and f·X·n·h back, in the
               router's dtype; backward the same but for the map
"""

from fractions import Fraction

from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.transfer import Transfer, Transfers, share, tokens

#: Process groups, as `megatron_tsp.traffic` names them.
OVER_EXPERTS, OF_DISPATCH = "ep", "expert-tensor-and-model-parallel"
OF_REPLICAS, OF_COUNTS = "expert-data-parallel", "tp-cp"


def dispatch(model: Model, layout: Layout) -> tuple[Transfers, Transfers]:
    """Tokens to experts and back: (forward, backward) of a layer and micro-batch."""
    mixture, f = model.mixture, share(layout.expert)
    n = Fraction(tokens(model, layout), layout.degree)
    h, e, r = model.hidden, model.element, mixture.router_element
    group = OF_DISPATCH
    if mixture.dispatcher == "alltoall":
        pairs = f * mixture.chosen * n
        moved = Transfer("all_to_all", OVER_EXPERTS, "mlp", pairs * (2 * h * e + r))
        counts = f * layout.expert * mixture.count * 8
        there, back = [Transfer("all_gather", group, "mlp", counts), moved], [moved]
    else:
        whole = f * layout.expert * n
        tokens_there, probabilities = whole * h * e, whole * mixture.count * r
        combined = whole * h * r
        there = [
            Transfer("all_gather", group, "mlp", tokens_there + probabilities),
            Transfer("all_gather", group, "mlp", whole * mixture.count),
            Transfer("reduce_scatter", group, "mlp", combined),
        ]
        back = [
            Transfer("all_gather", group, "mlp", combined),
            Transfer("reduce_scatter", group, "mlp", tokens_there + probabilities),
        ]
    if mixture.counted:  # the tokens of each expert, for the auxiliary loss
        ranks = layout.degree * layout.context
        sums = 2 * share(ranks) * mixture.count * 8
        there.append(Transfer("all_reduce", OF_COUNTS, "mlp", Fraction(sums)))
    return there, back


def held(model: Model, layout: Layout) -> int:
    """Parameters of the routed experts of a layer on a rank."""
    return model.expert_weights // layout.expert


def saved(model: Model) -> float:
    """Bytes a token that the experts of a layer keep for the backward: the pairs' inputs, the first
    linear's outputs, the activations; indices, map and probabilities of the router."""
    mixture = model.mixture
    features = mixture.chosen * (model.hidden + mixture.ffn * (model.gates + 1))
    router = mixture.count * (8 + 1 + mixture.router_element)
    router += mixture.chosen * (8 + 8 + 4 + mixture.router_element)
    if mixture.counted:
        router += 2 * 4 * mixture.count  # scores and their logits
    return features * model.element + router


def transient(model: Model, layout: Layout) -> float:
    """Bytes a token that the experts need beyond what they keep: forward, where their outputs are
    sorted and sent back, or backward, in the first expert; gathered tokens come on top."""
    mixture = model.mixture
    local = mixture.count // layout.expert
    backward = 2 * mixture.ffn * model.gates / local + model.hidden
    most = max(
        3.7 * model.hidden + mixture.chosen * backward,
        2 * model.hidden + mixture.chosen * 4 * model.hidden,
    )
    if mixture.dispatcher == "allgather" and layout.expert > 1:
        most += 2 * layout.expert * model.hidden
    return most * model.element
