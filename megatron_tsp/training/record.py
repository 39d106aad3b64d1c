"""Write down every training step of this rank: ``rank<k>.jsonl``, one JSON object a line.

====================  =========================================================================
iteration             Megatron's iteration number, from 1
loss                  the step's loss at full precision, as Megatron logs it; on the last
                      pipeline stage only, else null. All losses by name are in `losses`
grad_norm             before clipping
step_time_s           wall time of the whole step: data, forward, backward, optimizer
timed                 false where the step is not fit for timing: memory was being measured
peak_memory_bytes     highest memory in tensors during the step (null where not measured): CUDA's
                      own statistics, or on CPU `LiveBytes`, in two early steps only
bytes_sent            {collective: bytes this rank sent in the step}, counted (see `traffic`)
bytes_by_block        the same bytes by kind of block
bytes_by_group        the same bytes by process group
tokens                of the global batch
====================  =========================================================================

There is one hook: ``train_step`` of Megatron's training loop. What the loop does between steps
(logging, evaluation, checkpoints) is in none of these numbers.
"""

import contextlib
import functools
import json
import os
import time
from collections import defaultdict
from pathlib import Path

import torch

from megatron_tsp import traffic
from megatron_tsp.trace.memory import LiveBytes

#: Steps (from 1, since the start of this process) in which CPU memory is measured. By then the
#: optimizer has its state.
MEMORY_STEPS = (3, 4)


def install(directory: str | os.PathLike) -> None:
    """Record every training step of this process to `directory`, made if missing.

    Call it before Megatron's ``pretrain``. An older record of the same rank is replaced.
    """
    from megatron.training import training

    Path(directory).mkdir(parents=True, exist_ok=True)
    recorder = _Recorder(Path(directory), traffic.install())
    training.train_step = recorder.wrap(training.train_step)


class _Recorder:
    def __init__(self, directory: Path, counter: traffic.Counter):
        self.directory = directory
        self.counter = counter
        self.steps = 0
        self.file = None

    def wrap(self, train_step):
        """Megatron's ``train_step``, recorded. Arguments and result pass through untouched."""

        @functools.wraps(train_step)
        def recorded(*args, **kwargs):
            self.steps += 1
            with _memory(self.steps) as memory:
                self.counter.reset()
                _wait_for_device()
                start = time.perf_counter()
                result = train_step(*args, **kwargs)
                _wait_for_device()
                elapsed = time.perf_counter() - start
            self.write(_iteration(kwargs), result, elapsed, memory)
            return result

        return recorded

    def write(self, iteration, result, elapsed, memory) -> None:
        losses = {name: float(value) for name, value in result[0].items()}
        grad_norm = result[5]
        line = {
            "iteration": iteration,
            "loss": losses.get("lm loss", next(iter(losses.values()), None)),
            "losses": losses,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "step_time_s": elapsed,
            "timed": memory.timed,
            "peak_memory_bytes": memory.peak,
            **self.bytes(),
            "tokens": _tokens(),
        }
        if self.file is None:
            name = f"rank{torch.distributed.get_rank()}.jsonl"
            self.file = open(self.directory / name, "w", encoding="utf-8")
        print(json.dumps(line), file=self.file, flush=True)

    def bytes(self) -> dict:
        """This step's bytes, three times: by collective, by block, by group."""
        names = ("bytes_sent", "bytes_by_group", "bytes_by_block")
        sums = {name: defaultdict(int) for name in names}
        for key, size in self.counter.snapshot(exact=True).items():
            for name, part in zip(names, key, strict=True):
                sums[name][part] += size
        return {
            name: {part: round(size) for part, size in sorted(parts.items())}
            for name, parts in sums.items()
        }


class _Memory:
    """What `_memory` yields: filled when the step is over."""

    peak: int | None = None
    timed: bool = True


@contextlib.contextmanager
def _memory(step: int):
    """Measure the peak memory of one step, if it is to be measured."""
    memory = _Memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield memory
        memory.peak = torch.cuda.max_memory_allocated()
    elif step in MEMORY_STEPS:
        memory.timed = False
        with LiveBytes() as live:
            yield memory
        memory.peak = live.peak
    else:
        yield memory


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _iteration(kwargs: dict) -> int:
    """The number under which Megatron logs this step: it counts from 1, ``train_step`` from 0."""
    from megatron.training import get_args

    iteration = kwargs.get("iteration")
    return (get_args().curr_iteration if iteration is None else iteration) + 1


def _tokens() -> int:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args

    return get_current_global_batch_size() * get_args().seq_length
