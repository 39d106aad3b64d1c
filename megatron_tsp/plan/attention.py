"""Attention and its exchange on a timeline, on local tokens (TSP) or local heads (TP)."""

from megatron_tsp.plan import traffic
from megatron_tsp.plan import work as passes
from megatron_tsp.plan.timeline import START, Event, Timeline
from megatron_tsp.plan.work import Work


class Attention:
    """From rotated queries and keys to the attention's output, and back. `layers/kv_gather.py`
    keeps one head group ahead."""

    def __init__(self, time: Timeline, work: Work):
        self.time, self.work = time, work
        model, layout = work.model, work.layout
        self.ranks = layout.token_ranks
        self.there, self.back = traffic.exchange(model, layout)
        shared = 1 if layout.fold else layout.degree
        self.rows = work.group_tokens // (layout.degree if layout.fold else 1)
        self.q = model.q_width // shared
        self.kv = max(model.kv_width // shared, model.channels)

    def forward(self) -> None:
        """Forward, with what the exchange sends."""
        work, model = self.work, self.work.model
        if self.ranks == 1:
            self._attend(1.0)
            return
        if work.layout.exchange == "alltoall":
            self._exchange_heads(self.there[0], 4)
            self._attend(1.0)
            self._exchange_heads(self.there[0], 1)
            return
        groups = self._groups()
        gather = self._gatherer(self.there[0], groups)
        diagonal, rest = self._tiles(groups)
        merge = work.elementwise(passes.MERGE[model.element], self.q / groups * self.rows)
        arriving = gather()
        for group in range(groups):
            arrived = arriving
            if group + 1 < groups:
                arriving = gather()
            self.time.kernel(diagonal)
            self.time.wait(arrived)
            self.time.kernel(rest)
            self.time.kernel(merge)

    def backward(self) -> None:
        """From the gradient of the output to those of queries, keys and values."""
        work, layout = self.work, self.work.layout
        if self.ranks == 1:
            self._attend(1.0, backward=True)
            return
        if layout.exchange == "alltoall":
            self._exchange_heads(self.back[0], 1)
            self._attend(1.0, backward=True)
            self._exchange_heads(self.back[0], 3)
            return
        groups = self._groups()
        ring = layout.exchange == "ring"
        gather = (lambda: START) if layout.save_kv else self._gatherer(self.back[0], groups)
        diagonal, rest = self._tiles(groups, backward=True)
        pack = work.elementwise(2 * passes.PACK, self.kv * self.ranks / groups * self.rows)
        scatter = 0.0 if ring else work.seconds(self.back[-1], groups)
        arriving, leaving = gather(), START
        for group in range(groups):
            arrived = arriving
            if group + 1 < groups:
                arriving = gather()
            self.time.kernel(diagonal)
            self.time.wait(arrived)
            self.time.kernel(rest)
            self.time.kernel(pack)
            self.time.wait(leaving)
            leaving = self.time.transfer(scatter, "kv")
        self.time.wait(leaving)

    def _groups(self) -> int:
        """Pieces of the exchange: head groups (`kv_gather._head_groups`), or steps of a ring."""
        if self.work.layout.exchange == "ring":
            return self.ranks
        model = self.work.model
        heads = self.kv // model.channels
        step = heads // self.ranks if heads % self.ranks == 0 else 1
        one = 2 * model.channels * self.rows * self.ranks * model.element
        step *= max(1, int(passes.WORTH_SPLITTING // (step * one)))
        step = min(step, max(1, int(passes.TOO_MANY // one)))
        return -(-heads // step)

    def _gatherer(self, transfer: traffic.Transfer, groups: int):
        """A function that starts the gather of a head group, or a step of a ring."""
        seconds = self.work.seconds(transfer, groups)
        pack = None
        if self.work.layout.exchange != "ring":
            pack = self.work.elementwise(passes.PACK, 2 * self.kv / groups * self.rows)

        def gather() -> Event:
            if pack is not None:
                self.time.kernel(pack)
            return self.time.transfer(seconds, "kv")

        return gather

    def _tiles(self, groups: int, backward: bool = False) -> tuple[float, float]:
        """Seconds of a head group's (two diagonal blocks, which need no other rank; the rest)."""
        diagonal = 1 / groups / (2 * self.ranks)
        return self._seconds(diagonal, backward), self._seconds(1 / groups - diagonal, backward)

    def _exchange_heads(self, transfer: traffic.Transfer, tensors: int) -> None:
        """Tokens for heads of some of q, k, v and the output: as much of `transfer` as they are."""
        width = {1: self.q, 3: self.q + 2 * self.kv, 4: self.q + 2 * self.kv}[tensors]
        share = width / (2 * self.q + 2 * self.kv)
        pack = self.work.elementwise(passes.PACK, width * self.rows)
        self.time.kernel(pack)
        sent = transfer._replace(sent=float(transfer.sent) * share)
        self.time.wait(self.time.transfer(self.work.seconds(sent), "kv"))
        self.time.kernel(pack)

    def _attend(self, share: float, backward: bool = False) -> None:
        self.time.kernel(self._seconds(share, backward))

    def _seconds(self, share: float, backward: bool) -> float:
        flops = self.work.attention_flops * share
        if backward:
            flops *= passes.ATTENTION_BACKWARD
        return self.work.hardware.attention(flops, backward)
