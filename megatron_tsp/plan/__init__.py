"""`megatron-tsp plan`: which layouts fit a machine, and which is fastest.

model.py, layout.py, present.py   the model; a way to spread it; the way a configuration has now
traffic.py, memory.py             bytes sent and held, in closed form
hardware.py                       machines and their links; hardware/*.yaml, the profiles
timeline.py                       a rank's streams, and what runs when
work.py, walk.py, layer.py        a layer on a timeline
prediction.py                     a step's time
search.py, explain.py             all layouts, ranked; the ranking in words
"""

import contextlib
import gc
import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

from megatron_tsp.errors import TSPError
from megatron_tsp.plan import explain, hardware, model, present, search
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.prediction import Prediction, predict

#: Rows of the table.
SHOWN = 10
#: What a plot can be.
PLOTS = (".png", ".svg", ".pdf")


def main(
    config: str,
    machine: str,
    gpus: int | None,
    seq_len: int | None = None,
    global_batch_tokens: int | None = None,
    price: float | None = None,
    json_path: str | None = None,
    plot_path: str | None = None,
) -> None:
    """Search, print the ranking and its reasons; write what is asked for.

    Raises:
        TSPError: the configuration, the profile or the numbers are wrong, or nothing fits.
    """
    profile = hardware.load(machine)
    if gpus is None:
        gpus = profile.devices_per_node
    if gpus < 1:
        raise TSPError(f"--gpus {gpus}: expected a number from 1")
    if price is not None and price <= 0:
        raise TSPError(f"--price {price:g}: expected a number above 0")
    for path in (json_path, plot_path):
        if path and not Path(path).resolve().parent.is_dir():
            raise TSPError(f"no folder {Path(path).resolve().parent} for {path}")
    if plot_path and Path(plot_path).suffix not in PLOTS:
        raise TSPError(f"--plot {plot_path}: expected a name that ends in {' or '.join(PLOTS)}")
    shape, now, refusal = read(config, gpus, seq_len, global_batch_tokens)
    if (shape.element == 2) != (profile.precision == "bf16"):
        raise TSPError(
            f"--hardware {machine} is for {profile.precision}, and the configuration trains in "
            f"{'bf16' if shape.element == 2 else 'fp32'}; give the other, or add --bf16"
        )
    price = price or profile.price
    gc.freeze()  # what was imported stays: a search makes many objects, each a reason to look
    fitting, too_large = search.search(shape, gpus, now, profile, not refusal, _beside())
    report = _report(shape, now, profile, fitting, too_large, refusal, price)
    print("\n".join(report))
    try:
        if json_path:
            text = json.dumps(_json(shape, now, profile, fitting), indent=1)
            Path(json_path).write_text(text + "\n", encoding="utf-8")
            print(f"\nwrote {json_path}")
        if plot_path:
            from megatron_tsp.plan import plots

            plots.write(plot_path, shape, now, profile, not refusal)
            print(f"wrote {plot_path}")
    except OSError as error:
        raise TSPError(f"cannot write {error.filename}: {error.strerror}") from error


def calibrate_to(path: str, machine: str, ranks: int | None) -> None:
    """Measure this machine, write its profile, and say what was found.

    Raises:
        TSPError: as `calibrate.main` and `hardware.load`.
    """
    from megatron_tsp.plan import calibrate

    calibrate.main(path, hardware.load(machine), ranks)
    profile = hardware.load(path)
    n = profile.numbers
    print(
        f"{profile.name}, {profile.devices_per_node} ranks: matrix products "
        f"{n['matmul'] * 1e3:,.1f} GFLOP/s a rank, attention {n['attention_efficiency']:.0%} of "
        f"that forward and {n['attention_backward_efficiency']:.0%} backward, memory "
        f"{n['memory_bandwidth']:.1f} GB/s"
    )
    for kind, table in profile.measured.items():
        pairs = [f"{r} ranks {b / 1e9:.3g} GB/s, {a * 1e6:.0f} us" for r, (a, b) in table.items()]
        print(f"  {kind}: {'; '.join(pairs)}")
    print(f"wrote {path}")


