"""Run an arm as its own torchrun job, watch it, and say what went wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_tsp.ab.arms import Arm

GRACE_S = 20  # between asking a job's processes to end and killing them


class ArmFailed(RuntimeError):
    """A job ended with an error; the message holds the failing rank's own error and its log."""


def run(arm: Arm, folder: Path, iterations: int | None) -> Path:
    """Run one arm to its end; return the folder of its ranks' records.

    Args:
        folder: gets ``record/`` (a JSON line per rank and step) and ``logs/`` (each rank's
            output). What an earlier run left in these two is removed.
        iterations: how many to expect, for the progress bar.

    Raises:
        ArmFailed: the job's exit code is not 0. KeyboardInterrupt and any other exception pass
            through; in every case the job's processes are gone on return.
    """
    record, logs = folder / "record", folder / "logs"
    for old in (record, logs):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    command = arm.command(record.resolve(), logs.resolve())
    launcher_log = logs / "torchrun.log"
    with open(launcher_log, "wb") as log:
        job = subprocess.Popen(
            command,
            env={**os.environ, **arm.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the job in order
        )
        try:
            _watch(job, arm, record / f"rank{arm.ranks - 1}.jsonl", iterations)
        finally:
            _end(job)
    if job.returncode != 0:
        raise ArmFailed(_failure(arm, job.returncode, logs, launcher_log))
    return record


def _watch(job, arm: Arm, record: Path, iterations: int | None) -> None:
    """Show the iterations done (and the loss) until the job ends. The last rank has the loss."""
    from tqdm import tqdm

    every = 0.2 if sys.stderr.isatty() else 15
    with tqdm(total=iterations, desc=arm.name, unit="it", mininterval=every) as bar:
        bar.set_postfix_str("starting")
        file = None
        while True:
            ended = job.poll() is not None
            if file is None and record.exists():
                file = open(record, encoding="utf-8")
            for line in _whole_lines(file):
                loss = json.loads(line)["loss"]
                bar.set_postfix_str("" if loss is None else f"loss {loss:.4f}", refresh=False)
                bar.update()
            if ended:
                break
            time.sleep(0.1)
        if file is not None:
            file.close()


def _whole_lines(file):
    """Lines that are complete by now; a half-written one waits for the next call."""
    if file is None:
        return
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(position)
            return
        yield line


def _end(job: subprocess.Popen) -> None:
    """End the job and every process that it started. Does nothing to one that ended by itself."""
    if job.poll() is not None:
        return
    try:
        ranks = psutil.Process(job.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        ranks = []
    job.send_signal(signal.SIGTERM)  # torchrun passes it on
    try:
        job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
    for process in ranks:
        try:
            process.kill()  # psutil checks that the id was not given to another process since
        except psutil.NoSuchProcess:
            pass


# ---------------------------------------------------------------------------------------------
# What went wrong
# ---------------------------------------------------------------------------------------------


def _failure(arm: Arm, code: int, logs: Path, launcher_log: Path) -> str:
    """One message: the failing rank, its own error, the path of its log."""
    rank = _first_failed_rank(launcher_log)
    log, error = _rank_error(logs, rank)
    if log is None:
        tail = _tail(launcher_log.read_text(errors="replace"))
        return f"arm {arm.name}: torchrun ended with exit code {code}:\n{tail}\nlog: {launcher_log}"
    who = f"rank {log.parent.name}"
    return f"arm {arm.name}: {who} failed:\n{error}\nlog: {log}"


def _first_failed_rank(launcher_log: Path) -> str | None:
    """The rank that torchrun's summary names as the first that failed."""
    text = launcher_log.read_text(errors="replace")
    found = re.search(r"Root Cause.*?rank\s*:\s*(\d+)", text, re.DOTALL)
    return found[1] if found else None


def _rank_error(logs: Path, first: str | None) -> tuple[Path | None, str]:
    """(log file, error) of the rank that failed first.

    torchrun's word is not enough: the process that it saw ending first may have died of another
    rank's death, or have exited without a word for the same reason as all. So a rank that has an
    error of its own comes before one that lost a connection.
    """
    errors = []
    for path in logs.glob("*/attempt_0/*/stderr.log"):
        error = error_in(path.read_text(errors="replace"))
        if error:
            secondary = re.search(r"Connection (closed|reset)|peer|Broken pipe|SIGTERM", error)
            named = path.parent.name == first
            errors.append((bool(secondary), not named, path.stat().st_mtime, path, error))
    if not errors:
        return None, ""
    *_, path, error = min(errors)
    return path, error


def error_in(text: str) -> str:
    """What a rank's stderr says went wrong: our own error line, or the last traceback; or ''."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)  # torch's mark
    own = re.findall(r"^.*?(megatron-tsp: error: .*)$", text, re.MULTILINE)
    if own:
        return own[-1]
    start = text.rfind("Traceback (most recent call last):")
    if start >= 0:
        return _tail(text[start:], 30)
    other = re.findall(r"^(?:\S+: )?error: .*$|^Fatal Python error: .*$", text, re.MULTILINE)
    return other[-1] if other else ""


def _tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
