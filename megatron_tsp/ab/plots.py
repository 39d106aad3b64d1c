"""The plots of an A/B report, as PNG files."""

from pathlib import Path

from megatron_tsp.ab.report import bytes_sent

NAMES = ("loss.png", "step_time.png", "memory.png", "bytes.png")


def draw(report: dict, out: Path) -> list[str]:
    """Draw loss, step time, peak memory and bytes sent to `out`; return the file names."""
    import matplotlib

    matplotlib.use("Agg")
    for name, plot in zip(NAMES, (_loss, _step_time, _memory, _bytes), strict=True):
        figure = plot(report)
        figure.savefig(out / name, dpi=120, bbox_inches="tight")
        figure.clear()
    return list(NAMES)


def _figure(rows: int = 1, **kwargs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2 * rows))
    return figure, figure.subplots(rows, **kwargs)


def _loss(report: dict):
    """The curves over each other; below, what each differs by from the last of its pair."""
    arms = report["arms"]
    if "between" not in report:
        figure, top = _figure()
    else:
        figure, (top, bottom) = _figure(2, sharex=True)
        for pair in [report, *report["comparisons"]]:
            a, b = pair["between"]
            both = zip(arms[a]["iterations"], arms[a]["loss"], arms[b]["loss"], strict=False)
            points = [(i, x - y) for i, x, y in both if x is not None and y is not None]
            bottom.plot(*zip(*points, strict=True) if points else ([], []), label=f"{a} - {b}")
        bottom.axhline(0, color="gray", linewidth=0.5)
        bottom.ticklabel_format(axis="y", scilimits=(-2, 2))
        bottom.set(xlabel="iteration", ylabel="difference")
        bottom.legend()
    for i, (name, arm) in enumerate(arms.items()):
        # Later curves are thinner, so that one on top of another shows.
        top.plot(arm["iterations"], arm["loss"], label=name, linewidth=max(1, 5 - 2 * i), alpha=0.8)
    top.set(ylabel="loss")
    top.legend()
    return figure


def _step_time(report: dict):
    figure, axes = _figure()
    for name, arm in report["arms"].items():
        label = f"{name} (median {arm['step_time_s']:.3f} s)"
        axes.plot(arm["iterations"], arm["step_times_s"], label=label)
    axes.set(xlabel="iteration", ylabel="step time, s", ylim=(0, None))
    axes.legend()
    return figure


def _memory(report: dict):
    figure, axes = _figure()
    arms = report["arms"]
    width = 0.8 / len(arms)
    for i, (name, arm) in enumerate(arms.items()):
        sizes = [(size or 0) / 2**20 for size in arm["peak_memory_bytes"]]
        axes.bar([rank + i * width for rank in range(len(sizes))], sizes, width, label=name)
    axes.set(xlabel="rank", ylabel="peak memory, MiB")
    axes.set_xticks(range(max(arm["ranks"] for arm in arms.values())))
    axes.legend()
    return figure


def _bytes(report: dict):
    """Stacked by collective, for the rank that sends most."""
    figure, axes = _figure()
    arms = report["arms"]
    collectives = sorted({c for arm in arms.values() for c in arm["bytes_sent_per_rank_per_step"]})
    bottom = [0.0] * len(arms)
    for collective in collectives:
        sizes = []
        for arm in arms.values():
            per_rank = arm["bytes_sent_per_rank_per_step"]
            totals = [sum(sizes) for sizes in zip(*per_rank.values(), strict=True)]
            busiest = totals.index(bytes_sent(arm)) if totals else 0
            sizes.append(per_rank.get(collective, [0] * arm["ranks"])[busiest] / 2**20)
        axes.bar(list(arms), sizes, bottom=bottom, width=0.5, label=collective)
        bottom = [b + s for b, s in zip(bottom, sizes, strict=True)]
    axes.set(ylabel="sent per rank and step, MiB")
    if collectives:
        axes.legend()
    return figure
