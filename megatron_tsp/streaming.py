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

A walk can be begun before its time: `prefetch` starts its first transfer while another walk, over
this stream or another, still computes with its last shard. What arrives lands in one of two slots
in turn. They are the walk's own, and go with it: between walks a stream holds nothing but what was
fetched early. Walks over one stream do not nest.

All transfers are asynchronous operations of torch.distributed. On CUDA these run on the
communicator's own stream, after what the current stream has been given, and `wait` makes the
current stream wait for them; a slot is written again, or given back, only after its last reader was
issued and its last transfer waited for.

A group is a torch.distributed process group, or None for one rank alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp.errors import TSPError
from megatron_tsp.gradients import Gradients, wait_all

Shards = Sequence[Tensor]


class Slots:
    """Two buffers, used in turn; made when first needed."""

    _ALIGNMENT = 256  # bytes; what allocators give, and kernels like

    def __init__(self):
        self._memory: list[Tensor | None] = [None, None]
        self._turn = 0

    def like(self, shards: Shards) -> list[Tensor]:
        """Tensors like `shards` in the next slot."""
        return self.take([shard.shape for shard in shards], shards)

    def for_sums(self, grads: Gradients) -> list[Tensor]:
        """Tensors for the needed ones of `grads` in the next slot."""
        kept = [i for i, needed in enumerate(grads.needed) if needed]
        return self.take([grads.shapes[i] for i in kept], [grads.templates[i] for i in kept])

    def take(self, shapes: Sequence[torch.Size], likes: Shards) -> list[Tensor]:
        """Tensors of these shapes, with the dtypes and device of `likes`, in the next slot."""
        if not likes:
            return []
        self._turn = 1 - self._turn
        offsets, total = [], 0
        for shape, like in zip(shapes, likes, strict=True):
            offsets.append(total)
            size = shape.numel() * like.element_size()
            total += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        memory = self._memory[self._turn]
        if memory is None:
            memory = torch.empty(total, dtype=torch.uint8, device=likes[0].device)
            self._memory[self._turn] = memory
        return [
            memory[at : at + shape.numel() * like.element_size()].view(like.dtype).view(shape)
            for at, shape, like in zip(offsets, shapes, likes, strict=True)
        ]


class Arrival(NamedTuple):
    """Shards on their way, and the operations to wait for."""

    shards: Shards
    works: Sequence[dist.Work]

    def wait(self) -> Shards:
        """The shards, arrived."""
        wait_all(self.works)
        return self.shards


Then = Callable[[], None]


def _nothing() -> None:
    pass


