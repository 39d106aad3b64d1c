"""What the benchmarks share: arms of one shape, run in interleaved rounds, and their medians.

The arms, the launcher and the readers of records are those of ``megatron-tsp ab``. A round runs
every arm once (A B C, A B C, ...), so that a machine that grows slower or busier does so for all.
"""

import argparse
import json
import logging
import os
import platform
import re
import signal
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_tsp import data
from megatron_tsp.ab import arms as arm_module
from megatron_tsp.ab import config as config_module
from megatron_tsp.ab import report, runner
from megatron_tsp.ab.arms import Arm
from megatron_tsp.errors import TSPError

CONFIG = Path(__file__).parent / "configs" / "model.yaml"
SHAPES = ("16x1024", "1x4096")
ARMS = ("tp_sp", "tsp", "tsp_saved")
#: Two steps of warm-up, two in which memory is measured, and one to time.
MIN_ITERATIONS = report.WARM_UP_STEPS + 3
MIB = 2**20

STOCK = "megatron_tsp.pretrain_gpt"
#: What a rank runs, by --reduce-scatter.
ENTRIES = {"ring": "benchmarks.rank", "gloo": STOCK}


@dataclass
class BenchmarkArm(Arm):
    """An arm whose ranks run the module `entry`."""

    entry: str = STOCK

    def command(self, record: Path, logs: Path) -> list[str]:
        """The torchrun command."""
        words = super().command(record, logs)
        return [self.entry if word == STOCK else word for word in words]


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--shape", nargs="+", default=list(SHAPES), help="micro-batch x sequence (%(default)s)")
    add("--arms", nargs="+", default=list(ARMS), help="the first is the base of ratios")
    add("--rounds", type=int, default=rounds, help="runs of each arm, interleaved (%(default)s)")
    add("--iterations", type=int, default=14, help="training steps of a run (%(default)s)")
    add("--reduce-scatter", choices=list(ENTRIES), default="ring", help="see benchmarks/rank.py")
    add("--config", default=str(CONFIG), help="the model, as for `megatron-tsp ab`")
    add("--out", default=None, help="folder for report.json, records and logs")
    return parser


