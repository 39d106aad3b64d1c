"""A Megatron-LM checkout, named by MEGATRON_LM_PATH: a clone of it, and runs with its Megatron."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training import _flags

ROOT = Path(__file__).parents[1]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH")

needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout"
)


def clone(folder: Path) -> Path:
    """A clone of the checkout in `folder`, in a path with a blank; nothing is built in it yet."""
    path = folder / "Megatron LM"
    subprocess.run(
        ["git", "-c", "advice.detachedHead=false", "clone", "-q", CHECKOUT, path], check=True
    )
    return path


def python(checkout: Path, *words, timeout: float = 400) -> str:
    """What a Python with the checkout's Megatron and our package prints."""
    environment = os.environ | {
        # Megatron's Makefile for its helpers asks `python3` for pybind11.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout}:{ROOT}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment, cwd=checkout.parent, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


def train(checkout: Path, record: Path, *entry, flags: str = "") -> list:
    """Three steps of `TINY` by torchrun on two ranks; the recorded steps, by rank.

    entry: a script or `-m` and a module; flags: as `training.train`.
    """
    launch = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d".split()
    flags = [*_flags([*flags.split(), "--train-iters", "3"]), "--tsp-record", record]
    python(checkout, *launch, "--rdzv-endpoint", "localhost:0", *entry, *flags)
    records = [(record / f"rank{rank}.jsonl").read_text() for rank in range(2)]
    steps = [[json.loads(line) for line in text.splitlines()] for text in records]
    assert [len(rank) for rank in steps] == [3, 3]
    return steps
