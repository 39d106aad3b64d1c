"""`megatron-tsp plan --calibrate`: measure this machine, and write its profile.

Ranks of one node run matrix products, attention, an elementwise kernel and the collectives, all at
the same time, as they do in training: where ranks share cores, that is in the numbers. On GPUs with
NCCL and bf16, on CPUs with gloo and fp32.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from megatron_tsp.errors import TSPError
from megatron_tsp.plan.hardware import COLLECTIVES, NUMBERS, Hardware, _read

#: Seconds that each measurement is repeated for, at least.
LONG_ENOUGH = 0.4
RESULT = "TSP_CALIBRATE_RESULT"
#: Bytes that a rank sends, in the measurements of a collective: CPU, GPU.
SENT = {"cpu": (2**14, 2**22), "cuda": (2**16, 2**28)}


def main(out: str, base: Hardware, ranks: int | None, entry: str = __name__) -> None:
    """Measure on `ranks` ranks of this machine and write the profile to `out`.

    Args:
        base: what is not measured (memory, network between nodes) is taken from it.
        entry: the module that a rank runs; it calls `rank`.

    Raises:
        TSPError: the folder is not there, there are too few devices, or a rank failed.
    """
    if not Path(out).resolve().parent.is_dir():
        raise TSPError(f"no folder {Path(out).resolve().parent} for {out}")
    import torch

    devices = torch.cuda.device_count()
    ranks = ranks or devices or 4
    if ranks < 2 or (devices and ranks > devices):
        most = f" to {devices}" if devices else ""
        raise TSPError(f"--calibrate with --gpus {ranks}: expected 2{most} ranks")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", entry]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, RESULT: str(result)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not result.exists():
            # torchrun's own report comes last; the rank's error is a line before it.
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            first = next(iter(errors), done.stderr.strip()[-1000:])
            raise TSPError(f"--calibrate: a rank failed: {first}")
        measured = json.loads(result.read_text())
    made = profile(base, measured, ranks)
    _read(made, out)  # what it writes, it can read
    try:
        Path(out).write_text(
            yaml.safe_dump(made, sort_keys=False, default_flow_style=None, width=1000),
            encoding="utf-8",
        )
    except OSError as error:
        raise TSPError(f"cannot write {out}: {error.strerror}") from error


def profile(base: Hardware, measured: dict, ranks: int) -> dict:
    """The content of a profile: what `measure` gave, and the rest from `base`."""
    source = f"measured on {measured['device']}, {ranks} ranks, by megatron-tsp plan --calibrate"
    numbers = {
        name: {"value": base.numbers[name], "source": base.sources[name]} for name in NUMBERS
    }
    for name in ("matmul_efficiency", "memory_efficiency"):
        numbers[name] = {"value": 1.0, "source": "the rate is what was reached"}
    for name, value in measured["numbers"].items():
        numbers[name] = {"value": float(f"{value:.4g}"), "source": source}
    return {
        "name": measured["device"],
        "devices_per_node": ranks,
        "fabric": base.fabric,
        "precision": measured["precision"],
        "overlap": measured["overlap"],
        **numbers,
        "measured": {
            kind: {
                int(size): {"latency": float(f"{a:.4g}"), "bandwidth": float(f"{b:.4g}")}
                for size, (a, b) in table.items()
            }
            for kind, table in measured["collectives"].items()
        },
    }


# ---------------------------------------------------------------------------------------------
# A rank
# ---------------------------------------------------------------------------------------------


def rank() -> None:
    """Measure, as one rank of a torchrun job; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    result = measure()
    if dist.get_rank() == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure() -> dict:
    """What a profile has of this machine, as one rank of a process group; the same on all."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    collectives: dict[str, dict[int, list[float]]] = {kind: {} for kind in COLLECTIVES}
    size = 2
    while size <= dist.get_world_size():
        groups = [
            dist.new_group(list(range(first, first + size)))
            for first in range(0, dist.get_world_size() // size * size, size)
        ]
        mine = dist.get_rank() // size
        group = groups[mine] if mine < len(groups) else None
        for kind in COLLECTIVES:
            collectives[kind][size] = _collective(kind, group, size, device)
        size *= 2
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "precision": "bf16" if on_gpu else "fp32",
        "overlap": on_gpu,
        "numbers": _kernels(device, dtype),
        "collectives": collectives,
    }


def _kernels(device, dtype) -> dict[str, float]:
    """The profile's numbers of one device."""
    import torch

    from megatron_tsp.layers import kernels

    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = 2 * side**3 / _seconds(lambda: a @ b)
    length, heads = (16384, 16) if device.type == "cuda" else (2048, 2)
    shape = (1, heads, length, 128 if device.type == "cuda" else 32)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    kernel = kernels.choose()(shape[-1] ** -0.5)
    out, lse = kernel.forward(q, k, v, True)
    flops = 2 * length**2 * heads * shape[-1]  # causal
    forward = flops / _seconds(lambda: kernel.forward(q, k, v, True))
    backward = 2.5 * flops / _seconds(lambda: kernel.backward(q, q, k, v, out, lse, True))
    wide = torch.randn(2**28 if device.type == "cuda" else 2**22, device=device, dtype=dtype)
    target = torch.empty_like(wide)
    moved = 3 * wide.numel() * wide.element_size()
    tiny = torch.zeros(8, device=device, dtype=dtype)
    return {
        "matmul": product / 1e12,
        "attention_efficiency": min(1.0, forward / product),
        "attention_backward_efficiency": min(1.0, backward / product),
        "memory_bandwidth": moved / _seconds(lambda: torch.add(wide, wide, out=target)) / 1e9,
        "kernel_latency": _seconds(lambda: torch.add(tiny, tiny, out=tiny)) * 1e6,
    }


