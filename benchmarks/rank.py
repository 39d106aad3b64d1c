"""One rank of a benchmark: megatron_tsp.pretrain_gpt with a reduce-scatter that sends what it must.

torch's gloo does a reduce-scatter as an all-reduce of the whole buffer: 2 S (D-1)/D bytes where
NCCL sends S (D-1)/D, and twice its time where links bind. That would make TP+SP, which lives on
reduce-scatters, look worse than it is. Here, for all arms, it is the ring that NCCL uses: D-1
hops from neighbour to neighbour, each rank adding its own part to what passes.
"""

from collections import defaultdict

import numpy
import torch
from torch.distributed import ProcessGroup, ReduceOp

# Taken before `megatron_tsp.traffic` counts: it counts a reduce-scatter, not what that is made of.
_send, _recv = ProcessGroup.send, ProcessGroup.recv
_TAG = 71  # no one else's
#: Receive buffers not in use, by size in bytes. NumPy's memory, because the record of peak memory
#: leaves that out, as it leaves out the communication library's own buffers.
_free: dict[int, list[torch.Tensor]] = defaultdict(list)


class RingReduceScatter:
    """The pending result, as far as callers use torch's Work: `wait` makes the later hops."""

    def __init__(self, group: ProcessGroup, output: torch.Tensor, whole: torch.Tensor):
        self.group, self.output, self.done = group, output, False
        self.rank, self.size = group.rank(), group.size()
        self.parts = whole.reshape(self.size, -1)
        if self.size > 1:
            self.works, self.arriving = self._hop(self._part(1))

    def _part(self, before: int) -> torch.Tensor:
        """This rank's share of what is for the rank `before` places before it."""
        return self.parts[(self.rank - before) % self.size]

    def _hop(self, leaving: torch.Tensor):
        bytes_ = leaving.numel() * leaving.element_size()
        free = _free[bytes_]
        arriving = free.pop() if free else torch.from_numpy(numpy.empty(bytes_, numpy.uint8))
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = [
            _send(self.group, [leaving], to, _TAG),
            _recv(self.group, [arriving.view(leaving.dtype)], source, _TAG),
        ]
        return works, arriving

    def wait(self, timeout=None) -> bool:
        """Wait for the first hop, make the others, and fill the output."""
        if self.done:
            return True
        output = self.output.view(-1)
        if self.size == 1:
            output.copy_(self.parts[0])
        leaving = None
        for before in range(2, self.size + 1):
            for work in self.works:
                work.wait()
            if leaving is not None:
                _free[leaving.numel()].append(leaving)
            sum_ = self.arriving.view(self.parts.dtype)
            if before == self.size:
                torch.add(sum_, self._part(0), out=output)
                _free[self.arriving.numel()].append(self.arriving)
            else:
                sum_ += self._part(before)
                leaving = self.arriving
                self.works, self.arriving = self._hop(sum_)
        self.parts, self.done = None, True
        return True

    def is_completed(self) -> bool:
        """Whether the output is there."""
        return self.done


def reduce_scatter(group: ProcessGroup, output, whole, options) -> RingReduceScatter:
    """Stands in for ``ProcessGroup.reduce_scatter_single``: sums of contiguous tensors."""
    if options.reduceOp != ReduceOp.SUM:
        raise NotImplementedError(f"reduce-scatter by {options.reduceOp}")
    return RingReduceScatter(group, output.detach(), whole.detach())


def install() -> None:
    """Replace torch's method, under each of the names that its versions give it."""
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, reduce_scatter)


if __name__ == "__main__":
    from megatron_tsp.pretrain_gpt import main

    install()
    main()
