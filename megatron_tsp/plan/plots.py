"""The planner's plots: memory and tokens/s by sequence length, and who wins where."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_tsp.plan import search
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.memory import largest
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.prediction import Prediction, predict

#: Tokens of a sequence.
SEQUENCES = tuple(2**power for power in range(12, 21))
#: Tokens of a micro-batch, and group sizes, of the map of regions.
TOKENS = tuple(2**power for power in range(10, 21))
SIZES = (2, 4, 8, 16)
FAMILIES = ("TSP", "TP+SP", "TP×CP")
COLOURS = {"TSP": "#d95f02", "TP+SP": "#1b9e77", "TP×CP": "#7570b3"}
GIB = 2**30


def write(path: str, model: Model, base: Layout, hardware: Hardware, folds: bool) -> None:
    """Three panels as one image: memory and tokens/s of each family by sequence length, on groups
    of one node's size (at most 8), and the regions.

    Args:
        base: its optimizer and overlaps are taken.
        folds: TSP carries the model.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    size = min(8, hardware.devices_per_node)
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    memory, speed, regions = figure.subplots(1, 3)
    for label, family, points in curves(model, base, hardware, size, folds):
        style = {"label": label, "color": COLOURS[family], "marker": "o", "markersize": 3}
        style["linestyle"] = "--" if "full" in label else "-"
        memory.plot([s for s, _ in points], [p.memory.peak / GIB for _, p in points], **style)
        fits = [(s, p) for s, p in points if p.memory.peak <= hardware.usable_memory]
        speed.plot([s for s, _ in fits], [p.tokens_per_s / size for _, p in fits], **style)
    memory.axhline(hardware.usable_memory / GIB, color="gray", linewidth=0.8)
    memory.set(ylabel="peak memory, GiB", ylim=(0, 2 * hardware.usable_memory / GIB))
    speed.set(ylabel="tokens/s and device (where it fits)", yscale="log")
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens a sequence")
        axes.grid(alpha=0.3)
    memory.legend(fontsize=7)
    _regions(regions, model, base, hardware, folds)
    figure.suptitle(
        f"{model.parameters / 1e9:.1f} B parameters on {hardware.name}: groups of {size}, one "
        "sequence a micro-batch; the line is what memory there is",
        fontsize=10,
    )
    figure.savefig(path, dpi=90)


def curves(
    model: Model, base: Layout, hardware: Hardware, size: int, folds: bool
) -> Iterator[tuple[str, str, list[tuple[int, Prediction]]]]:
    """(label, family, [(sequence, prediction)]) of one replica on `size` devices, by family and
    recompute."""
    plain = replace(
        base, data=1, pipeline=1, virtual=1, micro_batch=1, modules=(), recompute_layers=1
    )  # fmt: skip
    flat = replace(plain, fold=False, degree=size, context=1)
    mixed = replace(plain, fold=False, degree=size // 2, context=2, exchange="ring")
    lean = {"recompute": "selective", "modules": ("mlp", "layernorm")}
    kinds = [
        (f"TP {size}+SP", flat, lean),
        (f"TP {size // 2}+SP × CP 2", mixed, lean),
    ]
    if folds:
        kinds.append((f"TSP {size}", fastest_fold(plain, hardware, size), {}))
    for name, layout, lighter in kinds:
        for words, changes in (
            ("MLP and norms recomputed", lighter), ("full recompute", {"recompute": "full"})
        ):  # fmt: skip
            points = []
            for sequence in SEQUENCES:
                shape = replace(model, sequence=sequence, global_batch=1)
                made = replace(layout, **{"recompute": "none", "modules": (), **changes})
                if search.check(shape, made) is None:
                    points.append((sequence, predict(shape, made, hardware)))
            yield f"{name}, {words}", layout.kind, points


def fastest_fold(base: Layout, hardware: Hardware, size: int) -> Layout:
    """TSP with the schedules that suit the machine's links: a ring's hop uses one link."""
    mlp = "broadcast" if hardware.fabric == "mesh" else "ring"
    return replace(
        base, fold=True, degree=size, context=1, exchange="allgather", mlp_schedule=mlp,
        vocab_schedule=mlp,
    )  # fmt: skip


def winners(
    model: Model, base: Layout, hardware: Hardware, folds: bool
) -> dict[tuple[int, int], str | None]:
    """{(tokens of a micro-batch, size of the group): the fastest family that fits, or None}.

    The sequence is the micro-batch; a replica is the group, whatever it takes to fit.
    """
    found = {}
    for size in SIZES:
        for tokens in TOKENS:
            shape = replace(model, sequence=tokens, global_batch=1)
            best: tuple[float, str] | None = None
            for layout in search.layouts(shape, size, base, folds, True):
                if layout.pipeline > 1 or layout.data > 1 or layout.micro_batch > 1:
                    continue
                if layout.fold and layout.context > 1:
                    continue
                if largest(shape, layout).peak <= hardware.usable_memory:
                    step = predict(shape, layout, hardware).step
                    best = min(best or (step, layout.kind), (step, layout.kind))
            found[tokens, size] = best and best[1]
    return found


def _regions(axes, model: Model, base: Layout, hardware: Hardware, folds: bool) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    found = winners(model, base, hardware, folds)
    index = {None: 0, **{family: at + 1 for at, family in enumerate(FAMILIES)}}
    grid = [[index[found[tokens, size]] for tokens in TOKENS] for size in SIZES]
    colours = ListedColormap(["#dddddd", *(COLOURS[family] for family in FAMILIES)])
    axes.imshow(grid, cmap=colours, vmin=0, vmax=3, aspect="auto", origin="lower", alpha=0.85)
    axes.set_xticks(range(len(TOKENS)), [_short(tokens) for tokens in TOKENS], fontsize=7)
    axes.set_yticks(range(len(SIZES)), [str(size) for size in SIZES])
    axes.set(xlabel="batch·sequence of a micro-batch, tokens", ylabel="devices of a replica")
    handles = [Patch(color=COLOURS[family], label=family) for family in FAMILIES]
    handles.append(Patch(color="#dddddd", label="nothing fits"))
    axes.legend(handles=handles, fontsize=7, loc="upper left")


def _short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 1024}K"
