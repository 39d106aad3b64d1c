"""Make benchmarks/memory_7b.md: what a rank of a 7B on 8 ranks needs, from 16K to 1M tokens.

    python -m benchmarks.memory_7b [--lengths 16 128] [--arms tsp tp_sp] [--missing] [--out FILE.md]

Traces (docs/trace.md): the training code on tensors without contents; no GPU. Rows are kept beside
the table (.json), so that a run with other --lengths or --arms adds to it.
"""

import argparse
import itertools
import json
from pathlib import Path

import megatron.core
import torch

from megatron_tsp.ab import config as ab_config
from megatron_tsp.trace import command
from megatron_tsp.trace.report import GIB, place
from megatron_tsp.trace.tracing import start

HERE = Path(__file__).parent
LENGTHS = (16, 32, 64, 128, 256, 1024)
ARMS = {
    "tp_sp": "TP 8 + SP",
    "tp_sp_stock": "TP 8 + SP, stock",
    "tp4_cp2": "TP 4 × CP 2",
    "tp2_cp4": "TP 2 × CP 4",
    "cp8": "CP 8",
    "tsp": "TSP 8, allgather",
    "tsp_heads": "TSP 8, alltoall",
}
RECOMPUTE = {
    "none": {},
    "selective": {"--recompute-granularity": "selective",
                  "--recompute-modules": ["mlp", "layernorm"]},
    "full": {"--recompute-granularity": "full", "--recompute-method": "uniform",
             "--recompute-num-layers": "1"},
}  # fmt: skip
#: TSP's layers recompute these by themselves.
SAME = {("tsp", "selective"), ("tsp_heads", "selective")}

TARGETS = (("full", 16, 19.6), ("full", 128, 24.0), ("full", 1024, 62.0), ("none", 16, 22.0),
           ("none", 128, 44.0))  # fmt: skip


def main() -> None:
    """Trace what is asked for, and write the table of all that has been traced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="in 1024 tokens")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--recompute", nargs="+", default=list(RECOMPUTE), choices=RECOMPUTE)
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--out", type=Path, default=HERE / "memory_7b.md")
    args = parser.parse_args()
    config = ab_config.read(HERE / "configs" / "memory_7b.yaml")
    kept = args.out.with_suffix(".json")
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    jobs = [
        job
        for job in itertools.product(args.arms, args.recompute, args.lengths)
        if job[:2] not in SAME and not (args.missing and _key(job) in rows)
    ]
    jobs.sort(key=lambda job: args.lengths.index(job[2]))

    def start_one(job, pool):
        arm, recompute, length = job
        settings = {"--seq-length": str(length * 1024), **RECOMPUTE[recompute]}
        future = start(config, arm, 0, None, settings, pool)
        future.add_done_callback(lambda done: keep(job, done))
        return future

    def keep(job, done) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        trace = done.result()
        split = {name: round(size / GIB, 3) for name, size in trace.split.items()}
        rows[_key(job)] = {
            "peak": round(trace.peak_bytes / GIB, 3),
            "at": place(trace),
            "split": split,
            "sent": round(trace.sent_bytes / GIB, 3),
        }
        kept.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n")

    if jobs:
        command.trace_all(jobs, start_one)
    args.out.write_text(document(rows), encoding="utf-8")
    print(f"wrote {args.out}")


def _key(job: tuple[str, str, int]) -> str:
    return "/".join(map(str, job))


def document(rows: dict) -> str:
    """The Markdown of everything traced."""
    lengths = sorted({int(key.split("/")[2]) for key in rows})
    parts = [_HEAD.format(versions=_versions())]
    for recompute in RECOMPUTE:
        parts.append(f"## Recompute: {recompute}\n\nPeak, GiB a rank:\n")
        parts.append(_table(rows, recompute, lengths, "peak", "{:.1f}"))
    parts.append("## Against the targets\n")
    parts.append(_targets(rows))
    parts.append("## What the peak at 128K is made of, GiB\n")
    parts.append(_splits(rows, 128))
    parts.append("## Bytes a rank sends in a step, GiB\n")
    for recompute in ("none", "full"):
        parts.append(f"Recompute {recompute}:\n")
        parts.append(_table(rows, recompute, lengths, "sent", "{:.1f}"))
    parts.append(_TAIL)
    return "\n".join(parts)


def _versions() -> str:
    return f"torch {torch.__version__}, megatron-core {megatron.core.__version__}"


def _find(rows: dict, arm: str, recompute: str, length: int) -> dict | None:
    if (arm, recompute) in SAME:
        recompute = "none"
    return rows.get(f"{arm}/{recompute}/{length}")


def _table(rows, recompute, lengths, what, form) -> str:
    lines = [["arm", *(_length(length) for length in lengths)]]
    for arm, name in ARMS.items():
        found = [_find(rows, arm, recompute, length) for length in lengths]
        lines.append([name, *(form.format(one[what]) if one else "–" for one in found)])
    return _markdown(lines)


def _length(length: int) -> str:
    return "1M" if length == 1024 else f"{length}K"


def _targets(rows) -> str:
    arms = ("tsp", "tsp_heads", "tp_sp", "tp_sp_stock")
    lines = [["recompute", "length", "target", *map(ARMS.get, arms), f"at, {ARMS['tsp']}"]]
    for recompute, length, target in TARGETS:
        found = [_find(rows, arm, recompute, length) for arm in arms]
        shown = [f"{one['peak']:.2f}" if one else "–" for one in found]
        at = found[0]["at"] if found[0] else ""
        lines.append([recompute, _length(length), f"≤ {target:g}", *shown, at])
    return _markdown(lines)


def _splits(rows, length) -> str:
    lines: list[list[str]] = []
    for recompute in RECOMPUTE:
        for arm, name in ARMS.items():
            one = rows.get(f"{arm}/{recompute}/{length}")
            if one is None:
                continue
            if not lines:
                lines.append(["arm", "recompute", "peak", *one["split"], "at"])
            split = [f"{size:.2f}" for size in one["split"].values()]
            lines.append([name, recompute, f"{one['peak']:.2f}", *split, one["at"]])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    head, *rest = lines
    lines = [head, ["---"] * len(head), *rest]
    return "".join("| " + " | ".join(row) + " |\n" for row in lines)


_HEAD = """# What a rank of a 7B needs, 16K to 1M tokens

