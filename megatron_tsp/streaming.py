"""Weight shards on the move: the walk over the D shards of a tuple of weights.

Each rank of a group owns one shard of every weight. A *walk* shows every rank all D shards, one
after the other, while the tokens stay where they are:

    for owner, (w1, w2) in stream.forward((shard1, shard2)):
        ...                                        # apply the owner's shards to the local tokens

    grads = Gradients((shard1, shard2))
    for owner, (w1, w2) in stream.backward((shard1, shard2), grads):
        grads.add_product(0, dy, x)                # this rank's part of the owner's dW
    dw1, dw2 = grads.result                        # summed over the group, for the own shard

Three schedules do it, with the same results: `Ring` (neighbour to neighbour), `Broadcast` (from
each owner), `Gather` (all at once). In each the next shard is in flight while the current one is
used. Per rank a forward walk sends (D-1)/D of the weights, a backward walk the same for the weights
and once more, in the gradients' dtype, for dW.

Walks over one stream do not nest and are never left half-way, so all share two slots of memory.
A group is a torch.distributed process group, or None for one rank alone.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Shards = Sequence[Tensor]


class Gradients:
    """dW of the shards in hand, summed over tokens and, by the walk, over ranks.

    Args:
        shards: the own shards; the results have their shapes.
        needed: which of them need a gradient (all by default); for the others nothing is computed
            or sent. The same on every rank.
        dtype: of the sum. By default fp32 for shards of lower precision, so that the error does
            not grow with D; otherwise the shards' own.
    """

    def __init__(
        self,
        shards: Shards,
        needed: Sequence[bool] | None = None,
        dtype: torch.dtype | None = None,
    ):
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
            self.add(index, dy.t() @ x)
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
        """Take `targets` as the result."""
        at = iter(targets)
        self.result = [next(at) if needed else None for needed in self.needed]


class Slots:
    """Two buffers that all walks share, grown to the largest shards seen and then kept."""

    _ALIGNMENT = 256  # bytes; what allocators give, and kernels like

    def __init__(self):
        self._memory: list[Tensor | None] = [None, None]

    def views(self, slot: int, shapes: Sequence[torch.Size], likes: Shards) -> list[Tensor]:
        """Tensors of these shapes, with the dtypes and device of `likes`, in slot 0 or 1."""
        offsets, total = [], 0
        for shape, like in zip(shapes, likes, strict=True):
            offsets.append(total)
            size = shape.numel() * like.element_size()
            total += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        memory = self._memory[slot]
        if likes and (memory is None or memory.numel() < total or memory.device != likes[0].device):
            memory = torch.empty(total, dtype=torch.uint8, device=likes[0].device)
            self._memory[slot] = memory
        return [
            memory[at : at + shape.numel() * like.element_size()].view(like.dtype).view(shape)
            for at, shape, like in zip(offsets, shapes, likes, strict=True)
        ]


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for each of `works`."""
    for work in works:
        work.wait()


