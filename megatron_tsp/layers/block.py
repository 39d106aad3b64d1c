"""One block's weights on the move: which stream they take, and what is fetched after them.

Every module whose weights stream has one. It says what starts to travel while its own last shard is
used: the next block's weights, in the order of the forward, of a recompute, or of the backward.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_tsp.gradients import Gradients
from megatron_tsp.streaming import Shards, Stream
from megatron_tsp.traffic import block as label


class Successor(NamedTuple):
    """The walk that follows: whose weights, in which direction."""

    block: "Block"
    backward: bool


class Block:
    """A walk over one block's shards, forward and backward.

    Args:
        stream: how they travel.
        kind: what their traffic is counted under: "attention", "mlp", "loss".
        wide_grads: sum dW of low-precision weights in fp32, on the wire too.
        fused: use Apex's kernel for that sum (--gradient-accumulation-fusion).
        fetch: returns this rank's shards, through the module's call.

    Attributes:
        after_forward, after_recompute, after_backward: the walk that follows each of this block's,
            whose first transfer is started before this one's last shard is used; None if that is
            not known.
    """

    def __init__(
        self,
        stream: Stream,
        kind: str,
        fetch: Callable[[], Sequence[Tensor]],
        wide_grads: bool = True,
        fused: bool = False,
    ):
        self.stream = stream
        self.kind = kind
        self.fetch = fetch
        self.wide_grads = wide_grads
        self.accumulate = _apex_accumulate() if fused else None
        self.after_forward: Successor | None = None
        self.after_recompute: Successor | None = None
        self.after_backward: Successor | None = None

    def forward(self, shards: Shards, training: bool) -> Iterator[tuple[int, Shards]]:
        """Walk forward; `training`: a backward will follow."""
        recompute = torch._C._current_graph_task_id() != -1  # inside a backward
        successor = self.after_recompute if recompute else self.after_forward
        if successor is not None and successor.backward and not training:
            successor = None
        with label(self.kind):
            yield from self.stream.forward(shards, lambda: self._prefetch(successor))

    def gradients(self, shards: Shards, needed: Sequence[bool]) -> Gradients:
        """Where the backward sums dW of `shards`."""
        dtype = None if self.wide_grads else shards[0].dtype
        return Gradients(shards, needed, dtype, self.accumulate)

    def backward(self, shards: Shards, grads: Gradients) -> Iterator[tuple[int, Shards]]:
        """Walk backward."""
        with label(self.kind):
            then = self.after_backward
            yield from self.stream.backward(shards, grads, lambda: self._prefetch(then))

    @staticmethod
    def _prefetch(successor: Successor | None) -> None:
        if successor is not None:
            with label(successor.block.kind), torch.no_grad():
                block = successor.block
                block.stream.prefetch(block.fetch(), successor.backward)


def deliver(shards: Shards, grads: Gradients) -> list[Tensor | None]:
    """The gradients that autograd is to be given; what can goes into Megatron's main_grad.

    A weight with a `main_grad` gets the sum there, in full precision, and autograd a placeholder
    that Megatron's hook drops, as after Megatron's own fused weight gradients: the sum's memory,
    whatever it holds. A weight used twice (tied embeddings, `zero_out_wgrad`) takes the ordinary
    way.
    """
    return [_delivered(*pair) for pair in zip(shards, grads.result, strict=True)]


def _delivered(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    main_grad = getattr(weight, "main_grad", None)
    if grad is None or main_grad is None or getattr(weight, "zero_out_wgrad", False):
        return grad
    main_grad.add_(grad)
    weight.grad_added_to_main_grad = True
    return grad.view(-1).view(weight.dtype)[: weight.numel()].view_as(weight)


def _apex_accumulate() -> Callable[[Tensor, Tensor, Tensor], None]:
    """fp32 += lowᵀ·low in one kernel; (x, dy, target)."""
    return importlib.import_module("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32
