"""What the ranks recorded, as report.json and report.md.

report.json:

    arms.<name>   iterations, loss, grad_norm        lists, one entry a step
                  step_time_s                        median over the steps fit for timing
                  tokens_per_s                       the global batch's tokens / step_time_s
                  step_times_s                       list, one entry a step (the slowest rank's)
                  peak_memory_bytes                  list, one entry a rank
                  bytes_sent_per_rank_per_step       {collective: list, one entry a rank}
                  bytes_by_block                     {block: bytes per step}, summed over ranks
                  ranks, command
    parity        max_abs_loss_diff, max_rel_grad_norm_diff over the first 20 steps; first_loss_diff
    drift         the same over all steps
    ratios        time, memory, bytes: of the first arm named in `between` to the second
    comparisons   the three above for every other pair of arms
    not_finite    a sentence for each loss or gradient norm that became NaN or infinite, or []

A number that is NaN or infinite is written as null.
"""

import json
import math
import statistics
from itertools import combinations
from pathlib import Path

from megatron_tsp.ab.runner import ArmFailed

PARITY_STEPS = 20
#: The first steps are slower: buffers are made, the optimizer gets its state.
WARM_UP_STEPS = 2


def read_arm(record: Path, ranks: int) -> dict:
    """One arm's entry of report.json from its ranks' records.

    Raises:
        ArmFailed: a rank's record is missing or empty, or ranks recorded different steps.
    """
    per_rank = [_read(record / f"rank{rank}.jsonl") for rank in range(ranks)]
    if len({len(lines) for lines in per_rank}) != 1:
        raise ArmFailed(f"the ranks' records in {record} differ in length")
    steps = list(zip(*per_rank, strict=True))
    # The loss is known on the last pipeline stage only, and is the same on all of its ranks.
    losses = [next((r["loss"] for r in step if r["loss"] is not None), None) for step in steps]
    times = [max(r["step_time_s"] for r in step) for step in steps]
    steady = _steady(steps)
    step_time = statistics.median(times[i] for i in steady)
    return {
        "ranks": ranks,
        "iterations": [step[0]["iteration"] for step in steps],
        "loss": losses,
        "grad_norm": [step[0]["grad_norm"] for step in steps],
        "step_time_s": step_time,
        "step_times_s": times,
        "timed_steps": len(steady),
        "tokens_per_s": steps[-1][0]["tokens"] / step_time,
        "peak_memory_bytes": [_peak(lines) for lines in per_rank],
        "bytes_sent_per_rank_per_step": _per_step(steps, steady, "bytes_sent"),
        "bytes_by_block": {
            block: sum(sizes) for block, sizes in _per_step(steps, steady, "bytes_by_block").items()
        },
    }


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise ArmFailed(f"no record {path}: the rank finished no training step")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines:
        raise ArmFailed(f"the record {path} is empty: the rank finished no training step")
    return lines


def _steady(steps) -> list[int]:
    """Indices of the steps that count for time and bytes; short runs use what they have."""
    timed = [i for i, step in enumerate(steps) if all(r["timed"] for r in step)]
    return [i for i in timed if i >= WARM_UP_STEPS] or timed or list(range(len(steps)))


def _peak(lines: list[dict]) -> int | None:
    sizes = [line["peak_memory_bytes"] for line in lines if line["peak_memory_bytes"] is not None]
    return max(sizes, default=None)


def _per_step(steps, steady: list[int], key: str) -> dict[str, list[int]]:
    """{part: [bytes of rank 0 in a step, of rank 1, ...]}: the median over the steady steps."""
    parts = sorted({part for i in steady for rank in steps[i] for part in rank[key]})
    ranks = range(len(steps[0]))
    return {
        part: [
            statistics.median_low(steps[i][rank][key].get(part, 0) for i in steady)
            for rank in ranks
        ]
        for part in parts
    }


# ---------------------------------------------------------------------------------------------


def compare(first: dict, second: dict) -> dict:
    """parity, drift and ratios of two arms; ratios are first to second."""
    return {
        "parity": {
            "steps": min(PARITY_STEPS, _common(first, second)),
            **_differences(first, second, PARITY_STEPS),
            "first_loss_diff": _differences(first, second, 1)["max_abs_loss_diff"],
        },
        "drift": {
            "steps": _common(first, second),
            **_differences(first, second, _common(first, second)),
        },
        "ratios": {
            "time": _ratio(first["step_time_s"], second["step_time_s"]),
            "memory": _ratio(peak_memory(first), peak_memory(second)),
            "bytes": _ratio(bytes_sent(first), bytes_sent(second)),
        },
    }


def peak_memory(arm: dict) -> int | None:
    """The highest peak of any rank, in bytes."""
    return max((size for size in arm["peak_memory_bytes"] if size is not None), default=None)


def bytes_sent(arm: dict) -> int:
    """Bytes sent in a step by the rank that sends most."""
    return max(
        (sum(sizes) for sizes in zip(*arm["bytes_sent_per_rank_per_step"].values(), strict=True)),
        default=0,
    )


def _common(first: dict, second: dict) -> int:
    return min(len(first["loss"]), len(second["loss"]))


def _differences(first: dict, second: dict, steps: int) -> dict:
    def pairs(key):
        both = zip(first[key][:steps], second[key][:steps], strict=False)
        return [(a, b) for a, b in both if a is not None and b is not None]

    return {
        "max_abs_loss_diff": _max(abs(a - b) for a, b in pairs("loss")),
        "max_rel_grad_norm_diff": _max(
            abs(a - b) / max(abs(b), 1e-300) if a != b else 0.0 for a, b in pairs("grad_norm")
        ),
    }


