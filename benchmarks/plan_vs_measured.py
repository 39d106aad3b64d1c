"""Predicted against measured: ``python -m benchmarks.plan_vs_measured``.

Calibrates this machine, measures TSP against TP+SP turn by turn at three lengths of the sequence
(`benchmarks.steps`), calibrates again, and prints the predicted ratio of tokens/s beside the
measured one: by the clock, and by the ranks' processor time, which is steadier and decides where
cores are what binds. The two predictions are averaged, because other work comes and goes.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import rank, sidebyside, steps
from megatron_tsp import plan
from megatron_tsp.errors import TSPError
from megatron_tsp.plan import calibrate, hardware
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.prediction import predict

SHAPES = ("4x1024", "2x2048", "1x4096")
RANKS = 4
ARMS = {
    "tp_sp": Layout(fold=False, degree=RANKS),
    "tsp": Layout(fold=True, degree=RANKS),
    "tsp_saved": Layout(fold=True, degree=RANKS, save_activations=True),
    "tsp_heads": Layout(fold=True, degree=RANKS, exchange="alltoall"),
    "tsp_heads_saved": Layout(fold=True, degree=RANKS, exchange="alltoall", save_activations=True),
}


def run(args: argparse.Namespace) -> None:
    """Calibrate, measure, calibrate; print the table."""
    if args.arms[0] != "tp_sp" or not set(args.arms) <= set(ARMS):
        raise TSPError(f"--arms: tp_sp first, then some of {', '.join(ARMS)}")
    folder = Path(args.out or "ab-out/benchmark-plan")
    folder.mkdir(parents=True, exist_ok=True)
    args.out = str(folder)
    profiles = [_calibrate(folder / "before.yaml")]
    steps.launch(args)
    profiles.append(_calibrate(folder / "after.yaml"))
    heads = ["shape", "arm", "tokens/s to tp_sp, measured (quartiles)", "by processor time"]
    heads += ["predicted", "off by, of the clock's, of the processor's"]
    print("\n| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n")
    for shape in args.shape:
        batch, length = (int(number) for number in shape.split("x"))
        measured = json.loads((folder / f"{shape}.json").read_text())
        for name in args.arms[1:]:
            predicted = statistics.mean(
                _ratio(args.config, name, batch, length, profile) for profile in profiles
            )
            low, middle, high = statistics.quantiles(measured[name]["ratios"], n=4)
            used = [
                statistics.median(measured[arm]["processor_seconds"]) for arm in ("tp_sp", name)
            ]
            off = [predicted / ratio - 1 for ratio in (middle, used[0] / used[1])]
            print(
                f"| {shape} | {name} | {middle:.3f} ({low:.3f} to {high:.3f}) | "
                f"{used[0] / used[1]:.3f} | {predicted:.3f} | {off[0]:+.1%}, {off[1]:+.1%} |"
            )


def _calibrate(path: Path) -> hardware.Hardware:
    calibrate.main(str(path), hardware.load("cpu"), RANKS, entry="benchmarks.plan_vs_measured")
    return hardware.load(str(path))


def _ratio(config: str, arm: str, batch: int, length: int, profile: hardware.Hardware) -> float:
    """Predicted tokens/s of an arm to those of tp_sp."""
    model, _, _ = plan.read(config, RANKS)
    model = replace(model, sequence=length, global_batch=batch, vocab=512)
    seconds = [
        predict(model, replace(ARMS[name], micro_batch=batch), profile).step
        for name in ("tp_sp", arm)
    ]
    return seconds[0] / seconds[1]


if __name__ == "__main__":
    import os

    if calibrate.RESULT in os.environ:
        rank.install()  # the reduce-scatter that the benchmark's arms use
        calibrate.rank()
    else:
        parser = sidebyside.parser(__doc__, rounds=7)
        parser.set_defaults(shape=list(SHAPES))
        sys.exit(sidebyside.main(run, parser.parse_args()))
