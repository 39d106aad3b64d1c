"""What a rank sends, in closed form: bytes by collective, process group and kind of block.

N = b·s tokens of a micro-batch, C context-parallel ranks, D the tensor-parallel or TSP size, X the
ranks that a sequence is spread over in attention; f = (D-1)/D. Elements a layer (docs/design.md):

    TP+SP     forward 4·f·N·h/C, backward 6·f·N·h/C; each recompute of a layer the forward's again
    TSP       forward f·P, backward f·P and f·P of dW; P the layer's weights
    exchange  K and V gathered: 2·N·kv forward, 4·N·kv backward, 2·N·kv where they are saved;
              passed round a ring: as gathered; tokens for heads: (2q + 2kv)·N/X each way, and
              backward a number for each row of each head; all times (X-1)/X. Under tensor
              parallelism without a fold q and kv are those of the rank's heads

The tests hold the counter of real runs (megatron_tsp/traffic.py) equal to these forms, to the byte,
and the simulation sends what they say.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from megatron_tsp.layers.head_shares import shares
from megatron_tsp.plan import experts
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.transfer import Transfer, Transfers, share, tokens

#: What a walk over weight shards is counted as, by schedule: the weights, and dW.
COLLECTIVES = {
    "ring": ("send", "send"),
    "broadcast": ("broadcast", "reduce"),
    "gather": ("all_gather", "reduce_scatter"),
}
#: Bytes of a main gradient, and of a loss.
WIDE = 4


def total(transfers: Iterable[Transfer], *keys: str) -> dict:
    """Bytes by the named attributes of `Transfer`, without what is zero."""
    sums = defaultdict(Fraction)
    for transfer in transfers:
        key = tuple(getattr(transfer, key) for key in keys)
        sums[key[0] if len(keys) == 1 else key] += transfer.sent
    return {key: size for key, size in sums.items() if size}


# ---------------------------------------------------------------------------------------------
# A layer
# ---------------------------------------------------------------------------------------------


def dw_element(model: Model) -> int:
    """Bytes of an element of dW between TSP's ranks."""
    return max(model.element, 4) if model.wide_grads else model.element


def weights(model: Model, layout: Layout, block: str) -> tuple[Transfer, Transfer]:
    """A walk over a block's weights: (the weights, their dW). Of shared experts: "shared"."""
    if block == "attention":
        elements = model.attention_weights
    elif block in ("mlp", "shared"):
        elements = model.mlp_weights if block == "mlp" else model.shared_weights
        block = "mlp"
    else:
        elements = model.padded_vocab(layout.degree) * model.hidden
    schedule = {
        "attention": layout.attention_schedule,
        "mlp": layout.mlp_schedule,
        "embedding": layout.vocab_schedule,
        "loss": layout.vocab_schedule,
    }[block]
    f, (walk, home) = share(layout.degree), COLLECTIVES[schedule]
    return (
        Transfer(walk, "tsp-weights", block, f * elements * model.element),
        Transfer(home, "tsp-weights", block, f * elements * dw_element(model)),
    )


def activations(
    model: Model, layout: Layout, gathers: int, scatters: int, block: str = "mlp"
) -> Transfers:
    """All-gathers and reduce-scatters of [s/C, b, h] over the tensor-parallel group."""
    whole = share(layout.degree) * tokens(model, layout) * model.hidden * model.element
    return [
        Transfer("all_gather", "tp", block, gathers * whole),
        Transfer("reduce_scatter", "tp", block, scatters * whole),
    ]


