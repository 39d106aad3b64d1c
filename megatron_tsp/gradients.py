"""dW of the shards in hand, while it is summed over tokens and over ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Shards = Sequence[Tensor]
Accumulate = Callable[[Tensor, Tensor, Tensor], None]


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for each of `works`."""
    for work in works:
        work.wait()


class Gradients:
    """dW of the shards in hand, summed over tokens and, by the walk, over ranks.

    Args:
        shards: the own shards; the results have their shapes.
        needed: which of them need a gradient (all by default); for the others nothing is computed
            or sent. The same on every rank.
        dtype: of the sum, on the wire too. By default fp32 for shards of lower precision, so that
            the error does not grow with D; otherwise the shards' own.
        accumulate: a kernel for target += dyᵀ·x, called as accumulate(x, dy, target) where target
            is wider than x; without one the product is rounded to x's dtype before it is added.
    """

    def __init__(
        self,
        shards: Shards,
        needed: Sequence[bool] | None = None,
        dtype: torch.dtype | None = None,
        accumulate: Accumulate | None = None,
    ):
        self.accumulate = accumulate
        self.needed = list(needed) if needed is not None else [True] * len(shards)
        self.templates = [
            shard.new_empty(0, dtype=dtype or torch.promote_types(shard.dtype, torch.float32))
            for shard in shards
        ]
        self.shapes = [shard.shape for shard in shards]
        self.result: list[Tensor | None] = [None] * len(shards)
        self._pending: list[dist.Work] = []

    def empty(self) -> list[Tensor]:
        """New tensors for the needed gradients."""
        kept = zip(self.templates, self.shapes, self.needed, strict=True)
        return [t.new_empty(shape) for t, shape, needed in kept if needed]

    def begin(self, targets: list[Tensor], partial: bool, pending: Sequence[dist.Work] = ()):
        """Sum into `targets` from now on; `partial`: they hold a sum once `pending` is done."""
        at = iter(targets)
        self._targets = [next(at) if needed else None for needed in self.needed]
        self._holds_sum = [partial] * len(self.needed)
        self._pending = list(pending)

    def add_product(self, index: int, dy: Tensor, x: Tensor) -> None:
        """dW[index] += dyᵀ·x, for dy [N, out] and x [N, in]; nothing where not needed."""
        if not self.needed[index]:
            return
        self.wait()
        target = self._targets[index]
        if target.dtype != x.dtype:
            if self.accumulate is None:
                self.add(index, dy.t() @ x)
            else:
                if not self._holds_sum[index]:
                    target.zero_()
                    self._holds_sum[index] = True
                self.accumulate(x, dy, target)
        elif self._holds_sum[index]:
            target.addmm_(dy.t(), x)
        else:
            torch.mm(dy.t(), x, out=target)
            self._holds_sum[index] = True

    def add(self, index: int, value: Tensor) -> None:
        """dW[index] += value; nothing where not needed."""
        if not self.needed[index]:
            return
        self.wait()
        if self._holds_sum[index]:
            self._targets[index].add_(value)
        else:
            self._targets[index].copy_(value)
            self._holds_sum[index] = True

    def wait(self) -> None:
        """Wait for the partial sum that is still on its way."""
        for work in self._pending:
            work.wait()
        self._pending = []

    def end(self) -> list[Tensor]:
        """The targets, complete for this rank; zero where nothing was added."""
        self.wait()
        for target, holds_sum in zip(self._targets, self._holds_sum, strict=True):
            if target is not None and not holds_sum:
                target.zero_()
        return [target for target in self._targets if target is not None]

    def finish(self, targets: list[Tensor]) -> None:
        """Take `targets` as the result; the walk's other slots are let go."""
        self._targets = []
        at = iter(targets)
        self.result = [next(at) if needed else None for needed in self.needed]
