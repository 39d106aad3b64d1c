"""What a rank holds, in closed form: bytes at the peak of a training step.

    peak = parameters + gradients + optimizer + saved activations + buffers + the largest transient

n_t = N/(C·D) are the tokens that a rank keeps between blocks, U = n_t·h elements. Saved a layer,
per token: TSP x, q, k, v, the attention's output, x after attention (2h + 2q + 2kv); TP+SP both
norms' outputs and the MLP's hidden activations as well; with full recompute x alone. The transients
are sums of the tensors alive at the moments at which the tracer finds the peak.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_tsp.plan import experts, traffic
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model

#: Bytes of a statistic of a row: of a norm, of a softmax.
STATISTIC = 4
#: Tokens whose logits exist at a time in TSP's loss (`--tsp-loss-chunk`).
LOSS_CHUNK = 1024
#: Tokens whose hidden activations of a shard exist at a time in TSP's MLP.
MLP_CHUNK = 8192


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: what lasts.
        buffers: Megatron's for gathered activations; it lasts, too.
        activations: saved for the backward, of all micro-batches in flight.
        transient: what one block needs beyond that, where it needs most.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    transient: float

    @property
    def peak(self) -> float:
        """All of it."""
        lasting = self.parameters + self.gradients + self.optimizer + self.buffers
        return lasting + self.activations + self.transient


def largest(model: Model, layout: Layout) -> Memory:
    """The memory of the pipeline stage that needs most: the first, or the last with its loss, or,
    where stages differ in their mixtures of experts, any."""
    stages: Iterable[int] = {0, layout.pipeline - 1}
    if model.mixture and not all(model.mixture.layers):
        stages = range(layout.pipeline)
    return max((of_stage(model, layout, stage) for stage in stages), key=lambda m: m.peak)


def of_stage(model: Model, layout: Layout, stage: int = 0) -> Memory:
    """The memory of a rank of a pipeline stage."""
    lasting = _lasting(model, layout.grid_only, stage)
    kinds = model.layers_of(stage, layout.pipeline, layout.virtual)
    ends = stage == layout.pipeline - 1
    each, transients, beside = _of_group(model, layout.group_only, ends)
    activations = sum(each[moe] for moe in kinds)
    # The backward begins with the last layer; with each one, what the later ones kept is gone.
    most, freed = beside, 0.0
    for moe in reversed(kinds):
        if freed > max(transients):
            break
        most = max(most, transients[moe] - freed)
        freed += each[moe]
    return Memory(
        *lasting,
        buffers=buffers(model, layout),
        activations=in_flight(model, layout, stage) * activations,
        transient=most,
    )


@lru_cache(maxsize=65536)
def _lasting(model: Model, layout: Layout, stage: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients, optimizer state."""
    states = (8 if model.adam else 4 * model.momentum) + (4 if model.element < 4 else 0)
    dense, routed = (
        traffic.parameters(model, layout, stage), traffic.expert_parameters(model, layout, stage)
    )  # fmt: skip
    owned = dense + routed
    if layout.distributed_optimizer:
        owned = dense / (layout.data * layout.context) + routed / layout.expert_replicas
    count = dense + routed
    return count * model.element, count * traffic.WIDE, owned * states


@lru_cache(maxsize=65536)
def _of_group(model: Model, layout: Layout, last: bool):
    """Of a layer (without, with a mixture): what is saved, and the transient; and the loss's."""
    kinds = (False, True) if model.mixture else (False,)
    each = tuple(saved(model, layout, moe) for moe in kinds)
    transients = tuple(transient(model, layout, moe) for moe in kinds)
    return each, transients, _loss(model, layout) if last else 0.0


