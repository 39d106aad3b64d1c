"""A trace against one GPU: rank 0 of 8 on the fake process group, with real CUDA tensors.

    python -m benchmarks.gpu.trace_check CONFIG.yaml --arms tp_sp,tsp [--set seq-length=32768]

Needs one NVIDIA GPU, and no other ranks: a fake group answers every collective at once. Where a
real one would have written, buffers are filled with small numbers, so that no kernel meets NaN.
Losses mean nothing; memory and times do.

For each arm, in a process of its own:

- step 3: `torch.cuda.max_memory_allocated`, and its ratio to the trace's peak;
- step 4, without the filling: GPU time by block (attention, MLP, ...) and phase, between events on
  the stream, and by kind of kernel, from the profiler.

What a GPU lacks (Transformer Engine, Apex) is left out of the flags. Written without a GPU at hand:
not run.
"""

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict

MEMORY_STEP, TIME_STEP = 3, 4

#: Flags for a machine without a package, by its name.
_WITHOUT = {
    "transformer_engine": ["--transformer-impl", "local", "--no-rope-fusion"],
    "fused_weight_gradient_mlp_cuda": ["--no-gradient-accumulation-fusion"],  # Apex's
    "apex": ["--no-masked-softmax-fusion", "--no-persist-layer-norm"],
}


def main() -> None:
    """Compare each arm; print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--arms", default="tp_sp,tsp")
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # the child's request, then result
    args = parser.parse_args()
    if args.measure:
        with open(args.measure, encoding="utf-8") as file:
            result = measure(json.load(file))
        with open(args.measure, "w", encoding="utf-8") as file:
            json.dump(result, file)
        return
    rows = [compare(args, arm) for arm in args.arms.split(",")]
    for row in rows:
        print(json.dumps(row))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def compare(args, arm: str) -> dict:
    """{arm, bytes traced, allocated and reserved, ratio, seconds by block and by kernel}."""
    from megatron_tsp.ab import config as ab_config
    from megatron_tsp.trace import trace
    from megatron_tsp.trace.tracing import prepare, settings

    flags = settings(args.set)
    traced = trace(args.config, arm, 0, args.world_size, flags)
    made, _ = prepare(ab_config.read(args.config), arm, flags)
    request = {"argv": made.words(), "world": traced.world, "environment": made.env}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "request.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(request, file)
        again = [sys.executable, "-m", "benchmarks.gpu.trace_check", args.config]
        subprocess.run([*again, "--measure", path], check=True)
        with open(path, encoding="utf-8") as file:
            measured = json.load(file)
    return {
        "arm": arm,
        "traced_bytes": traced.peak_bytes,
        "allocated_bytes": measured["allocated"],
        "ratio": measured["allocated"] / traced.peak_bytes,
        "reserved_bytes": measured["reserved"],
        "seconds_by_block": measured["blocks"],
        "seconds_by_kernel": measured["kernels"],
    }


class _Done(Exception):
    """The last step is over."""


def measure(request: dict) -> dict:
    """Peak memory and GPU times of two steps, in this process."""
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
    filling = _fill_what_arrives()
    dist.all_gather_object = lambda objects, own, group=None: objects.__setitem__(
        slice(None), [own] * len(objects)
    )

    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron_tsp.training.main import run

    result: dict = {}
    steps = 0
    clock = _clock()
    train_step, build = training.train_step, training.setup_model_and_optimizer

    def built(*args, **kwargs):
        chunks, optimizer, scheduler = build(*args, **kwargs)
        for chunk in chunks:
            clock.follow(unwrap_model(chunk))
        optimizer.step = clock.during("optimizer", "optimizer", optimizer.step)
        return chunks, optimizer, scheduler

    def step(*args, **kwargs):
        nonlocal steps
        steps += 1
        torch.cuda.synchronize()
        if steps == MEMORY_STEP:
            torch.cuda.reset_peak_memory_stats()
            answer = train_step(*args, **kwargs)
            torch.cuda.synchronize()
            result["allocated"] = torch.cuda.max_memory_allocated()
            result["reserved"] = torch.cuda.max_memory_reserved()
            return answer
        if steps < TIME_STEP:
            return train_step(*args, **kwargs)
        filling["on"] = False
        clock.start()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            train_step(*args, **kwargs)
            torch.cuda.synchronize()
        result["blocks"], result["kernels"] = clock.seconds(), _kernels(profile)
        raise _Done

    training.train_step, training.setup_model_and_optimizer = step, built
    argv = [*request["argv"], "--disable-gloo-process-groups", "--mock-data"]
    argv += ["--no-check-for-nan-in-loss-and-grad", "--train-iters", str(TIME_STEP + 1)]
    for package, flags in _WITHOUT.items():
        if importlib.util.find_spec(package) is None:
            argv += flags
    try:
        run(argv)
    except _Done:
        pass
    return result


def _fill_what_arrives() -> dict:
    """Small numbers where a real group would have written, while the result's "on" is true."""
    import torch.distributed as dist

    from megatron_tsp import traffic

    filling = {"on": True}

    def filled(name: str):
        original = getattr(dist.ProcessGroup, name)

        def call(group, *args, **kwargs):
            work = original(group, *args, **kwargs)
            # What a root broadcasts is its own.
            own = name == "broadcast" and traffic._root(args, kwargs, 1) == group.rank()
            if filling["on"] and not own:
                _fill(args[0] if args else next(iter(kwargs.values())))
            return work

        setattr(dist.ProcessGroup, name, call)

    gets = ("recv", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    for name, hook in traffic.HOOKS.items():
        if (hook.collective in gets) and hasattr(dist.ProcessGroup, name):
            filled(name)  # the first argument is what it writes
    return filling


def _fill(tensors) -> None:
    import torch

    if isinstance(tensors, (list, tuple)):
        for tensor in tensors:
            _fill(tensor)
        return
    with torch.no_grad():
        tensors.fill_(1e-3 if tensors.is_floating_point() else 0)


def _clock():
    """A `Where` that writes an event to the stream wherever what is running changes."""
    import torch

    from megatron_tsp.trace.where import Where

    class Clock(Where):
        events = None

        def start(self) -> None:
            self.events = []
            self.set(self.label, self.phase)

        def set(self, label, phase):
            super().set(label, phase)
            if self.events is not None:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self.events.append((f"{self.kind}, {phase}".removesuffix(", "), event))

        def seconds(self) -> dict[str, float]:
            self.set("", "")
            torch.cuda.synchronize()
            sums: dict[str, float] = defaultdict(float)
            for (name, begin), (_, end) in itertools.pairwise(self.events):
                sums[name] += begin.elapsed_time(end) / 1e3
            return dict(sums)

    return Clock()


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
