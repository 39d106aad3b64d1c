"""TSP against TP+SP, turn by turn within one job: ``python -m benchmarks.steps``.

All arms are built in the same four processes, from the same weights, and take turns step by step
(forward, backward, gradient reduction, optimizer, on the same batch), so that whatever else the
machine does meets them alike. `benchmarks.cpu` runs whole training jobs, with memory and bytes; on
a machine that is not one's own this is the better measure of time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import rank, sidebyside

RESULT = "BENCHMARK_STEPS_RESULT"


def launch(args: argparse.Namespace) -> None:
    """Run each shape as a torchrun job of this module; print the table."""
    folder = Path(args.out or "ab-out/benchmark-steps")
    folder.mkdir(parents=True, exist_ok=True)
    heads = ["shape", "arm", "s/step", "tokens/s", "ratio to the first (quartiles)"]
    heads += ["processor s/step, all ranks", "loss differs by"]
    print("| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n")
    for shape in args.shape:
        arms = sidebyside.prepare(args, shape)
        result = folder / f"{shape}.json"
        words = ["--nproc-per-node", str(arms[0].ranks), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "localhost:0", "-m", "benchmarks.steps"]
        words += ["--shape", shape, "--arms", *args.arms, "--rounds", str(args.rounds)]
        words += ["--reduce-scatter", args.reduce_scatter, "--config", args.config]
        with open(folder / f"{shape}.log", "w") as log:
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", *words],
                env={**os.environ, **arms[0].env, RESULT: str(result)},
                stdout=log, stderr=subprocess.STDOUT, check=True,
            )  # fmt: skip
        batch, length = (int(number) for number in shape.split("x"))
        for name, arm in json.loads(result.read_text()).items():
            seconds = statistics.median(arm["seconds"])
            low, middle, high = statistics.quantiles(arm["ratios"], n=4)
            print(
                f"| {shape} | {name} | {seconds:.3f} | {batch * length / seconds:.0f} "
                f"| {middle:.3f} ({low:.3f} to {high:.3f}) "
                f"| {statistics.median(arm['processor_seconds']):.2f} "
                f"| {arm['loss_difference']:.1e} |"
            )


def work(args: argparse.Namespace) -> None:
    """One rank: build all arms, take turns, write what rank 0 measured."""
    from megatron_tsp import cpu

    cpu.engage()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    from megatron_tsp import parallel_state, wheel

    wheel.fill_gaps()
    if args.reduce_scatter == "ring":
        rank.install()
    (shape,) = args.shape
    arms = sidebyside.prepare(args, shape)
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(dist.get_world_size())
    parallel_state.initialize_model_parallel(dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    steps = {arm.name: build(arm) for arm in arms}
    batch, length = (int(number) for number in shape.split("x"))
    seconds, processor, losses = ({name: [] for name in steps} for _ in range(3))
    for turn in range(args.rounds + 2):
        generator = torch.Generator().manual_seed(turn)
        ids = torch.randint(0, 512, (batch, length + 1), generator=generator)
        for name, step in steps.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name].append(step(ids))
            used = torch.tensor(time.process_time() - used)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            dist.all_reduce(used)
            processor[name].append(float(used))
    if dist.get_rank() == 0:
        base, timed = next(iter(steps)), slice(2, None)  # two turns of warm-up
        results = {}
        for name in steps:
            pairs = zip(seconds[base][timed], seconds[name][timed], strict=True)
            apart = zip(losses[base], losses[name], strict=True)
            results[name] = {
                "seconds": seconds[name][timed],
                "processor_seconds": processor[name][timed],
                "ratios": [a / b for a, b in pairs],
                "loss_difference": max(abs(a - b) for a, b in apart),
            }
        Path(os.environ[RESULT]).write_text(json.dumps(results, indent=1))
    os._exit(0)  # gloo's threads need no goodbye


def build(arm):
    """A function that trains the arm's model by one step on ids [b, s + 1]; returns the loss."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_args, validate_args

    from megatron_tsp import arguments, cpu
    from megatron_tsp.models.gpt import model_config_from_args

    def add_flags(parser):
        parser = arguments.add_arguments(parser)
        parser.set_defaults(**cpu.default_flags())
        return parser

    torch.manual_seed(1)
    sys.argv = ["steps", *arm.words()]
    args = parse_args(add_flags)
    arguments.translate(args, sys.argv[1:], {})
    validate_args(args, {})
    args.padded_vocab_size = 512
    config = model_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config.transformer, ddp, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), [model])

    def step(ids) -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, labels = ids[:, :-1], ids[:, 1:]
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        loss = model(tokens, positions, None, labels=labels).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    options = sidebyside.parser(__doc__, rounds=9).parse_args()
    if RESULT in os.environ:
        work(options)
    sys.exit(sidebyside.main(launch, options))
