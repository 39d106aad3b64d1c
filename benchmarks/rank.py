"""One rank of a benchmark: megatron_tsp.pretrain_gpt with a reduce-scatter that sends what it must.

torch's gloo does a reduce-scatter as an all-reduce of the whole buffer: 2 S (D-1)/D bytes where NCCL
sends S (D-1)/D, and twice its time where links bind. That would make TP+SP, which lives on
reduce-scatters, look worse than it is. Here, for all arms, each rank sends every other one its
part, and sums what it gets.
"""

from collections import defaultdict

import numpy
import torch
from torch.distributed import AllToAllOptions, ProcessGroup, ReduceOp

# Taken before `megatron_tsp.traffic` counts: it counts one reduce-scatter, not what that is made of.
_all_to_all = ProcessGroup.alltoall_base
#: Receive buffers not in use, by size in bytes. NumPy's memory, because the record of peak memory
#: leaves that out, as it leaves out the communication library's own buffers.
_free: dict[int, list[torch.Tensor]] = defaultdict(list)


class _Sum:
    """The pending result, as far as callers use torch's Work."""

    def __init__(self, work, parts: torch.Tensor, output: torch.Tensor):
        self.work, self.parts, self.output = work, parts, output

    def wait(self, timeout=None) -> bool:
        """Wait for the parts; sum them into the output, once."""
        if self.work is not None:
            self.work.wait()
            parts = self.parts.view(self.output.dtype).view(-1, *self.output.shape)
            torch.sum(parts, 0, out=self.output)
            _free[self.parts.numel()].append(self.parts)
            self.work = self.parts = None
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has nothing to wait for."""
        return self.work is None or self.work.is_completed()


def reduce_scatter(group: ProcessGroup, output, whole, options) -> _Sum:
    """Stands in for ``ProcessGroup.reduce_scatter_single``: sums of contiguous tensors."""
    if options.reduceOp != ReduceOp.SUM:
        raise NotImplementedError(f"reduce-scatter by {options.reduceOp}")
    size = whole.numel() * whole.element_size()
    free = _free[size]
    parts = free.pop() if free else torch.from_numpy(numpy.empty(size, numpy.uint8))
    received = parts.view(whole.dtype).view(whole.shape)
    work = _all_to_all(group, received, whole.detach(), [], [], AllToAllOptions())
    return _Sum(work, parts, output.detach())


def install() -> None:
    """Replace torch's method, under each of the names that its versions give it."""
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, reduce_scatter)


if __name__ == "__main__":
    from megatron_tsp.pretrain_gpt import main

    install()
    main()
