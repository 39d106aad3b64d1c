"""`--tsp-log-traffic`: the bytes that rank 0 sends in a training step, in the log."""

import functools

import torch.distributed as dist

from megatron_tsp import traffic


def install(interval: int) -> None:
    """Log the traffic of every `interval`-th step of this process; before Megatron's `pretrain`."""
    from megatron.training import training

    counter, steps = traffic.install(), 0
    train_step = training.train_step

    @functools.wraps(train_step)
    def logged(*args, **kwargs):
        nonlocal steps
        counter.reset()
        result = train_step(*args, **kwargs)
        steps += 1
        if steps % interval == 0 and dist.get_rank() == 0:
            print(report(counter.snapshot(), steps), flush=True)
        return result

    training.train_step = logged


def report(sent: dict, step: int) -> str:
    """The counter's snapshot {(collective, group, block): bytes} as lines of a log."""
    lines = [f" TSP traffic of step {step}, bytes sent by rank 0: {sum(sent.values()):,}"]
    for collective, group, block in sorted(sent, key=lambda key: (key[2], key[1], key[0])):
        size = sent[collective, group, block]
        lines.append(f"   {block:<10} {group:<12} {collective:<15} {size:>16,}")
    return "\n".join(lines)