def _collective(kind: str, group, size: int, device) -> list[float]:
    """[latency in us, bandwidth in GB/s] of a collective, by bytes that a rank sends."""
    low, high = SENT[device.type]
    seconds = []
    for sent in (low, high):
        call = _call(kind, group, size, sent // 4, device) if group is not None else _nothing
        seconds.append(_seconds(call))
    rate = (high - low) / max(seconds[1] - seconds[0], 1e-9)
    return [max(0.0, seconds[0] - low / rate) * 1e6, rate / 1e9]


def _nothing() -> None:
    pass


def _call(kind: str, group, size: int, elements: int, device) -> Callable[[], object]:
    """A collective in which each rank sends so many fp32 elements, as `traffic` counts them."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(max(1, elements // (size - 1)) * size, device=device)
    part, other = torch.ones(len(whole) // size, device=device), torch.empty_like(whole)
    half, alone = whole[: len(whole) // 2], torch.ones(elements, device=device)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(half, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
        "reduce": lambda: dist.reduce(whole, group=group, group_dst=0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": lambda: _hop(alone, group, size),
    }[kind]


def _hop(sent, group, size: int) -> None:
    """One hop of a ring."""
    import torch
    import torch.distributed as dist

    place = dist.get_rank(group)
    following = dist.get_global_rank(group, (place + 1) % size)
    previous = dist.get_global_rank(group, (place - 1) % size)
    arrived = torch.empty_like(sent)
    ops = [dist.P2POp(dist.isend, sent, following, group)]
    ops += [dist.P2POp(dist.irecv, arrived, previous, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call that all ranks make at the same time, as many times; the mean over
    ranks."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()

    def timed(times: int) -> list[float]:
        dist.barrier()
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return taken

    timed(2)
    first = torch.tensor(sum(timed(2)) / 2, device="cuda" if on_gpu else "cpu")
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    times = max(5, min(200, int(LONG_ENOUGH / max(float(first), 1e-6))))
    taken = sorted(timed(times))
    median = torch.tensor(taken[len(taken) // 2], device="cuda" if on_gpu else "cpu")
    dist.all_reduce(median)
    return float(median) / dist.get_world_size()


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    cores = len(os.sched_getaffinity(0))
    return f"{names[0] if names else platform.machine()}, {cores} cores"


if __name__ == "__main__":
    rank()
