"""How long a training step takes, and what of it is exposed."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from megatron_tsp.plan import experts, memory, traffic
from megatron_tsp.plan import work as passes
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.layer import layer
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.mixture import Mixture
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.timeline import COMPUTE, Timeline
from megatron_tsp.plan.transfer import Transfer
from megatron_tsp.plan.walk import Walk
from megatron_tsp.plan.work import Work

#: Bytes that Adam reads and writes of a parameter and its states, with the gradient norm and the
#: zeroing of gradients.
OPTIMIZER_BYTES = 42


@dataclass(frozen=True)
class Phase:
    """Seconds of a stretch of a timeline.

    Attributes:
        total: from the first kernel to the last.
        busy: {stream: seconds of work}; `timeline.COMPUTE` among them.
        waited: {stream: seconds that no kernel ran because of it}.
    """

    total: float
    busy: dict[str, float]
    waited: dict[str, float]

    def __add__(self, other: "Phase") -> "Phase":
        return Phase(
            self.total + other.total,
            _sum(self.busy, other.busy),
            _sum(self.waited, other.waited),
        )

    def __mul__(self, times: float) -> "Phase":
        return Phase(
            self.total * times,
            {key: value * times for key, value in self.busy.items()},
            {key: value * times for key, value in self.waited.items()},
        )


@dataclass(frozen=True)
class Prediction:
    """A layout on a machine.

    Attributes:
        step: seconds of a training step.
        parts: what the slowest stage does in it: stretches, and how often.
        memory: bytes by part, of the stage with most.
    """

    model: Model
    layout: Layout
    hardware: Hardware
    step: float
    parts: tuple[tuple[Phase, float], ...]
    memory: memory.Memory

    @property
    def phase(self) -> Phase:
        """What the slowest stage does in `step`; the pipeline's bubble is in `waited`."""
        whole = Phase(0.0, {}, {})
        for part, times in self.parts:
            whole = whole + part * times
        return whole

    @property
    def sent(self) -> float:
        """Bytes of a step, of the rank that sends most."""
        stages = {0, min(1, self.layout.pipeline - 1), self.layout.pipeline - 1}
        return max(
            float(sum(t.sent for t in traffic.step(self.model, self.layout, stage)))
            for stage in stages
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch by the seconds of a step."""
        return self.model.global_batch * self.model.sequence / self.step

    @property
    def flops_share(self) -> float:
        """Model FLOPs (3 times the forward's, causal attention, nothing counted twice) to peak."""
        model = self.model
        weights = model.active_weights + model.vocab * model.hidden
        attention = 2 * model.layers * model.sequence * model.q_width
        flops = 3 * (2 * weights + attention) * self.tokens_per_s
        return flops / (self.layout.ranks * self.hardware.numbers["matmul"] * 1e12)


def predict(
    model: Model, layout: Layout, hardware: Hardware, needs: memory.Memory | None = None
) -> Prediction:
    """The prediction for one layout; nothing is checked here (`search.check`). `needs`: its memory,
    if that is known."""
    kinds, ends = _of_group(_one_layer(model), layout.group_only, hardware)
    stages, micro = layout.pipeline, layout.micro_batches(model.global_batch)
    both, (grads, params, other, update) = _of_grid(model, layout.grid_only, hardware)
    hop = _hop(model, layout.grid_only, hardware, layout.micro_batch) if stages > 1 else 0.0
    # The slowest stage: the last, with the loss, unless another has more mixtures.
    parts, slowest = (), 0.0
    for stage, counts in both:
        last = stage == stages - 1
        mine = [(phase, n) for n, pair in zip(counts, kinds, strict=False) if n for phase in pair]
        mine += [(ends[0], 1)] if stage == 0 else []
        mine += [(ends[1], 1)] if last else []
        seconds = sum(phase.total * times for phase, times in mine)
        if seconds > slowest:
            parts, slowest, layers = mine, seconds, counts
    parts = [(phase, times * micro) for phase, times in parts]
    bubble = (stages - 1) / layout.virtual * slowest
    step = slowest * micro
    if hop:
        # Interleaved stages send while they compute, but for the bubble.
        exposed = (stages - 1) * hop
        if layout.virtual == 1:
            exposed += micro * hop
        moved = layout.virtual * hop * micro
        parts.append((Phase(exposed, {"pipeline": moved}, {"pipeline": exposed}), 1))
        step += exposed
    parts.append((Phase(bubble, {}, {"pipeline": bubble}), 1))
    # Of what overlaps, the last layer's gradients and the first layer's parameters cannot.
    pairs = list(zip(layers, kinds, strict=False))
    busy, number = grads + params + other, sum(layers)
    if layout.overlap_grads:
        backward = sum(n * pair[1].total for n, pair in pairs)
        grads = max(grads / number, grads - backward * (1 - 1 / number))
    if layout.overlap_params:
        forward = sum(n * pair[0].total for n, pair in pairs)
        params = max(params / number, params - forward * (1 - 1 / number))
    waited = grads + params + other
    tail = Phase(update + waited, {COMPUTE: update, "data": busy}, {"data": waited})
    parts.append((tail, 1))
    step += bubble + tail.total
    needs = needs or memory.largest(model, layout)
    return Prediction(model, layout, hardware, step, tuple(parts), needs)


@lru_cache(maxsize=64)
def _one_layer(model: Model) -> Model:
    """What a layer's time depends on."""
    return replace(model, layers=1, global_batch=1)


@lru_cache(maxsize=65536)
def _of_group(model: Model, layout: Layout, hardware: Hardware):
    """((forward, backward) of a layer, without and with a mixture; (embedding, loss), both ways)"""
    kinds = (False, True) if model.mixture else (False,)
    layers = tuple(layer_phases(model, layout, hardware, moe) for moe in kinds)
    return layers, end_phases(model, layout.ends_only, hardware)


@lru_cache(maxsize=65536)
def _of_grid(model: Model, layout: Layout, hardware: Hardware):
    """(stages that may be the slowest, with their layers without and with a mixture; seconds of
    what comes once a step)."""
    stages = range(layout.pipeline) if model.mixture else {0, layout.pipeline - 1}
    counts: dict[tuple, int] = {}
    for stage in stages:
        kinds = model.layers_of(stage, layout.pipeline, layout.virtual)
        ends = stage == 0, stage == layout.pipeline - 1
        counts[kinds.count(False), kinds.count(True), *ends] = stage
    both = tuple((stage, key[:2]) for key, stage in counts.items())
    return both, _once(Work(model, layout, hardware))


@lru_cache(maxsize=65536)
def _hop(model: Model, layout: Layout, hardware: Hardware, micro_batch: int) -> float:
    """Seconds for a micro-batch's activations and their gradients to pass between two stages."""
    work = Work(model, layout, hardware)
    size = micro_batch * work.tokens * model.hidden * model.element
    return work.seconds(Transfer("send", "pp", "other", Fraction(2 * size)))


def _once(work: Work) -> tuple[float, float, float, float]:
    """Seconds of what comes once a step: (sums of gradients over replicas, parameters back, other
    sums, the optimizer)."""
    model, layout = work.model, work.layout
    grads = params = other = 0.0
    for transfer in traffic.gradients(model, layout):
        seconds = work.seconds(transfer)
        if transfer.group not in ("dp-cp", experts.OF_REPLICAS):
            other += seconds
        elif transfer.collective == "all_gather":
            params += seconds
        else:
            grads += seconds
    owned: float = traffic.parameters(model, layout)
    routed: float = traffic.expert_parameters(model, layout)
    if layout.distributed_optimizer:
        owned /= layout.data * layout.context
        routed /= layout.expert_replicas
    return grads, params, other, work.hardware.elementwise(OPTIMIZER_BYTES * (owned + routed))


def layer_phases(
    model: Model, layout: Layout, hardware: Hardware, moe: bool = False
) -> tuple[Phase, Phase]:
    """(forward, backward with what is recomputed) of a layer among others, for one micro-batch;
    `moe`: of one with a mixture of experts."""
    plain = layout.but(expert=1, recompute="none", modules=(), recompute_layers=1)
    simple = plain.but(save_activations=False, save_kv=False)
    forward = _of_layer(model, simple, hardware, "forward", moe)
    # Only norms that are computed again are part of the backward's own order.
    own = plain.but(modules=("layernorm",), recompute="selective")
    own = own if layout.recomputes("layernorm") else plain
    backward = _of_layer(model, own, hardware, "backward", moe)
    if layout.expert > 1 and moe:
        there, back = _of_spread(model, layout.ends_only.but(expert=layout.expert), hardware)
        forward, backward = forward + there, backward + back
    if layout.recompute == "full":
        backward = backward + forward
    if layout.recomputes("core_attn"):
        backward = backward + _of_layer(model, simple, hardware, "attend", moe)
    if layout.recomputes("moe" if moe else "mlp"):
        backward = backward + _of_layer(model, simple, hardware, "feed_forward", moe)
        if layout.expert > 1 and moe:
            backward = backward + there
    return forward, backward


@lru_cache(maxsize=65536)
def _of_spread(model: Model, layout: Layout, hardware: Hardware) -> tuple[Phase, Phase]:
    """What it adds to a layer's (forward, backward) that its experts are spread over ranks."""
    phases = []
    for part in ("forward", "backward"):
        times = []
        for spread in (layout, layout.but(expert=1)):
            time = Timeline(hardware.overlap)
            getattr(Mixture(time, Work(model, spread, hardware, True)), part)()
            times.append(time)
        less = times[0].computed - times[1].computed  # products of fewer experts
        moved = times[0].moved["experts"]
        waited = {"experts": moved}
        phases.append(Phase(less + moved, {COMPUTE: less, "experts": moved}, waited))
    return tuple(phases)


@lru_cache(maxsize=65536)
def _of_layer(model: Model, layout: Layout, hardware: Hardware, part: str, moe: bool) -> Phase:
    time = Timeline(hardware.overlap)
    return _second(time, getattr(layer(time, Work(model, layout, hardware, moe)), part))


def _second(time: Timeline, run) -> Phase:
    """The second of two runs on a timeline: its first transfer was issued by the first."""
    run()
    start, busy, waited = time.now, time.busy, dict(time.waited)
    run()
    return Phase(
        time.now - start,
        {key: value - busy.get(key, 0.0) for key, value in time.busy.items()},
        {key: value - waited.get(key, 0.0) for key, value in time.waited.items()},
    )


@lru_cache(maxsize=65536)
def end_phases(model: Model, layout: Layout, hardware: Hardware) -> tuple[Phase, Phase]:
    """(embedding, output layer and loss), forward and backward, for one micro-batch."""
    work = Work(model, layout, hardware)
    first, last = Timeline(hardware.overlap), Timeline(hardware.overlap)
    for half in traffic.embedding(model, layout):
        for transfer in half:
            first.wait(first.transfer(work.seconds(transfer), "embedding"))
        first.kernel(work.elementwise(4, work.tokens * model.hidden))
    vocab = model.padded_vocab(layout.degree)
    element = model.element
    if layout.fold:
        walk = Walk(last, work)
        weights, dw = traffic.weights(model, layout, "loss")
        product = work.matmul(work.tokens, vocab / layout.degree, model.hidden)
        logits = work.tokens * vocab / layout.degree

        def forward():
            last.kernel(product + work.elementwise(passes.CROSS_ENTROPY[element], logits))

        def backward():
            softmax = work.elementwise(passes.CROSS_ENTROPY_BACKWARD[element], logits)
            last.kernel(3 * product + softmax)

        following = weights, layout.vocab_schedule
        walk(weights, layout.vocab_schedule, forward, following)
        walk(weights, layout.vocab_schedule, backward, None, dw)
    else:
        product = work.matmul(work.group_tokens, vocab / layout.degree, model.hidden)
        logits = work.group_tokens * vocab / layout.degree
        there, back = traffic.loss(model, layout)

        def moved(transfers):
            for transfer in transfers:
                last.wait(last.transfer(work.seconds(transfer), "activations"))

        moved(there)
        last.kernel(product + work.elementwise(passes.CROSS_ENTROPY[element], logits))
        moved(back)
        last.kernel(2 * product + work.elementwise(passes.CROSS_ENTROPY_BACKWARD[element], logits))
    return tuple(Phase(t.now, t.busy, dict(t.waited)) for t in (first, last))


def _sum(one: dict[str, float], two: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + two.get(key, 0.0) for key in {**one, **two}}