def in_flight(model: Model, layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once (1F1B; more if interleaved)."""
    micro, stages = layout.micro_batches(model.global_batch), layout.pipeline
    if layout.virtual == 1:
        return min(stages - stage, micro)
    chunks = 2 * (stages - stage - 1) + (layout.virtual - 1) * stages + 1
    return min(chunks, layout.virtual * micro) / layout.virtual


def saved(model: Model, layout: Layout, moe: bool = False) -> float:
    """Bytes that a layer keeps for the backward, of one micro-batch."""
    tokens, element = _tokens(model, layout), model.element
    if layout.recompute == "full":
        return tokens * model.hidden * element / layout.recompute_layers
    kept = _layer_saved(model, layout, moe)
    if moe and not layout.recomputes("moe"):
        kept += _tokens(model, layout) * experts.saved(model)
    return kept


def _layer_saved(model: Model, layout: Layout, moe: bool = False) -> float:
    """The same without full recompute, and without routed experts."""
    tokens, element = _tokens(model, layout), model.element
    kept = layout.token_ranks if layout.save_kv else 1
    features = 2 * model.hidden + 2 * model.q_width + 2 * _kv_width(model, layout) * kept
    statistics = model.heads + 2 * (2 if model.layernorm else 1)
    if model.qk_norm:
        features += model.q_width + _kv_width(model, layout)
        statistics += model.heads + model.kv_heads
    ffn = model.mixture.shared if moe else model.ffn
    if moe and model.mixture.shared_gate:
        features += model.hidden
    if layout.fold:
        if layout.save_activations and not layout.recomputes("moe" if moe else "mlp"):
            features += ffn * model.gates
        if moe and not layout.recomputes("layernorm"):
            features += model.hidden  # the router and the dispatcher keep the norm's output
    else:
        if not layout.recomputes("layernorm"):
            features += 2 * model.hidden
        if not layout.recomputes("moe" if moe else "mlp"):
            features += _mlp_saved(model, ffn)
    return tokens * (features * element + statistics * STATISTIC)


def _mlp_saved(model: Model, ffn: int) -> float:
    """Features that Megatron's MLP keeps: the first linear's output, the activation's."""
    kept = ffn * (model.gates + 1)
    if model.gated and not model.fused_activation:
        kept += 2 * ffn  # act(gate), and the linear half with its offset
    return kept


def buffers(model: Model, layout: Layout) -> float:
    """Megatron's buffer for gathered activations, allocated once and kept; TSP has none."""
    if layout.fold or layout.degree == 1:
        return 0.0
    return traffic.tokens(model, layout) * model.hidden * model.element


def _slots(model: Model, layout: Layout, schedule: str, weights: float) -> float:
    """What a backward walk over `weights` (all ranks', in elements) has in flight at once: two
    shards and two of dW; broadcast has the own dW beside them, gather everything."""
    degree, dw = layout.degree, traffic.dw_element(model)
    part = weights / degree
    if degree == 1:
        return part * dw
    if schedule == "gather":
        return weights * (model.element + dw) + part * dw
    own = part * dw if schedule == "broadcast" else 0.0
    if degree == 2:  # a slot for what arrives, one for the sum that leaves
        return part * max(model.element + dw, 2 * dw)
    return own + 2 * part * (model.element + dw)


def transient(model: Model, layout: Layout, moe: bool = False) -> float:
    """The most that a layer's backward holds beside what is saved."""
    attention = _attention_backward(model, layout)
    if moe:
        kept = _tokens(model, layout) * experts.saved(model)
        block = _tokens(model, layout) * experts.transient(model, layout)
        if layout.recomputes("moe"):
            whole = layout.but(recompute="none", modules=())
            block += saved(model, whole, moe) - saved(model, layout, moe)
        elif layout.recompute != "full":
            attention -= kept  # which is gone by then
        block = max(block, attention)
    else:
        block = max(_mlp_backward(model, layout), attention)
    if layout.recompute == "full":
        # What the layers keep once they are computed again; x was kept before.
        again = _layer_saved(model, layout, moe)
        again += moe and _tokens(model, layout) * experts.saved(model)
        block += again * layout.recompute_layers
        block -= saved(model, layout) * layout.recompute_layers
        if moe or not layout.fold:
            block += 3 * _unit(model, layout)
        if not layout.fold and not moe:
            block -= _tokens(model, layout) * model.ffn * model.element
    return block


def _mlp_backward(model: Model, layout: Layout) -> float:
    unit, tokens = _unit(model, layout), _tokens(model, layout)
    if layout.fold:
        # The norm's output, dy and dx; a shard's hidden features of some tokens and their gradient;
        # and, where dW is wider than the weights, the product that is added to it.
        hidden = (2 * model.fc1_width + 2 * model.ffn) / layout.degree
        if model.gated:  # the gradient takes the place of what it is of
            hidden = (model.fc1_width + model.ffn) / layout.degree
        walk = 3 * unit + min(tokens, MLP_CHUNK) * hidden * model.element
        if traffic.dw_element(model) > model.element:
            walk += model.hidden * model.fc1_width / layout.degree * model.element
        return walk + _slots(model, layout, layout.mlp_schedule, model.mlp_weights)
    # The gradients of the activation's output and of its input, and one product; of tensors of h
    # features as many as are alive there.
    features, units = 2 * model.ffn + model.fc1_width, 2.0
    if layout.recomputes("mlp"):
        features, units = features + model.fc1_width, 8.2
    elif layout.recompute != "full":
        features, units = features - model.ffn, 6.2  # the activation's output is let go
    return units * unit + tokens * features * model.element


def _attention_backward(model: Model, layout: Layout) -> float:
    unit, tokens = _unit(model, layout), _tokens(model, layout)
    heads = tokens * (model.q_width + 2 * _kv_width(model, layout)) * model.element
    if layout.fold:
        return 5 * unit + 2 * heads
    return unit * (layout.degree + 3) + 3 * heads


def _loss(model: Model, layout: Layout) -> float:
    """The last norm's output and the logits: TSP, a chunk of them and of the one before; else all
    of them, in fp32, with their copy in the parameters' dtype or what their gradients become."""
    tokens, vocab = _tokens(model, layout), model.padded_vocab(layout.degree)
    unit, shard = _unit(model, layout), vocab / layout.degree * model.hidden
    copy = model.element if model.element < traffic.WIDE else 0
    if layout.fold:
        chunk = min(LOSS_CHUNK, tokens) * vocab / layout.degree
        kept = 2 * chunk * (traffic.WIDE + copy)
        if traffic.dw_element(model) > model.element:
            kept += shard * model.element  # a product
        return 2 * unit + kept + _slots(model, layout, layout.vocab_schedule, vocab * model.hidden)
    forward = tokens * vocab * (traffic.WIDE + copy)
    backward = tokens * vocab * traffic.WIDE + (layout.degree + 1) * unit + shard * model.element
    return 2 * unit + max(forward, backward)


def _unit(model: Model, layout: Layout) -> float:
    """Bytes of one [s/(C·D), b, h]."""
    return _tokens(model, layout) * model.hidden * model.element


def _tokens(model: Model, layout: Layout) -> float:
    return traffic.tokens(model, layout) / layout.degree


def _kv_width(model: Model, layout: Layout) -> int:
    """Features of K that the group holds per token: a head on each rank at least, where heads are
    spread."""
    spread = layout.degree if not layout.fold else 1
    if layout.exchange == "alltoall":
        spread *= layout.token_ranks
    return max(model.kv_width, spread * model.channels)