def read(
    config: str, ranks: int, seq_len: int | None = None, global_batch_tokens: int | None = None
) -> tuple[Model, Layout, str]:
    """(model, present layout, why TSP does not carry the model or "") of a configuration.

    Raises:
        TSPError: as `ab.config.read` and `ab.arms.check_flags`, or a setting is not priced.
    """
    from megatron_tsp.ab import arms, quiet_imports
    from megatron_tsp.ab import config as config_module

    given = config_module.read(config)
    flags = dict(given.model_args)
    if not flags.get("--tensor-model-parallel-size") and not flags.get("--tsp-size"):
        if given.degree > 1:  # the A/B's baseline arm
            flags["--tensor-model-parallel-size"] = str(given.degree)
            flags["--sequence-parallel"] = True
    if given.data and "--vocab-size" not in flags:
        from megatron_tsp import data

        of_data = data.flags(Path(given.data["OUT"], data.NAME))
        flags = {**{flag: str(value) for flag, value in of_data.items()}, **flags}
    quiet_imports()
    with _without_compiler():
        args = arms.check_flags(arms.Arm("MODEL_ARGS", ranks, flags))
    shape = model.from_args(args)
    if seq_len is not None:
        if seq_len < 1:
            raise TSPError(f"--seq-len {seq_len}: expected a number from 1")
        tokens = shape.global_batch * shape.sequence
        shape = replace(shape, sequence=seq_len, global_batch=max(1, tokens // seq_len))
    if global_batch_tokens is not None:
        batch, rest = divmod(global_batch_tokens, shape.sequence)
        if batch < 1 or rest:
            raise TSPError(
                f"--global-batch-tokens {global_batch_tokens} is not a multiple of the sequence, "
                f"{shape.sequence} tokens"
            )
        shape = replace(shape, global_batch=batch)
    now = present.from_args(args, ranks)
    from megatron_tsp import refusals

    refusal = ""
    try:
        refusals.refuse(args)
    except TSPError as error:
        refusal = str(error)
    return shape, now, refusal


@contextlib.contextmanager
def _without_compiler():
    """Megatron's modules decorate functions with torch.compile as they are imported, and that
    loads the compiler: two seconds, for functions that are not called here."""
    import torch

    compiler, torch.compile = torch.compile, lambda model=None, **options: model or (lambda f: f)
    try:
        yield
    finally:
        torch.compile = compiler


def _beside() -> bool:
    """Whether TSP runs beside context parallelism."""
    from megatron_tsp.refusals import REFUSED

    return all(refusal.dest != "context_parallel_size" for refusal in REFUSED)


def _report(
    shape: Model,
    now: Layout,
    profile: hardware.Hardware,
    fitting: list[Prediction],
    too_large: list[Prediction],
    refusal: str,
    price: float | None,
) -> list[str]:
    best = explain.by_grid(fitting)
    lines = [
        f"{profile.name}; {now.ranks} devices, {shape.parameters / 1e9:.2f} B parameters, "
        f"{shape.sequence:,} tokens a sequence, {shape.global_batch} sequences a step.",
        f"Tried: the {len(fitting) + len(too_large):,} layouts that Megatron and TSP would run. "
        f"{explain.too_many(len(too_large))} in {profile.usable_memory / explain.GIB:.0f} GiB "
        "a device. The fastest of each grid:",
        "",
        explain.table(best[:SHOWN], price),
        "",
    ]
    if refusal:
        lines += [f"Without TSP: {refusal}", ""]
    first = best[0]
    lines += [f"First: {first.layout.grid}, {first.layout.options}. {explain.binds(first)}"]
    lines.append(f"  {shlex.join(first.layout.flags())}")
    if too_large and too_large[0].step < first.step:
        lines.append(f"  Memory keeps out {explain.kept_out(too_large[0], first)}.")
    others = best[1:2]
    # The runner-up, and the best of the other kind, unless it is one of these.
    if all(p.layout.fold == first.layout.fold for p in others):
        others += [p for p in best if p.layout.fold != first.layout.fold][:1]
    for name, other in zip(("Runner-up", "Best of the other kind"), others, strict=False):
        behind = 1 - first.step / other.step
        lines.append(
            f"{name}: {other.layout.grid}, {other.layout.options}, {behind:.1%} behind. "
            f"{explain.binds(other)}"
        )
        lines.append(f"  {shlex.join(other.layout.flags())}")
        lines += [f"  {line}." for line in explain.crossovers(first, other)]
    lines += _present(shape, now, profile, first)
    if assumed := explain.assumptions(profile):
        lines += ["", f"Assumed in the profile, not published or measured: {', '.join(assumed)}."]
    return lines


def _present(shape: Model, now: Layout, profile: hardware.Hardware, first: Prediction) -> list[str]:
    name = f"Present: {now.grid}, {now.options}"
    if reason := search.check(shape, now):
        return [f"{name}: does not run here: {reason}."]
    here = predict(shape, now, profile)
    lines = [
        f"{name}: {here.tokens_per_s:,.0f} tokens/s, {here.step / first.step:.2f} times the step "
        f"of the first. {explain.binds(here)}"
    ]
    if here.memory.peak > profile.usable_memory:
        lines[0] += " It does not fit."
    other, reason = present.flipped(shape, now)
    if other is None:
        return [*lines, f"  No flip: {reason}."]
    return [*lines, f"  A flip {explain.change(here, predict(shape, other, profile))}."]


def _json(shape: Model, now: Layout, profile: hardware.Hardware, fitting: list[Prediction]) -> dict:
    return {
        "hardware": {"name": profile.name, "numbers": profile.numbers, "sources": profile.sources},
        "model": asdict(shape),
        "present": asdict(now),
        "layouts": [
            {
                **asdict(p.layout),
                "grid": p.layout.grid,
                "flags": p.layout.flags(),
                "step_s": p.step,
                "tokens_per_s": p.tokens_per_s,
                "of_peak": p.flops_share,
                "memory_bytes": {**asdict(p.memory), "peak": p.memory.peak},
                "busy_s": p.phase.busy,
                "waited_s": p.phase.waited,
            }
            for p in fitting
        ],
    }
