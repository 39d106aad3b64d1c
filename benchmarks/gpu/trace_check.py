"""A trace against one GPU: rank 0 of 8 on the fake process group, with real CUDA tensors.

    python -m benchmarks.gpu.trace_check CONFIG.yaml --arms tp_sp,tsp [--set seq-length=32768]

Needs one NVIDIA GPU, and no other ranks: a fake group answers every collective at once. Where a
real one would have written, buffers are filled with small numbers, so that no kernel meets NaN.
Losses mean nothing; memory and kernel times do.

For each arm, in a process of its own: `torch.cuda.max_memory_allocated` of the third step, the
ratio to the trace's peak, and GPU time by kind of kernel. Written without a GPU at hand: not run.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict

STEP = 3


def main() -> None:
    """Compare each arm; print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--arms", default="tp_sp,tsp")
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one arm, in the child
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return
    rows = [compare(args, arm) for arm in args.arms.split(",")]
    for row in rows:
        print(json.dumps(row))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def compare(args, arm: str) -> dict:
    """{arm, traced, measured (bytes), ratio, kernel seconds by block}."""
    from megatron_tsp.ab import config as ab_config
    from megatron_tsp.trace import trace
    from megatron_tsp.trace.tracing import prepare, settings

    flags = settings(args.set)
    traced = trace(args.config, arm, 0, args.world_size, flags)
    made, _ = prepare(ab_config.read(args.config), arm, flags)
    request = {"argv": made.words(), "world": traced.world, "environment": made.env}
    again = [sys.executable, "-m", "benchmarks.gpu.trace_check", args.config]
    child = subprocess.run(
        [*again, "--measure", json.dumps(request)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    measured = json.loads(child.stdout.splitlines()[-1])
    return {
        "arm": arm,
        "traced_bytes": traced.peak_bytes,
        "measured_bytes": measured["peak"],
        "ratio": measured["peak"] / traced.peak_bytes,
        "reserved_bytes": measured["reserved"],
        "kernel_seconds": measured["kernels"],
    }


class _Done(Exception):
    """The measured step is over."""


def measure(request: dict) -> dict:
    """Peak memory and kernel time of step `STEP`, in this process."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(request["environment"])
    os.environ.update(RANK="0", WORLD_SIZE=str(request["world"]), LOCAL_RANK="0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not torch.cuda.is_available():
        sys.exit("trace_check: torch sees no GPU")
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request["world"])
    _fill_what_arrives()
    dist.all_gather_object = lambda objects, own, group=None: objects.__setitem__(
        slice(None), [own] * len(objects)
    )

    from megatron.training import training

    from megatron_tsp.training.main import run

    result: dict = {}
    steps = 0
    train_step = training.train_step

    def step(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps < STEP:
            return train_step(*args, **kwargs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            train_step(*args, **kwargs)
            torch.cuda.synchronize()
        result["peak"] = torch.cuda.max_memory_allocated()
        result["reserved"] = torch.cuda.max_memory_reserved()
        result["kernels"] = _kernels(profile)
        raise _Done

    training.train_step = step
    try:
        unchecked = ("--disable-gloo-process-groups", "--no-check-for-nan-in-loss-and-grad")
        run([*request["argv"], *unchecked])
    except _Done:
        pass
    return result


def _fill_what_arrives() -> None:
    """Small numbers where a real group would have written."""
    import torch.distributed as dist

    def filled(name: str, outputs: int):
        original = getattr(dist.ProcessGroup, name)

        def call(group, *args, **kwargs):
            work = original(group, *args, **kwargs)
            tensors = args[outputs] if args else next(iter(kwargs.values()))
            for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                if tensor.is_floating_point():
                    tensor.fill_(1e-3)
            return work

        setattr(dist.ProcessGroup, name, call)

    for name in ("recv", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast"):
        if hasattr(dist.ProcessGroup, name):
            filled(name, 0)


def _kernels(profile) -> dict[str, float]:
    """Seconds of GPU time by kind of kernel."""
    seconds: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        name = event.key.lower()
        if any(word in name for word in ("flash", "fmha", "attention")):
            kind = "attention kernels"
        elif any(word in name for word in ("gemm", "cutlass", "nvjet", "cublas")):
            kind = "matrix products"
        else:
            kind = "other"
        seconds[kind] += event.self_device_time_total / 1e6
    return dict(seconds)


if __name__ == "__main__":
    main()
