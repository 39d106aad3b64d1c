"""Start one rank in each network namespace, and wait: torchrun's part for `benchmarks.links`.

    python -m benchmarks.launch --logs DIR --master ADDRESS --namespaces NAME ... -- COMMAND ...

Rank k runs in the k-th namespace, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
set. Its output goes where torchrun's would (DIR/links/attempt_0/<rank>/stderr.log). When a rank
fails, or time is up, the others are ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PORT = "29500"  # nothing else listens in a namespace of its own
GRACE_S = 10


def start(namespaces: list[str], master: str, command: list[str], logs: Path) -> list:
    """One process a namespace."""
    ranks = []
    for rank, namespace in enumerate(namespaces):
        folder = logs / "links" / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(namespaces)),
            "LOCAL_RANK": str(rank),  # the file system is shared: one rank writes what all read
            "LOCAL_WORLD_SIZE": str(len(namespaces)),
            "MASTER_ADDR": master,
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
            words = ["ip", "netns", "exec", namespace, *command]
            process = subprocess.Popen(
                words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        ranks.append(process)
    return ranks


def wait(ranks: list, limit_s: float) -> int:
    """Until all ranks are done, one has failed, or time is up; returns the exit code."""
    end = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            print(f"Root Cause: rank: {failed[0]}, exit code {codes[failed[0]]}", flush=True)
            return 1
        if None not in codes:
            return 0
        if time.monotonic() > end:
            print(f"not done after {limit_s:.0f} s", flush=True)
            return 1
        time.sleep(0.1)


def stop(ranks: list) -> None:
    """End what still runs."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + GRACE_S
    for process in ranks:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """The command; returns 0 when every rank has ended well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--namespaces", nargs="+", required=True)
    parser.add_argument("--limit", type=float, default=1800, help="seconds")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))
    ranks = start(args.namespaces, args.master, args.command, args.logs)
    try:
        return wait(ranks, args.limit)
    finally:
        stop(ranks)


if __name__ == "__main__":
    sys.exit(main())