Made by `python -m benchmarks.memory_7b`: traces ([docs/trace.md](../docs/trace.md)) of rank 0 of 8,
from the training code, on tensors without contents. {versions}. Nothing here was measured on a GPU.

The model: hidden 4096, 32 layers, 32 heads (MHA), gated MLP of 16384, vocabulary 32000, untied.
Micro-batch 1, one micro-batch a step, bf16 weights, fp32 gradients, fp32 master weights and Adam:
18 bytes a parameter, 18.55 GiB a rank where all 8 ranks share the weights. No distributed
optimizer: CP 8 holds all weights and states on every rank, 148 GiB.

Every arm but one has TSP's norm, rotary embedding and attention core (`--tsp-baseline-core` for
Megatron's), so that the parallelism alone differs. *Stock* is what Megatron's own layers keep with
a flash attention (`benchmarks/stock.py`): Megatron's rotary embedding, a cos and a sin for each
query and key of each layer, and values that are views of the packed QKV, which stays alive with
them. Its norm is TSP's here as well: Megatron's local one refuses sequence parallelism, and those
of Transformer Engine and Apex, which need a GPU, keep the same (x and the row statistics). With
Transformer Engine's fused rotary embedding there is no cos and sin: one of the three [s/8, b, h]
tensors a layer by which *stock* is above the row before it.

*Selective* is `--recompute-modules mlp layernorm`. TSP's layers recompute both by themselves: their
row is that of *none*. *Full* is `--recompute-method uniform --recompute-num-layers 1`.

"–" has not been traced: the command above fills it in.
"""

_TAIL = """## The paper's figures

arXiv 2604.26294 reports, for a 7B on 8 MI300X, GiB a GPU:

| | 16K | 128K |
| --- | --- | --- |
| TSP | 31.0 | 38.8 |
| TP | 31.5 | 70.0 |
| TP+SP, T = 4, Σ = 2 | | 85.0 |
| TP+SP, T = 2, Σ = 4 | | 140.0 |

Its "SP" is a context-parallel axis with replicated weights: what is called TP × CP above. Its
states are about 24 bytes a parameter where Megatron's are 18, which alone is 6 GiB a rank more. It
does not say what was recomputed, so no row above is "the same run".
"""


if __name__ == "__main__":
    main()
