"""``megatron-tsp trace``: trace the arms, show a table, write JSON and a picture."""

import json
import os
from pathlib import Path

from megatron_tsp.ab import config as ab_config
from megatron_tsp.ab.arms import DEFAULT
from megatron_tsp.errors import TSPError
from megatron_tsp.trace import report
from megatron_tsp.trace.pool import Pool
from megatron_tsp.trace.result import Trace
from megatron_tsp.trace.tracing import settings, start


def run(
    config: str,
    arms: list[str] | None,
    ranks: list[int],
    world: int | None,
    words: list[str],
    json_file: str | None,
    timeline: str | None,
) -> int:
    """Trace each arm's ranks; print the table.

    Args:
        config: path of the YAML.
        arms: names; default tp_sp, tsp.
        ranks, world: which ranks of how many; `world` None is the arm's own number.
        words: ``name=value``, flags over those of the config.
        json_file, timeline: what to write, if anything.

    Raises:
        TSPError: the configuration cannot run, or a file cannot be written.
    """
    read, flags = ab_config.read(config), settings(words)
    for path in filter(None, (json_file, timeline)):
        if not os.access(Path(path).parent, os.W_OK):
            raise TSPError(f"cannot write {path}: its folder is missing or not writable")
    names = list(dict.fromkeys(arms or DEFAULT))
    traces = trace_all(
        [(name, rank) for name in names for rank in ranks],
        lambda job, pool: start(read, job[0], job[1], world, flags, pool),
    )
    print(f"\n{report.table(traces)}\n\n{report.traffic(traces)}\n")
    for trace in traces:
        for note in trace.notes:
            print(f"{trace.arm}: {note}")
    print(report.RESERVE_NOTE)
    if json_file:
        Path(json_file).write_text(json.dumps([trace.json() for trace in traces], indent=1) + "\n")
    if timeline:
        report.draw(traces, Path(timeline))
    return 0


def trace_all(jobs: list, start_one, size: int | None = None) -> list[Trace]:
    """The traces of `jobs`, in order, several at a time, with a progress bar.

    start_one(job, pool) returns a future. The first failure ends all.
    """
    from tqdm import tqdm

    pool = Pool(min(len(jobs), size or _processes()))
    try:
        futures = [start_one(job, pool) for job in jobs]
        return [future.result() for future in tqdm(futures, desc="trace", unit="trace")]
    finally:
        pool.close()


def _processes() -> int:
    """As many as there are cores, with 1 GiB of memory each."""
    import psutil

    return max(1, min(os.cpu_count() or 1, 8, psutil.virtual_memory().available // 2**30))