def _max(values) -> float | None:
    """The maximum; NaN where a value is NaN (max() would lose it); None of nothing."""
    values = list(values)
    nan = next((value for value in values if value != value), None)
    return max(values, default=None) if nan is None else nan


def _ratio(a, b) -> float | None:
    return a / b if a is not None and b else None


def build(arms: dict[str, dict], about: dict) -> dict:
    """The whole report. `about` says how the arms were run; it comes first."""
    pairs = list(combinations(arms, 2))
    if "tsp" in arms and "tp_sp" in arms:
        pairs = [("tsp", "tp_sp"), *(p for p in pairs if set(p) != {"tsp", "tp_sp"})]
    compared = [{"between": [a, b], **compare(arms[a], arms[b])} for a, b in pairs]
    main = compared[0] if compared else {}
    return {
        **about,
        "arms": arms,
        **main,
        "comparisons": compared[1:],
        "not_finite": _not_finite(arms),
    }


def _not_finite(arms: dict[str, dict]) -> list[str]:
    """Where each arm's loss and gradient norm first were no finite number."""
    found = []
    for name, arm in arms.items():
        for key, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
            for iteration, value in zip(arm["iterations"], arm[key], strict=True):
                if value is not None and not math.isfinite(value):
                    became = "NaN" if math.isnan(value) else "infinite"
                    found.append(f"arm {name}: the {what} became {became} at iteration {iteration}")
                    break
    return found


# ---------------------------------------------------------------------------------------------


def write(report: dict, out: Path, plots: list[str]) -> None:
    """Write report.json and report.md to `out`; `plots` are file names beside them."""
    text = json.dumps(_finite(report), indent=1, allow_nan=False)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    parts = [
        "# A/B report",
        "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in about_lines(report)),
        table(report),
        "\n".join(f"- {line}" for line in verdicts(report)),
        *(f"![{name}]({name})" for name in plots),
        "## Bytes sent per rank and step (counted)",
        _bytes_table(report, "bytes_sent_per_rank_per_step", "collective"),
        "Summed over ranks, by the kind of block that sent them:",
        _bytes_table(report, "bytes_by_block", "block"),
        "## Command lines",
        *(f"{name}:\n\n```\n{arm['command']}\n```" for name, arm in report["arms"].items()),
    ]
    (out / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _finite(value):
    """`value` with None for each number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def about_lines(report: dict) -> list[tuple[str, str]]:
    """What the report says of the run as a whole: its scalar entries, notes one by one."""
    lines = [(key, value) for key, value in report.items() if isinstance(value, (str, int))]
    return lines + [("note", note) for note in report.get("notes", [])]


def table(report: dict) -> str:
    """The arms side by side, as Markdown."""
    rows = [
        ["arm", "ranks", "first loss", "last loss", "s/step", "tokens/s", "peak memory", "sent"]
    ]
    for name, arm in report["arms"].items():
        rows.append(
            [
                name,
                str(arm["ranks"]),
                _number(arm["loss"][0], ".6f"),
                _number(arm["loss"][-1], ".6f"),
                f"{arm['step_time_s']:.3f}",
                f"{arm['tokens_per_s']:.0f}",
                _mib(peak_memory(arm)),
                _mib(bytes_sent(arm)),
            ]
        )
    if "between" in report:
        first, second = report["between"]
        ratios = report["ratios"]
        rows.append(
            [f"{first} / {second}", "", "", ""]
            + [_number(ratios["time"], ".3f"), _number(_inverse(ratios["time"]), ".3f")]
            + [_number(ratios["memory"], ".3f"), _number(ratios["bytes"], ".3f")]
        )
    note = "Peak memory and bytes sent (a step) are those of the rank with most."
    return _markdown(rows) + "\n\n" + note


def verdicts(report: dict) -> list[str]:
    """What was not finite; then one sentence on parity for each pair of arms."""
    lines = list(report.get("not_finite", []))
    for pair in [report, *report.get("comparisons", [])]:
        if "between" not in pair:
            continue
        a, b = pair["between"]
        parity, drift = pair["parity"], pair["drift"]
        lines.append(
            f"{a} against {b}: over the first {parity['steps']} steps the loss differs by at most "
            f"{_number(parity['max_abs_loss_diff'], '.2e')} "
            f"({_number(parity['first_loss_diff'], '.2e')} at the first) and the gradient norm by "
            f"{_number(parity['max_rel_grad_norm_diff'], '.2e')} of itself; over all "
            f"{drift['steps']} steps by {_number(drift['max_abs_loss_diff'], '.2e')} and "
            f"{_number(drift['max_rel_grad_norm_diff'], '.2e')}"
        )
    return lines


def _bytes_table(report: dict, key: str, label: str) -> str:
    arms = report["arms"]
    names = sorted({name for arm in arms.values() for name in arm[key]})
    rows = [[label, *arms]]
    for name in names:
        rows.append([name, *(_sizes(arm[key].get(name)) for arm in arms.values())])
    return _markdown(rows)


def _sizes(value) -> str:
    """A size, or the ranks' sizes: one number where all are the same."""
    sizes = value if isinstance(value, list) else [value or 0]
    same = len(set(sizes)) == 1
    return f"{sizes[0]:,}" if same else ", ".join(f"{size:,}" for size in sizes)


def _markdown(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def _mib(size: int | None) -> str:
    return "n/a" if size is None else f"{size / 2**20:.1f} MiB"
