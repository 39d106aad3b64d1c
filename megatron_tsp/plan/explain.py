"""A ranking in words: what binds, what is exposed, where the order turns."""

from collections.abc import Iterable
from dataclasses import replace

from megatron_tsp.plan import traffic
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.prediction import Prediction, predict
from megatron_tsp.plan.search import check
from megatron_tsp.plan.timeline import COMPUTE
from megatron_tsp.plan.work import Work

GIB = 2**30
#: What a stream of the timeline carries, and over which group.
STREAMS = {
    "weights": ("weight shards", "tsp-weights"),
    "kv": ("the attention's exchange", None),
    "activations": ("gathers and scatters of activations", "tp"),
    "experts": ("tokens to experts and back", "ep"),
    "embedding": ("the embedding's exchange", "tp"),
    "data": ("gradients and parameters over replicas", "dp-cp"),
    "pipeline": ("the pipeline: its bubble and transfers", "pp"),
}
#: Sequence lengths between which an order may turn.
SEQUENCES = tuple(2**power for power in range(9, 23))


def by_grid(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The fastest of each grid, in order."""
    best: dict[str, Prediction] = {}
    for prediction in predictions:
        best.setdefault(prediction.layout.grid, prediction)
    return list(best.values())


def table(predictions: list[Prediction], price: float | None) -> str:
    """Markdown rows, one a prediction."""
    heads = ["layout", "", "tokens/s", "s/step", "of peak", "GiB", "sent GiB/step"]
    heads += ["tokens/USD"] if price else []
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for p in predictions:
        cells = [p.layout.grid, p.layout.options, f"{p.tokens_per_s:,.0f}", f"{p.step:.3f}"]
        cells += [f"{p.flops_share:.1%}", f"{p.memory.peak / GIB:.1f}", f"{p.sent / GIB:.1f}"]
        if price:
            cells.append(f"{tokens_per_dollar(p, price):,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kept_out(larger: Prediction, first: Prediction) -> str:
    """A layout that does not fit and would be faster."""
    return (
        f"{larger.layout.grid}, {larger.layout.options}, which would be "
        f"{1 - larger.step / first.step:.1%} faster and needs {larger.memory.peak / GIB:.0f} GiB"
    )


def too_many(layouts: int) -> str:
    """'All fit', 'One does not fit', '1,234 do not fit'."""
    return {0: "All fit", 1: "One does not fit"}.get(layouts, f"{layouts:,} do not fit")


def tokens_per_dollar(prediction: Prediction, price: float) -> float:
    """Tokens for a dollar, at `price` for a device-hour."""
    return prediction.tokens_per_s * 3600 / (prediction.layout.ranks * price)


def binds(p: Prediction) -> str:
    """What a step's time goes to, in one sentence."""
    compute = p.phase.busy.get(COMPUTE, 0.0) / p.step
    exposed = sorted(((s / p.step, stream) for stream, s in p.phase.waited.items()), reverse=True)
    words = [f"kernels {compute:.0%}"]
    for share, stream in exposed:
        if share >= 0.005:
            words.append(f"waiting for {STREAMS[stream][0]} {share:.1%} ({_link(p, stream)})")
    hidden = sum(p.phase.busy.values()) - p.phase.busy.get(COMPUTE, 0.0)
    hidden -= sum(s for stream, s in p.phase.waited.items() if stream in p.phase.busy)
    if hidden / p.step >= 0.005:
        words.append(f"transfers hidden behind kernels {max(hidden, 0) / p.step:.0%}")
    most = "compute" if compute > 0.5 else STREAMS[exposed[0][1]][0]
    free = p.hardware.usable_memory - p.memory.peak
    return (
        f"{most} binds: {'; '.join(words)}. Memory {p.memory.peak / GIB:.1f} GiB, "
        f"{free / GIB:.1f} left."
    )


def _link(p: Prediction, stream: str) -> str:
    if stream == "pipeline" and p.layout.pipeline == 1:
        return "none"
    group = STREAMS[stream][1] or ("tsp-kv" if p.layout.fold else "cp")
    ranks, stride = Work(p.model, p.layout, p.hardware).group(group)
    crosses = p.hardware.neighbours(ranks, stride) < ranks
    return "network between nodes" if crosses else "links in a node"


def crossovers(one: Prediction, other: Prediction) -> list[str]:
    """Where the faster of two layouts changes with the length of the sequence and with the
    sequences of a step, from where on one does not fit, and where TSP sends fewer bytes."""
    names = one.layout.grid, other.layout.grid
    lines = _turns(
        names, "tokens a sequence",
        [(s, at_sequence(one, s), at_sequence(other, s)) for s in SEQUENCES],
    )  # fmt: skip
    lines += _turns(
        names, "sequences a step",
        [(b, at_batch(one, b), at_batch(other, b)) for b in _batches(one.model.global_batch)],
    )  # fmt: skip
    if one.layout.fold != other.layout.fold:
        fold, flat = (one, other) if one.layout.fold else (other, one)
        tokens = traffic.crossover(one.model, fold.layout, flat.layout, whole_step=True)
        if tokens > 0:
            lines.append(
                f"the layers of {fold.layout.grid} send fewer bytes than those of "
                f"{flat.layout.grid} above {float(tokens):,.0f} tokens a micro-batch"
            )
    return lines


def _turns(names: tuple[str, str], unit: str, points: list[tuple]) -> list[str]:
    """Where the order of two layouts turns, and the last of the points at which one fits. Where one
    does not fit the other wins; where none does, or one does not run, there is nothing to say."""
    order, fits = [], ([], [])
    for number, *pair in points:
        rates = []
        for prediction, mine in zip(pair, fits, strict=True):
            fit = prediction and prediction.memory.peak <= prediction.hardware.usable_memory
            rates.append(prediction.tokens_per_s if fit else 0.0)
            if prediction:
                mine.append((number, bool(fit)))
        if None not in pair and any(rates):
            order.append((number, int(rates[1] > rates[0])))
    lines = []
    for (below, first), (above, second) in zip(order, order[1:], strict=False):
        if first != second:
            lines.append(
                f"up to {below:,} {unit} {names[first]} is faster, from {above:,} on "
                f"{names[second]}"
            )
    if order and not lines:
        span = f"{order[0][0]:,} to {order[-1][0]:,}"
        lines.append(f"from {span} {unit} {names[order[0][1]]} is the faster of the two")
    for name, mine in zip(names, fits, strict=True):
        for (below, fit), (above, still) in zip(mine, mine[1:], strict=False):
            if fit and not still:
                lines.append(f"{name} fits up to {below:,} {unit}, and no longer at {above:,}")
                break
    return lines


def _batches(now: int) -> list[int]:
    """Sequences of a step: an eighth of what there are, to 16 times that, by twos."""
    return [max(1, now // 8) * 2**power for power in range(8)]


def at_batch(prediction: Prediction, batch: int) -> Prediction | None:
    """The same layout with another number of sequences a step; None if it does not run there."""
    scaled = replace(prediction.model, global_batch=batch)
    layout = prediction.layout
    return None if check(scaled, layout) else predict(scaled, layout, prediction.hardware)


def at_sequence(prediction: Prediction, sequence: int) -> Prediction | None:
    """The same layout at another length of the sequence and about the same tokens a step; None if
    it does not run there."""
    model, layout = prediction.model, prediction.layout
    unit = layout.data * layout.micro_batch
    batch = max(1, model.global_batch * model.sequence // sequence // unit) * unit
    scaled = replace(model, sequence=sequence, global_batch=batch)
    return None if check(scaled, layout) else predict(scaled, layout, prediction.hardware)


def change(present: Prediction, flip: Prediction) -> str:
    """What a flip changes."""
    return (
        f"to {flip.layout.grid} ({flip.layout.options}): tokens/s times "
        f"{flip.tokens_per_s / present.tokens_per_s:.2f}, memory {present.memory.peak / GIB:.1f} "
        f"to {flip.memory.peak / GIB:.1f} GiB, sent {present.sent / GIB:.1f} to "
        f"{flip.sent / GIB:.1f} GiB a rank and step"
    )


def assumptions(hardware: Hardware) -> list[str]:
    """The numbers of a profile that are assumptions, as 'name value'."""
    return [
        f"{name} {hardware.numbers[name]:g}"
        for name, source in hardware.sources.items()
        if "assumption" in source and name in hardware.numbers
    ]
