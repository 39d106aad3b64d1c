"""How long a training step takes, and what of it is exposed."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_tsp.plan import memory, traffic
from megatron_tsp.plan import work as passes
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.layer import layer
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.timeline import COMPUTE, Timeline
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


NOTHING = Phase(0.0, {}, {})


@dataclass(frozen=True)
class Prediction:
    """A layout on a machine.

    Attributes:
        step: seconds of a training step.
        tokens_per_s: of the whole job.
        phase: what the slowest stage does in `step`; the pipeline's bubble is in `waited`.
        memory: bytes by part, of the stage with most.
    """

    model: Model
    layout: Layout
    hardware: Hardware
    step: float
    phase: Phase
    memory: memory.Memory

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
        weights = model.layers * (model.attention_weights + model.mlp_weights)
        weights += model.vocab * model.hidden
        attention = 2 * model.layers * model.sequence * model.q_width
        flops = 3 * (2 * weights + attention) * self.tokens_per_s
        return flops / (self.layout.ranks * self.hardware.numbers["matmul"] * 1e12)


def predict(model: Model, layout: Layout, hardware: Hardware) -> Prediction:
    """The prediction for one layout; nothing is checked here (`search.check`)."""
    inner = replace(
        layout, data=1, pipeline=1, virtual=1, distributed_optimizer=False, overlap_grads=False,
        overlap_params=False,
    )  # fmt: skip
    once, back = layer_phases(replace(model, layers=1, global_batch=1), inner, hardware)
    ends = end_phases(replace(model, layers=1, global_batch=1), inner, hardware)
    layers = model.layers // layout.pipeline
    micro = layout.micro_batches(model.global_batch)
    work = Work(model, layout, hardware)
    # The slowest stage: with the loss, or with the embedding, or both.
    both = NOTHING
    for end, has in zip(ends, (layout.pipeline == 1, True), strict=True):
        both = both + (end if has else NOTHING)
    batch = (once + back) * layers + both
    hops = 0.0
    if layout.pipeline > 1:
        [sent] = traffic.pipeline(model, replace(layout, virtual=1), 1) or [None]
        hops = layout.virtual * work.seconds(sent)
        batch = batch + Phase(hops, {"pipeline": hops}, {"pipeline": hops})
    steady = batch * micro
    bubble = (layout.pipeline - 1) / layout.virtual * batch.total
    tail = _tail(work, once.total * layers, back.total * layers)
    step = steady.total + bubble + tail.total
    waited = Phase(bubble, {}, {"pipeline": bubble})
    return Prediction(
        model,
        layout,
        hardware,
        step,
        steady + waited + tail,
        memory.largest(model, layout),
    )


def _tail(work: Work, forward: float, backward: float) -> Phase:
    """What comes once a step: sums of gradients, the optimizer, parameters back."""
    model, layout, hardware = work.model, work.layout, work.hardware
    grads = params = other = 0.0
    for transfer in traffic.gradients(model, layout):
        seconds = work.seconds(transfer)
        if transfer.group != "dp-cp":
            other += seconds
        elif transfer.collective == "all_gather":
            params += seconds
        else:
            grads += seconds
    busy = grads + params + other
    # Of what overlaps, the last layer's gradients and the first layer's parameters cannot.
    layers = model.layers // layout.pipeline
    if layout.overlap_grads:
        grads = max(grads / layers, grads - backward * (1 - 1 / layers))
    if layout.overlap_params:
        params = max(params / layers, params - forward * (1 - 1 / layers))
    owned = traffic.parameters(model, layout)
    if layout.distributed_optimizer:
        owned /= layout.data * layout.context
    update = hardware.elementwise(OPTIMIZER_BYTES * owned)
    waited = grads + params + other
    return Phase(update + waited, {COMPUTE: update, "data": busy}, {"data": waited})


def layer_phases(model: Model, layout: Layout, hardware: Hardware) -> tuple[Phase, Phase]:
    """(forward, backward with what is recomputed) of a layer among others, for one micro-batch."""
    plain = replace(layout, recompute="none", modules=(), recompute_layers=1)
    forward = _of_layer(model, replace(plain, save_activations=False), hardware, "forward")
    backward = _of_layer(model, replace(layout, recompute="none"), hardware, "backward")
    if layout.recompute == "full":
        backward = backward + forward
    if layout.recomputes("core_attn"):
        backward = backward + _of_layer(model, plain, hardware, "attend")
    if layout.recomputes("mlp"):
        backward = backward + _of_layer(model, plain, hardware, "feed_forward")
    return forward, backward


@lru_cache(maxsize=65536)
def _of_layer(model: Model, layout: Layout, hardware: Hardware, part: str) -> Phase:
    time = Timeline(hardware.overlap)
    return _second(time, getattr(layer(time, Work(model, layout, hardware)), part))


def _second(time: Timeline, run) -> Phase:
    """The second of two runs on a timeline: its first transfer was issued by the first."""
    run()
    start, busy, waited = time.now, dict(time.busy), dict(time.waited)
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
            first.wait(first.transfer(work.seconds(transfer), "embedding", first.issued()))
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
                last.wait(last.transfer(work.seconds(transfer), "activations", last.issued()))

        moved(there)
        last.kernel(product + work.elementwise(passes.CROSS_ENTROPY[element], logits))
        moved(back)
        last.kernel(2 * product + work.elementwise(passes.CROSS_ENTROPY_BACKWARD[element], logits))
    return tuple(Phase(t.now, dict(t.busy), dict(t.waited)) for t in (first, last))


def _sum(one: dict[str, float], two: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + two.get(key, 0.0) for key in {**one, **two}}