def main(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a benchmark; return its exit code. Ctrl-C and a plain kill end its children too."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns of no GPU
    warnings.filterwarnings("ignore", module="megatron|torch")
    try:
        run(args)
    except (TSPError, runner.ArmFailed) as error:
        print(f"benchmark: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, TSPError) else 1
    except KeyboardInterrupt:
        print("benchmark: interrupted", file=sys.stderr)
        return 130
    return 0


def prepare(args: argparse.Namespace, shape: str) -> list[BenchmarkArm]:
    """The arms of one shape, their flags checked by Megatron's parser, their data made.

    Raises:
        TSPError: a shape, an arm, a number or a flag that is none.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    if not found:
        raise TSPError(f"--shape {shape!r}: expected micro-batch x sequence, like 16x1024")
    if args.iterations < MIN_ITERATIONS or args.rounds < 1:
        raise TSPError(f"at least {MIN_ITERATIONS} --iterations and 1 --rounds")
    config = config_module.read(args.config)
    config.model_args |= {
        "--micro-batch-size": found[1],
        "--global-batch-size": found[1],
        "--seq-length": found[2],
        "--max-position-embeddings": found[2],
        "--train-iters": str(args.iterations),
    }
    if config.data:
        out = config.data["OUT"]
        if not data.exists(out):
            data.build(out, config.data.get("INPUT"), config.data.get("JSON_KEY", "text"))
        flags = data.flags(Path(out, data.NAME))
        config.model_args |= {flag: str(value) for flag, value in flags.items()}
    arms = [arm_module.make(name, config) for name in dict.fromkeys(args.arms)]
    for arm in arms:
        arm_module.check_flags(arm)
        arm_module.check_data(arm)
    entry = ENTRIES[args.reduce_scatter]
    return [BenchmarkArm(**vars(arm), entry=entry) for arm in arms]


def measure(
    arms: list[Arm],
    rounds: int,
    iterations: int,
    folder: Path,
    wire: Callable[[], list[int]] | None = None,
) -> dict[str, list[dict]]:
    """Run every arm once a round; returns its entries of report.json, one a round.

    Args:
        wire: reads the ranks' network counters, in bytes sent; the entry gets `wire_bytes`, what
            each sent in the whole run (start and end of the job too), divided by its steps.

    Raises:
        ArmFailed: as `runner.run`.
    """
    results = {arm.name: [] for arm in arms}
    for turn in range(1, rounds + 1):
        for arm in arms:
            before = wire() if wire else []
            record = runner.run(arm, folder / f"{arm.name}-{turn}", iterations)
            entry = {**report.read_arm(record, arm.ranks), "command": arm.shown()}
            if wire:
                sent = [b - a for a, b in zip(before, wire(), strict=True)]
                entry["wire_bytes"] = [size // iterations for size in sent]
            results[arm.name].append(entry)
            print(f"{folder.name} round {turn}: {arm.name} {entry['step_time_s']:.3f} s/step")
    return results


def summarize(results: dict[str, list[dict]]) -> dict[str, dict]:
    """Medians over the rounds, per arm; ratios are to the first arm, of the same round."""
    base = next(iter(results.values()))
    summary = {}
    for name, entries in results.items():
        seconds = [entry["step_time_s"] for entry in entries]
        speedups = [b["step_time_s"] / e["step_time_s"] for b, e in zip(base, entries, strict=True)]
        compared = report.compare(entries[0], base[0])
        summary[name] = {
            "step_time_s": statistics.median(seconds),
            "tokens_per_s": statistics.median(entry["tokens_per_s"] for entry in entries),
            "tokens_per_s_ratio": statistics.median(speedups),
            "tokens_per_s_ratio_range": [min(speedups), max(speedups)],
            "peak_memory_bytes": max(report.peak_memory(entry) or 0 for entry in entries),
            "bytes_sent": report.bytes_sent(entries[0]),
            "memory_ratio": compared["ratios"]["memory"],
            "bytes_ratio": compared["ratios"]["bytes"],
            "max_abs_loss_diff": compared["drift"]["max_abs_loss_diff"],
        }
        if "wire_bytes" in entries[0]:
            summary[name]["wire_bytes"] = statistics.median(max(e["wire_bytes"]) for e in entries)
    return summary


def table(shapes: dict[str, dict[str, dict]]) -> str:
    """{shape: summary} as one Markdown table."""
    first = next(iter(next(iter(shapes.values()))))
    wired = any("wire_bytes" in arm for arms in shapes.values() for arm in arms.values())
    head = ["shape", "arm", "s/step", "tokens/s", f"ratio to {first} (range)", "peak memory"]
    head += ["sent per rank and step", *(["on the wire"] if wired else []), "loss differs by"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for shape, arms in shapes.items():
        for name, arm in arms.items():
            low, high = arm["tokens_per_s_ratio_range"]
            cells = [shape, name, f"{arm['step_time_s']:.3f}", f"{arm['tokens_per_s']:.0f}"]
            cells.append(f"{arm['tokens_per_s_ratio']:.3f} ({low:.3f} to {high:.3f})")
            cells.append(_size(arm["peak_memory_bytes"], arm["memory_ratio"]))
            cells.append(_size(arm["bytes_sent"], arm["bytes_ratio"]))
            if wired:
                cells.append(f"{arm['wire_bytes'] / MIB:.1f} MiB")
            cells.append(f"{arm['max_abs_loss_diff']:.1e}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _size(size: int, ratio: float | None) -> str:
    return f"{size / MIB:.1f} MiB" + ("" if ratio is None else f" ({ratio:.3f})")


def write(
    folder: Path,
    args: argparse.Namespace,
    about: dict,
    results: dict[str, dict[str, list[dict]]],
) -> None:
    """Write report.json, with every round of every shape, and print the table.

    about: what this benchmark adds to `args`, by name.
    """
    import megatron.core
    import torch

    shapes = {shape: summarize(entries) for shape, entries in results.items()}
    machine = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": f"torch {torch.__version__}, megatron-core {megatron.core.__version__}",
    }
    whole = {"about": {**machine, **vars(args), **about}, "summary": shapes, "rounds": results}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"\n{machine['cpu']}, {machine['cores']} cores; {machine['versions']}")
    print(f"\n{table(shapes)}\n\nreport: {folder / 'report.json'}", flush=True)


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