def exchange(model: Model, layout: Layout) -> tuple[Transfers, Transfers]:
    """Attention's exchange: (forward, backward)."""
    ranks = layout.token_ranks
    shared = 1 if layout.fold else layout.degree  # ranks that the heads are spread over already
    # With fewer KV heads than tensor-parallel ranks, each rank has one.
    heads, kv_heads = model.heads // shared, max(model.kv_heads // shared, 1)
    whole = layout.micro_batch * model.sequence * model.element * share(ranks)
    group = "tsp-kv" if layout.fold else "cp"

    def sent(collective: str, size) -> Transfer:
        return Transfer(collective, group, "attention", Fraction(size))

    if layout.exchange == "alltoall":
        # A KV head goes to all ranks that query it; backward, a number for each head's row as well.
        copies = sum(s.kv.stop - s.kv.start for s in shares(heads, kv_heads, ranks))
        there = (2 * heads + 2 * copies) * model.channels * whole / ranks
        statistic = heads * max(model.element, 4) * whole / model.element / ranks
        return [sent("all_to_all", there)], [sent("all_to_all", there + statistic)]
    kvs = 2 * kv_heads * model.channels * whole
    if layout.exchange == "ring":
        return [sent("send", kvs)], [sent("send", 2 * kvs)]
    gather, scatter = sent("all_gather", kvs), sent("reduce_scatter", kvs)
    return [gather], [scatter] if layout.save_kv else [gather, scatter]


def shared_heads(model: Model, layout: Layout) -> Transfers:
    """Megatron's gather of all of QKV over a tensor-parallel group with more ranks than KV heads,
    and the scatter of its gradient; elsewhere empty."""
    if layout.fold or model.kv_heads >= layout.degree:
        return []
    width = model.q_width + 2 * model.kv_width
    whole = share(layout.degree) * tokens(model, layout) * width * model.element
    return [Transfer(kind, "tp", "attention", whole) for kind in ("all_gather", "reduce_scatter")]


def feed_forward(model: Model, layout: Layout, moe: bool) -> tuple[Transfers, Transfers]:
    """A layer's MLP, or its mixture of experts: (forward, backward)."""
    there, back = experts.dispatch(model, layout) if moe else ([], [])
    if moe and not model.mixture.shared:
        return there, back
    if layout.fold:
        walk, dw = weights(model, layout, "shared" if moe else "mlp")
        return [walk, *there], [walk, dw, *back]
    both = activations(model, layout, 1, 1)
    return [*both, *there], [*activations(model, layout, 2, 1), *back]


def forward(model: Model, layout: Layout, moe: bool = False) -> Transfers:
    """A layer's forward, for one micro-batch; `moe`: of one with a mixture of experts."""
    there, _ = exchange(model, layout)
    after = feed_forward(model, layout, moe)[0]
    if not layout.fold:
        return [
            *activations(model, layout, 1, 1, "attention"),
            *shared_heads(model, layout)[:1],
            *there,
            *after,
        ]
    return [weights(model, layout, "attention")[0], *there, *after]


def backward(model: Model, layout: Layout, moe: bool = False) -> Transfers:
    """A layer's backward, without what is recomputed."""
    _, back = exchange(model, layout)
    after = feed_forward(model, layout, moe)[1]
    if not layout.fold:
        return [
            *activations(model, layout, 2, 1, "attention"),
            *shared_heads(model, layout)[1:],
            *back,
            *after,
        ]
    return [*weights(model, layout, "attention"), *back, *after]


def recompute(model: Model, layout: Layout, moe: bool = False) -> Transfers:
    """What a layer sends again in the backward because it is computed again. Tokens of experts are
    counted once: only where gradients are."""
    sent = []
    if layout.recompute == "full":
        sent += forward(model, layout, moe)
    if layout.recomputes("core_attn"):
        sent += exchange(model, layout)[0]
    if layout.recomputes("moe" if moe else "mlp"):
        sent += feed_forward(model, layout, moe)[0]
    return [transfer for transfer in sent if transfer.group != experts.OF_COUNTS]


# ---------------------------------------------------------------------------------------------
# The ends of the model
# ---------------------------------------------------------------------------------------------


def streams_table(model: Model, layout: Layout) -> bool:
    """Whether TSP's embedding moves its table, not rows (`TSPVocabParallelEmbedding`)."""
    local = tokens(model, layout) // layout.degree
    vocab = model.padded_vocab(layout.degree)
    return 2 * local * model.element > vocab * (model.element + dw_element(model))