class Stream:
    """What the schedules share: the group, the rank's place in it, and the slots."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self._weight_slots = Slots()
        self._grad_slots = Slots()

    def forward(self, shards: Shards) -> Iterator[tuple[int, Shards]]:
        """Yield (owner, the owner's shards) for all D owners; valid until the next step."""
        raise NotImplementedError

    def backward(self, shards: Shards, grads: Gradients) -> Iterator[tuple[int, Shards]]:
        """The same, once more; what is added to `grads` in a step goes to the step's owner."""
        raise NotImplementedError

    def _weights_in(self, slot: int, shards: Shards) -> list[Tensor]:
        return self._weight_slots.views(slot, [s.shape for s in shards], shards)

    def _grads_in(self, slot: int, grads: Gradients) -> list[Tensor]:
        kept = [i for i, needed in enumerate(grads.needed) if needed]
        shapes = [grads.shapes[i] for i in kept]
        return self._grad_slots.views(slot, shapes, [grads.templates[i] for i in kept])


class Ring(Stream):
    """Neighbour to neighbour: each shard visits rank owner, owner+1, ...; so does its dW.

    Backward, a shard starts at its owner's neighbour and ends at the owner, and the sum of its dW
    follows one step behind: it is complete when it is home, after D-1 hops and not D.
    """

    def forward(self, shards):
        held = shards
        for step in range(self.size):
            last = step == self.size - 1
            if not last:
                arriving = self._weights_in(step % 2, shards)
                works = self._hop(held, arriving)
            yield (self.rank - step) % self.size, held
            if not last:
                wait_all(works)
                held = arriving

    def backward(self, shards, grads):
        if self.size > 1:
            arriving = self._weights_in(0, shards)
            works = self._hop(shards, arriving)
        carried, carrying = None, []
        for step in range(self.size):
            last = step == self.size - 1
            if last:
                held = shards
            else:
                wait_all(works)
                held = arriving
                if step < self.size - 2:
                    arriving = self._weights_in((step + 1) % 2, shards)
                    works = self._hop(held, arriving)
            if step == 0:
                carried = grads.empty() if last else self._grads_in(0, grads)
            grads.begin(carried, partial=step > 0, pending=carrying)
            yield (self.rank - 1 - step) % self.size, held
            complete = grads.end()
            if last:
                grads.finish(complete)
            else:
                home_next = step == self.size - 2
                carried = grads.empty() if home_next else self._grads_in((step + 1) % 2, grads)
                carrying = self._hop(complete, carried)

    def _hop(self, send: Shards, receive: Shards) -> list[dist.Work]:
        """Send to the next rank and receive from the previous one, as one group of operations."""
        if not send:
            return []
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        previous = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        ops = [dist.P2POp(dist.isend, t.contiguous(), following, self.group) for t in send]
        ops += [dist.P2POp(dist.irecv, t, previous, self.group) for t in receive]
        return dist.batch_isend_irecv(ops)


class Broadcast(Stream):
    """From each owner in turn to all; dW is reduced to the owner."""

    def forward(self, shards):
        yield from self._walk(shards)

    def backward(self, shards, grads):
        reducing: list[list[dist.Work]] = [[], []]
        home = grads.empty()
        for owner, held in self._walk(shards):
            slot = owner % 2
            wait_all(reducing[slot])  # the slot's last dW has left
            mine = owner == self.rank
            grads.begin(home if mine else self._grads_in(slot, grads), partial=False)
            yield owner, held
            reducing[slot] = [self._reduce(t, owner) for t in grads.end()] if self.size > 1 else []
        wait_all(reducing[0] + reducing[1])
        grads.finish(home)

    def _walk(self, shards):
        held, works = self._send(0, shards)
        for owner in range(self.size):
            wait_all(works)
            current = held
            if owner + 1 < self.size:
                held, works = self._send(owner + 1, shards)
            yield owner, current

    def _send(self, owner: int, shards: Shards) -> tuple[Shards, list[dist.Work]]:
        if self.size == 1:
            return shards, []
        mine = owner == self.rank
        tensors = [s.contiguous() for s in shards] if mine else self._weights_in(owner % 2, shards)
        source = dist.get_global_rank(self.group, owner)
        return tensors, [
            dist.broadcast(t, source, group=self.group, async_op=True) for t in tensors
        ]

    def _reduce(self, tensor: Tensor, owner: int) -> dist.Work:
        target = dist.get_global_rank(self.group, owner)
        return dist.reduce(tensor, target, group=self.group, async_op=True)


class Gather(Stream):
    """All shards at once, as ZeRO-3: one all-gather, one reduce-scatter, D shards of memory."""

    def forward(self, shards):
        gathered = self._all(shards)
        for step in range(self.size):
            owner = (self.rank + step) % self.size
            yield owner, [whole[owner] for whole in gathered]

    def backward(self, shards, grads):
        gathered = self._all(shards)
        home = grads.empty()
        whole_grads = [t.new_empty(self.size, *t.shape) for t in home]
        for step in range(self.size):
            owner = (self.rank + step) % self.size
            grads.begin([whole[owner] for whole in whole_grads], partial=False)
            yield owner, [whole[owner] for whole in gathered]
            grads.end()
        for whole, own in zip(whole_grads, home, strict=True):
            if self.size == 1:
                own.copy_(whole[0])
            else:
                dist.reduce_scatter_tensor(own, whole.flatten(0, 1), group=self.group)
        grads.finish(home)

    def _all(self, shards: Shards) -> list[Tensor]:
        """[D, *shard.shape] of each weight."""
        if self.size == 1:
            return [shard[None] for shard in shards]
        whole = [shard.new_empty(self.size, *shard.shape) for shard in shards]
        works = [
            # gloo wants the concatenated shape
            dist.all_gather_into_tensor(w.flatten(0, 1), s.contiguous(), self.group, async_op=True)
            for w, s in zip(whole, shards, strict=True)
        ]
        wait_all(works)
        return whole


SCHEDULES = {"ring": Ring, "broadcast": Broadcast, "gather": Gather}

_streams: dict[tuple[str, dist.ProcessGroup | None], Stream] = {}


def stream(schedule: str, group: dist.ProcessGroup | None) -> Stream:
    """The stream of a schedule over a group; one object for each pair, with its buffers.

    Raises:
        KeyError: `schedule` is not one of `SCHEDULES`.
    """
    key = (schedule, group)
    if key not in _streams:
        _streams[key] = SCHEDULES[schedule](group)
    return _streams[key]


def forget(groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """Drop the streams of `groups`, when these are destroyed, and their buffers."""
    for key in [key for key in _streams if key[1] in groups]:
        del _streams[key]
