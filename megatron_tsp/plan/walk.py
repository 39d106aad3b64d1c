"""The weight stream on a timeline."""

from collections.abc import Callable

from megatron_tsp.plan import traffic
from megatron_tsp.plan.timeline import START, Event, Timeline
from megatron_tsp.plan.work import Work

#: The walk that follows: its weights, and their schedule.
Next = tuple[traffic.Transfer, str]


class Walk:
    """Walks over D shards, as `streaming.py` makes them: the next shard on its way while one is
    used, the next walk's first one while the last is used."""

    def __init__(self, time: Timeline, work: Work):
        self.time, self.work = time, work
        self.size = work.layout.degree
        self.begun: Event | None = None

    def __call__(
        self,
        weights: traffic.Transfer,
        schedule: str,
        use: Callable[[], None],
        then: Next | None = None,
        dw: traffic.Transfer | None = None,
    ) -> None:
        """Use each of the D shards; backward, what each use adds to `dw` goes to the shard's owner.

        Args:
            weights, dw: what travels, in all.
            then: the walk that follows: its weights and schedule.
        """
        if self.size == 1:
            use()
            return
        self._use, self._summed = use, dw is not None
        self._hop = self._seconds(weights, schedule)
        self._sum = self._seconds(dw, schedule) if dw is not None else 0.0
        first, self.begun = self.begun or self._send(self._hop), None
        walk = {"ring": self._ring, "broadcast": self._broadcast, "gather": self._gather}[schedule]
        if schedule == "ring" and dw is not None:
            walk = self._ring_backward
        walk(first, lambda: self._prefetch(then))

    def _ring(self, arrival: Event, last: Callable[[], None]) -> None:
        self._use()
        for step in range(1, self.size):
            self.time.wait(arrival)
            if step < self.size - 1:
                arrival = self._send(self._hop)
            else:
                last()
            self._use()

    def _ring_backward(self, arrival: Event, last: Callable[[], None]) -> None:
        sums = START
        for step in range(self.size):
            if step < self.size - 1:
                self.time.wait(arrival)
                if step < self.size - 2:
                    arrival = self._send(self._hop)
            else:
                last()
            self.time.wait(sums)
            self._use()
            if step < self.size - 1:
                sums = self._send(self._sum)

    def _broadcast(self, arrival: Event, last: Callable[[], None]) -> None:
        reduced = START
        for owner in range(self.size):
            self.time.wait(arrival)
            if owner < self.size - 1:
                arrival = self._send(self._hop)
            else:
                last()
            self._use()
            if self._summed:
                reduced = self._send(self._sum)
        self.time.wait(reduced)

    def _gather(self, arrival: Event, last: Callable[[], None]) -> None:
        self.time.wait(arrival)
        last()
        for _ in range(self.size):
            self._use()
        if self._summed:
            self.time.wait(self._send(self._sum))

    def _seconds(self, transfer: traffic.Transfer, schedule: str) -> float:
        """Of one of the equal transfers that a walk makes."""
        parts = {"ring": self.size - 1, "broadcast": self.size, "gather": 1}
        return self.work.seconds(transfer, parts[schedule])

    def _send(self, seconds: float) -> Event:
        return self.time.transfer(seconds, "weights")

    def _prefetch(self, then: Next | None) -> None:
        if then is not None:
            self.begun = self._send(self._seconds(*then))