def embedding(model: Model, layout: Layout) -> tuple[Transfers, Transfers]:
    """(forward, backward) of a micro-batch. Rows: as many as uniform token ids need."""
    if not layout.fold:
        gathers, scatters = activations(model, layout, 1, 1, "embedding")
        if model.learned_positions:  # Megatron adds them to whole tokens, then scatters
            scatters = scatters._replace(collective="all_reduce", sent=2 * scatters.sent)
        return [scatters], [gathers]
    if streams_table(model, layout):
        table, dw = weights(model, layout, "embedding")
        return [table], [dw]
    rows = Fraction(tokens(model, layout), layout.degree) * share(layout.degree)
    sent = Transfer("all_to_all", "tsp", "embedding", rows * model.hidden * model.element)
    return [sent], [sent]


def loss(model: Model, layout: Layout) -> tuple[Transfers, Transfers]:
    """(forward, backward) of a micro-batch's output layer and cross-entropy."""
    of_tokens = share(layout.degree) * tokens(model, layout) * WIDE
    if layout.fold:
        walk, dw = weights(model, layout, "loss")
        return [walk, Transfer("all_gather", "tsp", "loss", of_tokens)], [walk, dw]
    # Largest logit, target logit and sum of exponentials are all-reduced.
    reduced = Transfer("all_reduce", "tp", "loss", 3 * 2 * of_tokens)
    there = activations(model, layout, 1, 0, "loss")
    return [*there, reduced], activations(model, layout, 1, 1, "loss")


# ---------------------------------------------------------------------------------------------
# A step
# ---------------------------------------------------------------------------------------------


def sharded_weights(model: Model, moe: bool) -> int:
    """Weights of a layer that a tensor-parallel or TSP group shares."""
    return model.attention_weights + (model.shared_weights if moe else model.mlp_weights)


def replicated(model: Model, moe: bool) -> int:
    """Parameters of a layer that each rank of the group holds whole."""
    return model.replicated_per_layer + (model.router_weights if moe else 0)


def expert_parameters(model: Model, layout: Layout, stage: int = 0) -> int:
    """Parameters of routed experts, of a rank of a pipeline stage."""
    mixtures = sum(model.layers_of(stage, layout.pipeline, layout.virtual))
    return mixtures and mixtures * experts.held(model, layout)


def parameters(model: Model, layout: Layout, stage: int = 0) -> int:
    """Parameters of a rank of a pipeline stage, with the padded vocabulary, without experts."""
    count = 0
    for moe in model.layers_of(stage, layout.pipeline, layout.virtual):
        count += sharded_weights(model, moe) // layout.degree + replicated(model, moe)
    table = model.padded_vocab(layout.degree) // layout.degree * model.hidden
    first, last = stage == 0, stage == layout.pipeline - 1
    count += first * (table + model.learned_positions * model.hidden)
    count += last * ((not (model.tied and first)) * table + model.norm_size)
    return count


def _replicated(model: Model, layout: Layout, stage: int) -> int:
    """Parameters whose gradients Megatron sums over the tensor-parallel group."""
    kinds = model.layers_of(stage, layout.pipeline, layout.virtual)
    count = sum(replicated(model, moe) for moe in kinds)
    if stage == layout.pipeline - 1:
        count += model.norm_size
    if stage == 0 and layout.fold:
        count += model.learned_positions * model.hidden
    return count


def pipeline(model: Model, layout: Layout, stage: int) -> Transfers:
    """Activations to the next stage and their gradients to the one before, of a micro-batch."""
    size = Fraction(tokens(model, layout), layout.degree) * model.hidden * model.element
    # With virtual stages every rank has a next and a previous one, except at the model's ends.
    stages = layout.pipeline * layout.virtual
    mine = range(stage, stages, layout.pipeline)
    sends = sum(1 for s in mine if s < stages - 1) + sum(1 for s in mine if s > 0)
    # Of two ranks that send to each other at any time, Megatron gives one the default group.
    group = "world" if layout.virtual > 1 and layout.pipeline == 2 and stage == 1 else "pp"
    return [Transfer("send", group, "other", sends * size)] if layout.pipeline > 1 else []


