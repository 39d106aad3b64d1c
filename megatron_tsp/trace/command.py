"""``megatron-tsp trace``: trace the arms, show a table, write JSON and a picture."""

import json
import os
from pathlib import Path

from megatron_tsp.ab import config as ab_config
from megatron_tsp.ab import quiet_imports
from megatron_tsp.ab.arms import DEFAULT
from megatron_tsp.errors import TSPError
from megatron_tsp.trace import limits, report
from megatron_tsp.trace.pool import Pool
from megatron_tsp.trace.result import Trace
from megatron_tsp.trace.tracing import prepare, settings, start, unit_of


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
    quiet_imports()
    read, flags = ab_config.read(config), settings(words)
    _check_writable(json_file, timeline)
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
        _write(json_file, [trace.json() for trace in traces])
    if timeline:
        report.draw(traces, Path(timeline))
    return 0


def run_max_context(
    config: str,
    arms: list[str] | None,
    rank: int,
    world: int | None,
    words: list[str],
    room: float,
    reserve: float,
    json_file: str | None,
) -> int:
    """Find and print the longest sequence of each arm whose peak and reserve fit in `room` GiB.

    Raises:
        TSPError: as `run`; or the reserve leaves no room.
    """
    from concurrent.futures import ThreadPoolExecutor

    if reserve < 0:
        raise TSPError(f"--reserve {reserve:g}: it is 0 GiB or more")
    if room <= reserve:
        raise TSPError(
            f"--max-context {room:g}: the reserve takes {reserve:g} GiB of it (--reserve)"
        )
    _check_writable(json_file)
    quiet_imports()
    read, flags = ab_config.read(config), settings(words)
    names = list(dict.fromkeys(arms or DEFAULT))
    pool = Pool(min(len(names), _processes()))

    def find(name: str) -> limits.Limit:
        made, _ = prepare(read, name, flags)

        def start_one(tokens: int):
            return start(read, name, rank, world, flags | {"--seq-length": str(tokens)}, pool)

        guess = int(made.flags.get("--seq-length") or 4096)
        room_for_tensors = int((room - reserve) * report.GIB)
        return limits.longest(name, start_one, unit_of(made), room_for_tensors, guess)

    try:
        with ThreadPoolExecutor(len(names)) as threads:
            from tqdm import tqdm

            found = [*tqdm(threads.map(find, names), total=len(names), desc="arm", unit="arm")]
    finally:
        pool.close()
    print(f"\n{report.limits_table(found, room, reserve)}\n\n{report.RESERVE_NOTE}")
    if json_file:
        rows = [
            {
                "arm": one.arm,
                "max_seq_length": one.tokens,
                "trace": one.trace and one.trace.json(),
                "gib": room,
                "reserve_gib": reserve,
            }
            for one in found
        ]
        _write(json_file, rows)
    return 0


def _check_writable(*paths: str | None) -> None:
    for path in filter(None, paths):
        if not os.access(Path(path).absolute().parent, os.W_OK):
            raise TSPError(f"cannot write {path}: its folder is missing or not writable")


def _write(path: str, rows: list) -> None:
    Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


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
