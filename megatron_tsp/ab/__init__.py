"""``megatron-tsp ab``: the same training as TP+SP and as TSP, side by side."""

import os
import signal
import sys
import warnings
from pathlib import Path

from megatron_tsp.errors import TSPError


def main(
    config_path: str,
    names: list[str] | None = None,
    out: str | None = None,
    step: str | None = None,
    job: str | None = None,
) -> int:
    """Run the arms and write the report; return the exit code.

    1: an arm failed, or its loss or gradient norm became NaN or infinite. 143: SIGTERM. 130:
    Ctrl-C. The ranks are ended first.

    Args:
        config_path: YAML, see `config`.
        names: arms to run, in this order; default tp_sp, tsp.
        out: folder of the report; default ``ab-out/<name of the config's folder and file>``.
        step: prepare, rank (of `job`) or report: this step only, see `steps`.

    Raises:
        TSPError: the configuration is wrong; nothing was run.
    """
    from megatron_tsp.ab import arms as arm_module
    from megatron_tsp.ab import config as config_module
    from megatron_tsp.ab import steps
    from megatron_tsp.ab.runner import ArmFailed

    config = config_module.read(config_path)
    names = list(dict.fromkeys(names or arm_module.DEFAULT))
    arms = [arm_module.make(name, config) for name in names]
    folder = Path(out) if out else Path("ab-out", f"{config.path.parent.name}-{config.path.stem}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TSPError(f"cannot make the folder {folder}: {error.strerror}") from error

    def terminate(signum, frame):
        raise _Terminated  # so that a plain kill ends the children too

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        if step == "prepare":
            steps.prepare(config, arms, folder)
            return 0
        if step == "rank":
            _add_data_flags(config, arms)
            steps.become_rank(job, config, arms, folder)
        run = _recorded if step == "report" else _run
        report = run(config, arms, folder)
    except ArmFailed as error:
        print(f"megatron-tsp ab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupted:
        terminated = isinstance(interrupted, _Terminated)
        print(f"megatron-tsp: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)
    _print(report, folder)
    for line in report["not_finite"]:
        print(f"megatron-tsp ab: {line}", file=sys.stderr)
    return 1 if report["not_finite"] else 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def _run(config, arms, folder: Path) -> dict:
    """Check everything, run every arm, write the report and the plots."""
    from megatron_tsp.ab import initial, report, runner

    parsed = check(config, arms)
    how, words = initial.choose(config, arms)
    if how == "checkpoint":
        checkpoint = initial.save(arms[0], folder / initial.FOLDER)
        for arm in arms:
            initial.load(arm, checkpoint)
    results = {}
    for arm, args in zip(arms, parsed, strict=True):
        record = runner.run(arm, folder / arm.name, _iterations(args))
        results[arm.name] = {**report.read_arm(record, arm.ranks), "command": arm.shown()}
    return _write(results, _about(config, arms, words), folder)


def _recorded(config, arms, folder: Path) -> dict:
    """The report of arms that were run one by one."""
    from megatron_tsp.ab import steps

    quiet_imports()
    _add_data_flags(config, arms)
    results, words = steps.results(config, arms, folder)
    return _write(results, _about(config, arms, words), folder)


def _write(results: dict, about: dict, folder: Path) -> dict:
    from megatron_tsp.ab import plots, report

    built = report.build(results, about)
    report.write(built, folder, plots.draw(built, folder))
    return built


def check(config, arms) -> list:
    """Make the data set if it is not there and check every arm's flags; returns them parsed."""
    from megatron_tsp import data
    from megatron_tsp.ab.arms import check_data, check_flags

    quiet_imports()
    if config.data and not data.exists(config.data["OUT"]):
        data.build(
            config.data["OUT"], config.data.get("INPUT"), config.data.get("JSON_KEY", "text")
        )
    _add_data_flags(config, arms)
    parsed = [check_flags(arm) for arm in arms]
    for arm in arms:
        check_data(arm)
    return parsed


def _add_data_flags(config, arms) -> None:
    """Give every arm the flags of the data set that the configuration has made."""
    from megatron_tsp import data

    if not config.data:
        return
    for arm in arms:
        arm.flags |= {
            flag: str(value)
            for flag, value in data.flags(Path(config.data["OUT"], data.NAME)).items()
            if flag not in config.model_args
        }


def _iterations(args) -> int | None:
    if args.train_iters is not None:
        return args.train_iters
    if args.train_samples is not None and args.global_batch_size:
        return args.train_samples // args.global_batch_size
    return None


def _left_out(config, arms) -> list[str]:
    """Notes on flags of MODEL_ARGS that arms run without."""
    given = [flag for flag, value in config.model_args.items() if value is not False]
    dropped = {arm.name: [flag for flag in given if flag not in arm.flags] for arm in arms}
    common = [flag for flag in given if all(flag in flags for flags in dropped.values())]
    notes = [f"left out of MODEL_ARGS: {', '.join(common)}"] if common else []
    for name, flags in dropped.items():
        own = [flag for flag in flags if flag not in common]
        if own:
            notes.append(f"left out of MODEL_ARGS by {name}: {', '.join(own)}")
    return notes


def _about(config, arms, initial_weights: str) -> dict:
    """What was run, where, and how to read it."""
    import megatron.core
    import torch

    gpu = torch.cuda.is_available()
    notes = [
        "all arms: the same attention core and norm, data order and seed",
        "step time: wall time of a training step, the slowest rank's, median without warm-up",
        "bytes: counted at each collective, as what a rank sends under the bandwidth-optimal "
        "algorithm",
    ]
    if not gpu:
        notes += [
            "memory: live tensor bytes, measured in steps 3 and 4, which are not timed",
            "time: these ranks share one machine's cores and talk through its memory; it says "
            "nothing about GPUs",
        ]
    notes += _left_out(config, arms)
    return {
        "config": str(config.path),
        "initial_weights": initial_weights,
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {os.cpu_count()} cores",
        "versions": f"torch {torch.__version__}, megatron-core {megatron.core.__version__}",
        "notes": notes,
    }


def _print(report: dict, folder: Path) -> None:
    from megatron_tsp.ab import report as report_module

    print(f"\n{report_module.table(report)}\n")
    for line in report_module.verdicts(report):
        print(line)
    print(f"\nreport: {folder / 'report.md'} (and report.json, PNG plots)")


def quiet_imports() -> None:
    """Megatron's imports warn about parts that this process does not use."""
    import logging

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=module)