def batch(model: Model, layout: Layout, stage: int) -> Transfers:
    """A micro-batch's tokens, labels, positions (int64) and loss mask (fp32), from one rank of a
    tensor-parallel group to the others."""
    size = 0
    if stage == 0:
        size += 8 + 8
    if stage == layout.pipeline - 1:
        size += 8 + 4
    sent = share(layout.degree) * layout.micro_batch * model.sequence * size
    return [Transfer("broadcast", "tsp" if layout.fold else "tp", "other", sent)]


def gradients(model: Model, layout: Layout, stage: int = 0) -> Transfers:
    """Once a step: sums of gradients over ranks, and parameters back from the optimizer's shards.

    Single numbers (gradient norm, loss for the log) are left out, and so is the padding of buckets.
    """
    sent = []
    small = 2 * share(layout.degree) * _replicated(model, layout, stage) * WIDE
    sent.append(Transfer("all_reduce", "tsp" if layout.fold else "tp", "other", small))
    for group, ranks, count in (
        ("dp-cp", layout.data * layout.context, parameters(model, layout, stage)),
        (experts.OF_REPLICAS, layout.expert_replicas, expert_parameters(model, layout, stage)),
    ):
        whole = share(ranks) * count
        if layout.distributed_optimizer:
            # Of Megatron's two optimizers, for experts and for the rest, each gathers all.
            times = 2 if model.mixture and not layout.overlap_params else 1
            sent.append(Transfer("reduce_scatter", group, "other", whole * WIDE))
            sent.append(Transfer("all_gather", group, "other", times * whole * model.element))
        else:
            sent.append(Transfer("all_reduce", group, "other", 2 * whole * WIDE))
    if model.tied and layout.pipeline > 1 and stage in (0, layout.pipeline - 1):
        table = model.padded_vocab(layout.degree) // layout.degree * model.hidden
        sent.append(Transfer("all_reduce", "embedding", "other", Fraction(table * WIDE)))
    return [transfer for transfer in sent if transfer.sent]


def step(model: Model, layout: Layout, stage: int = 0) -> Transfers:
    """All that a rank of a pipeline stage sends in a training step."""
    micro = layout.micro_batches(model.global_batch)
    kinds = model.layers_of(stage, layout.pipeline, layout.virtual)
    each = batch(model, layout, stage)
    for moe in set(kinds):
        once = forward(model, layout, moe) + backward(model, layout, moe)
        once += recompute(model, layout, moe)
        each += [t._replace(sent=t.sent * kinds.count(moe)) for t in once]
    if stage == 0:
        each += [t for half in embedding(model, layout) for t in half]
    if stage == layout.pipeline - 1:
        each += [t for half in loss(model, layout) for t in half]
    each += pipeline(model, layout, stage)
    return [
        *(t._replace(sent=t.sent * micro) for t in each), *gradients(model, layout, stage)
    ]  # fmt: skip


def crossover(model: Model, fold: Layout, other: Layout, whole_step: bool = False) -> Fraction:
    """N above which a layer of `fold` sends fewer bytes than one of `other`: forward, or the
    whole step. Both are linear in N; infinity is given as -1. Of the model's last layer."""
    moe = model.layers_of(0, 1)[-1]

    def sent(layout: Layout, batch: int) -> Fraction:
        layout = _with_batch(layout, batch)
        parts = forward(model, layout, moe)
        if whole_step:
            parts = parts + backward(model, layout, moe) + recompute(model, layout, moe)
        return sum((t.sent for t in parts), Fraction(0))

    one, two = (sent(fold, n) - sent(other, n) for n in (1, 2))
    slope, fixed = two - one, 2 * one - two
    if slope >= 0:
        return Fraction(-1)
    return -fixed / slope * model.sequence


def _with_batch(layout: Layout, batch: int) -> Layout:
    return replace(layout, micro_batch=batch)
