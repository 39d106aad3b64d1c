"""A trace for people: a table, and a picture of the step."""

from collections.abc import Sequence
from pathlib import Path

from megatron_tsp.trace.limits import Limit
from megatron_tsp.trace.result import Trace

MIB, GIB = 2**20, 2**30
RESERVE_NOTE = (
    "Bytes of tensors. Besides them: the CUDA context, workspaces of cuBLAS, buffers of NCCL, "
    "scratch space inside kernels, fragmentation."
)
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "loss")


def unit(traces: Sequence[Trace]) -> tuple[str, int]:
    """In what bytes are shown, and its size: MiB where every peak is below 1 GiB."""
    small = max(trace.peak_bytes for trace in traces) < GIB
    return ("MiB", MIB) if small else ("GiB", GIB)


def table(traces: Sequence[Trace]) -> str:
    """Markdown, one row a rank of an arm."""
    name, size = unit(traces)
    head = ["arm", "rank", f"peak {name}", *_COLUMNS, "at", f"sent {name}", "TFLOP"]
    rows = [
        [
            trace.arm,
            f"{trace.rank} of {trace.world}",
            f"{trace.peak_bytes / size:.2f}",
            *(f"{trace.split[kind] / size:.2f}" for kind in _COLUMNS),
            place(trace),
            f"{trace.sent_bytes / size:.2f}",
            f"{trace.flops / 1e12:.3g}",
        ]
        for trace in traces
    ]
    return _markdown([head, *rows])


def traffic(traces: Sequence[Trace]) -> str:
    """Markdown: what a rank sends in a step, by block and collective."""
    name, size = unit(traces)
    sent = [trace.sent_by("block", "collective") for trace in traces]
    keys = sorted({key for sums in sent for key in sums})
    arms = (f"{trace.arm}, rank {trace.rank}" for trace in traces)
    head = [f"sent {name}: block", "collective", *arms]
    rows = [[*key, *(f"{sums.get(key, 0) / size:.3f}" for sums in sent)] for key in keys]
    return _markdown([head, *rows])


def limits_table(found: Sequence[Limit], room: float, reserve: float) -> str:
    """Markdown: the longest sequence of each arm."""
    head = ["arm", f"longest sequence in {room:g} GiB", "its peak GiB", "at", "traces"]
    rows = [
        [
            one.arm,
            f"{one.tokens:,}" if one.trace else "none",
            f"{one.trace.peak_bytes / GIB:.2f} + {reserve:g}" if one.trace else "",
            place(one.trace) if one.trace else "",
            str(one.traces),
        ]
        for one in found
    ]
    return _markdown([head, *rows])


def _markdown(rows: list[list[str]]) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rest])


def place(trace: Trace) -> str:
    """Where the peak is: "layer 3 MLP, backward"."""
    return ", ".join(filter(None, (trace.peak["where"], trace.peak["phase"])))


_COLOURS = {"forward": "#4c78a8", "backward": "#e45756", "recompute": "#f2cf5b",
            "gradient reduction": "#72b7b2", "optimizer": "#54a24b"}  # fmt: skip


def draw(traces: Sequence[Trace], path: Path) -> None:
    """Live bytes over the step's operators, one panel a trace, phases in colour; a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    name, size = unit(traces)
    figure, panels = pyplot.subplots(
        len(traces), figsize=(11, 2.6 * len(traces) + 0.6), squeeze=False, sharey=True
    )
    for trace, axes in zip(traces, panels[:, 0], strict=True):
        line = [live / size for live in trace.timeline]
        axes.plot(line, color="black", linewidth=0.7)
        for start, end, phase in _phases(trace):
            axes.axvspan(start, end, color=_COLOURS.get(phase, "white"), alpha=0.35, linewidth=0)
        top = max(range(len(line)), key=line.__getitem__)
        axes.plot(top, line[top], "v", color="black", markersize=5)
        axes.set_title(
            f"{trace.arm}, rank {trace.rank} of {trace.world}: peak "
            f"{trace.peak_bytes / size:.2f} {name} at {place(trace)}",
            fontsize=10,
        )
        axes.set_ylabel(f"live, {name}")
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    panels[-1, 0].set_xlabel("operators of the step")
    handles = [Patch(color=colour, alpha=0.35, label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", fontsize=8)
    figure.tight_layout(rect=(0, 0.6 / (2.6 * len(traces) + 0.6), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _phases(trace: Trace):
    """(first operator, past the last, phase), neighbours of one phase joined."""
    joined: list[list] = []
    for at, _, phase in trace.marks:
        if not joined or joined[-1][1] != phase:
            joined.append([at, phase])
    ends = [at for at, _ in joined[1:]] + [len(trace.timeline)]
    for (at, phase), end in zip(joined, ends, strict=True):
        yield at, end, phase