class Stream:
    """What the schedules share: the group, the rank's place in it, the prefetch."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        # The shards are held: an identity is theirs only while they live.
        self._begun: tuple[object, Arrival, Slots, Shards] | None = None

    def prefetch(self, shards: Shards, backward: bool) -> None:
        """Start the first transfer of the next walk, which is over `shards`."""
        if self.size > 1 and self._begun is None:
            slots = Slots()
            arrival = self._first(shards, backward, slots)
            self._begun = self._key(shards, backward), arrival, slots, shards

    def drop_prefetch(self) -> None:
        """Forget what was fetched early and did not come to use."""
        if self._begun is not None:
            self._begun[1].wait()
            self._begun = None

    def forward(self, shards: Shards, then: Then = _nothing) -> Iterator[tuple[int, Shards]]:
        """Yield (owner, the owner's shards) for all D owners; valid until the next step.

        `then` is called when nothing of this walk is left to send, before its last shard is used.
        """
        raise NotImplementedError

    def backward(
        self, shards: Shards, grads: Gradients, then: Then = _nothing
    ) -> Iterator[tuple[int, Shards]]:
        """The same, once more; what is added to `grads` in a step goes to the step's owner."""
        raise NotImplementedError

    def _first(self, shards: Shards, backward: bool, slots: Slots) -> Arrival:
        """Start a walk's first transfer."""
        raise NotImplementedError

    def _begin(self, shards: Shards, backward: bool) -> tuple[Arrival, Slots]:
        """The walk's first transfer, under way or started now, and the walk's slots."""
        if self._begun is not None and self._begun[0] == self._key(shards, backward):
            _, arrival, slots, _ = self._begun
            self._begun = None
            return arrival, slots
        self.drop_prefetch()  # it was for a walk that did not come
        slots = Slots()
        return self._first(shards, backward, slots), slots

    @staticmethod
    def _key(shards: Shards, backward: bool) -> object:
        return backward, *map(id, shards)


class Ring(Stream):
    """Neighbour to neighbour: each shard visits rank owner, owner+1, ...; so does its dW.

    Backward, a shard starts at its owner's neighbour and ends at the owner, and the sum of its dW
    follows one step behind: it is complete when it is home, after D-1 hops and not D.
    """

    def forward(self, shards, then=_nothing):
        held, last = shards, self.size - 1
        if last:
            arrival, slots = self._begin(shards, False)
        for step in range(self.size):
            if step == last:
                arrival = slots = None  # but for what is held
                then()
            elif step > 0:
                arrival = self._hop(held, slots)
            yield (self.rank - step) % self.size, held
            if step < last:
                held = arrival.wait()

    def backward(self, shards, grads, then=_nothing):
        held, last, sums = shards, self.size - 1, Slots()
        carried = Arrival(sums.for_sums(grads), ())
        if last:
            arrival, slots = self._begin(shards, True)
        for step in range(self.size):
            if step < last:
                held = arrival.wait()
            else:  # what arrived has been used
                held, arrival = shards, None
                slots = None
                then()
            if step < last - 1:
                arrival = self._hop(held, slots)
            grads.begin(carried.shards, partial=step > 0, pending=carried.works)
            yield (self.rank - 1 - step) % self.size, held
            summed = grads.end()
            if step < last:
                carried = self._exchange(summed, sums.for_sums(grads))
        grads.finish(summed)

    def _first(self, shards, backward, slots):
        return self._hop(shards, slots)

    def _hop(self, held: Shards, slots: Slots) -> Arrival:
        return self._exchange(held, slots.like(held))

    def _exchange(self, send: Shards, receive: Shards) -> Arrival:
        """Send to the next rank, receive from the previous one, as one group of operations."""
        if not send:
            return Arrival((), ())
        following = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        previous = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        ops = [dist.P2POp(dist.isend, t.contiguous(), following, self.group) for t in send]
        ops += [dist.P2POp(dist.irecv, t, previous, self.group) for t in receive]
        return Arrival(receive, dist.batch_isend_irecv(ops))


class Broadcast(Stream):
    """From each owner in turn to all; dW is reduced to the owner."""

    def forward(self, shards, then=_nothing):
        yield from self._walk(shards, False, then)

    def backward(self, shards, grads, then=_nothing):
        home, sums, leaving = grads.empty(), Slots(), [(), ()]
        for owner, held in self._walk(shards, True, then):
            wait_all(leaving.pop(0))  # the dW whose slot is used again has left
            grads.begin(home if owner == self.rank else sums.for_sums(grads), partial=False)
            yield owner, held
            leaving.append([self._reduce(t, owner) for t in grads.end()])
        wait_all([work for works in leaving for work in works])
        grads.finish(home)

    def _walk(self, shards, backward, then):
        arrival, slots = self._begin(shards, backward)
        for owner in range(self.size):
            held = arrival.wait()
            if owner + 1 < self.size:
                arrival = self._send(owner + 1, shards, slots)
            else:
                then()
            yield owner, held

    def _first(self, shards, backward, slots):
        return self._send(0, shards, slots)

    def _send(self, owner: int, shards: Shards, slots: Slots) -> Arrival:
        if self.size == 1:
            return Arrival(shards, ())
        mine = owner == self.rank
        tensors = [shard.contiguous() for shard in shards] if mine else slots.like(shards)
        source = dist.get_global_rank(self.group, owner)
        works = [dist.broadcast(t, source, group=self.group, async_op=True) for t in tensors]
        return Arrival(tensors, works)

    def _reduce(self, tensor: Tensor, owner: int) -> dist.Work:
        target = dist.get_global_rank(self.group, owner)
        return dist.reduce(tensor, target, group=self.group, async_op=True)


class Gather(Stream):
    """All shards at once, as ZeRO-3: one all-gather, one reduce-scatter, D shards of memory."""

    def forward(self, shards, then=_nothing):
        gathered = self._begin(shards, False)[0].wait()
        then()
        for owner in self._owners():
            yield owner, [whole[owner] for whole in gathered]

    def backward(self, shards, grads, then=_nothing):
        gathered = self._begin(shards, True)[0].wait()
        then()
        home = grads.empty()
        whole_grads = [t.new_empty(self._whole(t)) for t in home]
        for owner in self._owners():
            grads.begin([whole[owner] for whole in whole_grads], partial=False)
            yield owner, [whole[owner] for whole in gathered]
            grads.end()
        for whole, own in zip(whole_grads, home, strict=True):
            if self.size == 1:
                own.copy_(whole[0])
            else:
                dist.reduce_scatter_tensor(own, whole.flatten(0, 1), group=self.group)
        grads.finish(home)

    def _owners(self) -> list[int]:
        """The own shard first: the ranks then read different memory at a time."""
        return [(self.rank + step) % self.size for step in range(self.size)]

    def _whole(self, shard: Tensor) -> torch.Size:
        return torch.Size((self.size, *shard.shape))

    def _first(self, shards, backward, slots):
        if self.size == 1:
            return Arrival([shard[None] for shard in shards], ())
        whole = slots.take([self._whole(shard) for shard in shards], shards)
        return Arrival(whole, [
            # gloo wants the concatenated shape
            dist.all_gather_into_tensor(w.flatten(0, 1), s.contiguous(), self.group, async_op=True)
            for w, s in zip(whole, shards, strict=True)
        ])  # fmt: skip


SCHEDULES = {"ring": Ring, "broadcast": Broadcast, "gather": Gather}


def check_schedule(schedule: str, what: str = "TSP schedule") -> None:
    """Raise TSPError, with `what` in front, if `schedule` is not one of `SCHEDULES`."""
    if schedule not in SCHEDULES:
        raise TSPError(f"{what} {schedule!r}: not one of {', '.join(SCHEDULES)}")


_streams: dict[tuple[str, dist.ProcessGroup | None], Stream] = {}


def stream(schedule: str, group: dist.ProcessGroup | None) -> Stream:
    """The stream of a schedule over a group; one object for each pair.

    Raises:
        TSPError: `schedule` is not one of `SCHEDULES`.
    """
    check_schedule(schedule)
    key = (schedule, group)
    if key not in _streams:
        _streams[key] = SCHEDULES[schedule](group)
    return _streams[key]


def drop_prefetches() -> None:
    """Forget, on every stream, what was fetched early: before weights are used that may have
    changed since."""
    for one in _streams.values():
        one.drop_prefetch()


def forget(groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """Drop the streams of `groups`, when these are destroyed."""
    for key in [key for key in _streams if key[1] in groups]:
        del _streams[key]
