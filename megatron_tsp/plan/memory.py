"""What a rank holds, in closed form: bytes at the peak of a training step.

    peak = parameters + gradients + optimizer + saved activations + buffers + the largest transient

n_t = N/(C·D) are the tokens that a rank keeps between blocks, U = n_t·h elements. Saved a layer,
per token: TSP x, q, k, v, the attention's output, x after attention (2h + 2q + 2kv); TP+SP both
norms' outputs and the MLP's hidden activations as well; with full recompute x alone.
"""

from dataclasses import dataclass

from megatron_tsp.plan import traffic
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model

#: Bytes of a statistic of a row: of a norm, of a softmax.
STATISTIC = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters, gradients, optimizer: what lasts.
        buffers: of the weight stream, and Megatron's gather buffer; they last, too.
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
    """The memory of the pipeline stage that needs most: the first, or the last with its loss."""
    stages = {0, layout.pipeline - 1}
    return max((of_stage(model, layout, stage) for stage in stages), key=lambda m: m.peak)


def of_stage(model: Model, layout: Layout, stage: int = 0) -> Memory:
    """The memory of a rank of a pipeline stage."""
    count = traffic.parameters(model, layout, stage)
    states = (8 if model.adam else 4 * model.momentum) + (4 if model.element < 4 else 0)
    owners = layout.data * layout.context if layout.distributed_optimizer else 1
    layers = model.layers // layout.pipeline
    ends = 0.0
    if stage == 0:
        ends += _embedding_saved(model, layout)
    if stage == layout.pipeline - 1:
        ends += _loss_saved(model, layout)
    return Memory(
        parameters=count * model.element,
        gradients=count * traffic.WIDE,
        optimizer=count * states / owners,
        buffers=buffers(model, layout, stage),
        activations=in_flight(model, layout, stage) * (layers * saved(model, layout) + ends),
        transient=transient(model, layout, stage),
    )


def in_flight(model: Model, layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once (1F1B; more if interleaved)."""
    micro, stages = layout.micro_batches(model.global_batch), layout.pipeline
    if layout.virtual == 1:
        return min(stages - stage, micro)
    chunks = 2 * (stages - stage - 1) + (layout.virtual - 1) * stages + 1
    return min(chunks, layout.virtual * micro) / layout.virtual


def saved(model: Model, layout: Layout) -> float:
    """Bytes that a layer keeps for the backward, of one micro-batch."""
    tokens, element = _tokens(model, layout), model.element
    if layout.recompute == "full":
        return tokens * model.hidden * element / layout.recompute_layers
    return _layer_saved(model, layout)


def _layer_saved(model: Model, layout: Layout) -> float:
    """The same without full recompute."""
    tokens, element = _tokens(model, layout), model.element
    features = 2 * model.hidden + 2 * model.q_width + 2 * _kv_width(model, layout)
    statistics = model.heads + 2 * (2 if model.layernorm else 1)
    if layout.exchange == "alltoall" and layout.token_ranks > 1:
        features += model.q_width  # the output by heads, and by tokens
    if model.qk_norm:
        features += model.q_width + _kv_width(model, layout)
        statistics += model.heads + model.kv_heads
    if layout.fold:
        if layout.save_activations and not layout.recomputes("mlp"):
            features += model.fc1_width
    else:
        if not layout.recomputes("layernorm"):
            features += 2 * model.hidden
        if not layout.recomputes("mlp"):
            features += _mlp_saved(model)
        if model.rope:
            # Megatron casts a cos and a sin for each query and each key.
            features += 4 * model.channels * layout.degree / layout.micro_batch
    return tokens * (features * element + statistics * STATISTIC)


def _mlp_saved(model: Model) -> float:
    """Features that Megatron's MLP keeps: the first linear's output, the activation's."""
    kept = model.fc1_width + model.ffn
    if model.gated and not model.fused_activation:
        kept += 2 * model.ffn  # act(gate), and the linear half with its offset
    return kept


def _embedding_saved(model: Model, layout: Layout) -> float:
    return 16 * _tokens(model, layout)


def _loss_saved(model: Model, layout: Layout) -> float:
    """The last norm's input and output; the softmax, where the logits are whole."""
    tokens, hidden = _tokens(model, layout), model.hidden
    kept = 2 * tokens * hidden * model.element
    if not layout.fold:
        kept += tokens * model.padded_vocab(layout.degree) * traffic.WIDE
    return kept


def buffers(model: Model, layout: Layout, stage: int = 0) -> float:
    """What is allocated once and kept: two slots a stream for shards, two for dW; Megatron's buffer
    for gathered activations."""
    degree = layout.degree
    if degree == 1:
        return 0.0
    if not layout.fold:
        return traffic.tokens(model, layout) * model.hidden * model.element
    qkv = (model.q_width + 2 * model.kv_width) * model.hidden
    shards = {
        "attention": (layout.attention_schedule, max(qkv, model.q_width * model.hidden)),
        "mlp": (layout.mlp_schedule, model.mlp_weights),
    }
    if stage == layout.pipeline - 1:
        vocab = model.padded_vocab(degree) * model.hidden
        shards["loss"] = (layout.vocab_schedule, vocab)
    largest: dict[str, float] = {}
    for schedule, size in shards.values():
        whole = size if schedule == "gather" else size / degree
        largest[schedule] = max(largest.get(schedule, 0.0), whole)
    return sum(2 * size * (model.element + traffic.dw_element(model)) for size in largest.values())


def transient(model: Model, layout: Layout, stage: int = 0) -> float:
    """The most that a block's forward or backward holds beside what is saved."""
    tokens, element = _tokens(model, layout), model.element
    unit = tokens * model.hidden * element
    degree = layout.degree
    if layout.fold:
        hidden = tokens * (2 * model.fc1_width + 3 * model.ffn) / degree * element
        dw = (model.mlp_weights / degree) * traffic.dw_element(model)
        mlp = 5 * unit + hidden + dw
        kv = _kv_width(model, layout) * tokens * element
        attention = 6 * unit + 6 * kv
    else:
        whole = unit * degree
        mlp = 2 * whole + 2 * unit + tokens * 3 * model.fc1_width * element
        attention = 2 * whole + 6 * unit
    extra = 0.0
    if layout.recompute == "full":
        extra = _layer_saved(model, layout) * layout.recompute_layers
    elif layout.recomputes("mlp") and not layout.fold:
        extra = _mlp_saved(model) * tokens * element
    block = max(mlp, attention) + extra
    if stage == layout.pipeline - 1:
        block = max(block, _loss_transient(model, layout))
    return block


def _loss_transient(model: Model, layout: Layout) -> float:
    tokens = _tokens(model, layout)
    if layout.fold:
        chunk = min(1024, tokens)
        logits = chunk * model.padded_vocab(layout.degree) / layout.degree
        return 2 * tokens * model.hidden * model.element + logits * (traffic.WIDE + model.element)
    return tokens * model.padded_vocab(layout.degree) * (traffic.WIDE + model.element)


def _tokens(model: Model, layout: Layout) -> float:
    return traffic.tokens(model, layout) / layout.degree


def _kv_width(model: Model, layout: Layout) -> int:
    """Features of K that the group holds per token: a head on each rank at least, where heads are
    spread."""
    spread = layout.degree if not layout.fold else 1
    if layout.exchange == "alltoall":
        spread *= layout.token_ranks
    return max(model.kv_width, spread * model.channels)
