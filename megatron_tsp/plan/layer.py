"""What a rank does in a layer, as work on a `Timeline`: forward and backward.

The order is that of the code. TSP: `streaming.py` walks with the next shard on its way,
`layers/kv_gather.py` keeps one head group ahead. TP+SP: Megatron's linears gather before the
product and scatter after it; backward they gather their input during the product for dX and scatter
dX during that for dW.
"""

from megatron_tsp.plan import traffic
from megatron_tsp.plan import work as passes
from megatron_tsp.plan.timeline import Event, Timeline
from megatron_tsp.plan.walk import Walk
from megatron_tsp.plan.work import Work


class Attention:
    """Attention and its exchange, on local tokens (TSP) or local heads (TP)."""

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
        """From rotated queries and keys to the attention's output."""
        work, model = self.work, self.work.model
        e = model.element
        if self.ranks > 1 and work.layout.exchange == "alltoall":
            self._exchange_heads(self.there[0], 4)
            self._attend(1.0)
            self._exchange_heads(self.there[0], 1, of=4)
            return
        groups = self._groups()
        arriving = self._gather(groups)
        for group in range(groups):
            arrived = arriving
            if group + 1 < groups:
                arriving = self._gather(groups)
            if self.ranks > 1:
                self._attend(1 / groups / (2 * self.ranks))  # the two diagonal blocks
                self.time.wait(arrived)
                self._attend((1 - 1 / (2 * self.ranks)) / groups)
                self._elementwise(passes.MERGE[e], self.q / groups)
            else:
                self._attend(1.0)

    def backward(self) -> None:
        """From the gradient of the output to those of queries, keys and values."""
        work = self.work
        if self.ranks > 1 and work.layout.exchange == "alltoall":
            self._exchange_heads(self.back[0], 1, of=4)
            self._attend(1.0, backward=True)
            self._exchange_heads(self.back[0], 3, of=4)
            return
        groups = self._groups()
        ring = work.layout.exchange == "ring"
        arriving = self._gather(groups, backward=True)
        leaving = None
        for group in range(groups):
            arrived = arriving
            if group + 1 < groups:
                arriving = self._gather(groups, backward=True)
            if self.ranks == 1:
                self._attend(1.0, backward=True)
                continue
            self._attend(1 / groups / (2 * self.ranks), backward=True)
            self.time.wait(arrived)
            self._attend((1 - 1 / (2 * self.ranks)) / groups, backward=True)
            self._elementwise(2 * passes.PACK, self.kv * self.ranks / groups)
            if leaving is not None:
                self.time.wait(leaving)
            if not ring:
                leaving = self._send(self.back[-1], groups)
        if leaving is not None:
            self.time.wait(leaving)

    def _groups(self) -> int:
        """Pieces of the exchange: head groups (`kv_gather._head_groups`), or steps of a ring."""
        if self.ranks == 1:
            return 1
        if self.work.layout.exchange == "ring":
            return self.ranks
        model = self.work.model
        heads = self.kv // model.channels
        step = heads // self.ranks if heads % self.ranks == 0 else 1
        one = 2 * model.channels * self.rows * self.ranks * model.element
        step *= max(1, int(passes.WORTH_SPLITTING // (step * one)))
        step = min(step, max(1, int(passes.TOO_MANY // one)))
        return -(-heads // step)

    def _gather(self, groups: int, backward: bool = False) -> Event:
        if self.ranks == 1 or (backward and self.work.layout.save_kv):
            return self.time.issued()
        if self.work.layout.exchange == "ring":
            transfer = self.back[0] if backward else self.there[0]
            return self._send(transfer, groups)
        self._elementwise(passes.PACK, 2 * self.kv / groups)
        return self._send(self.there[0], groups)

    def _send(self, transfer: traffic.Transfer, parts: int) -> Event:
        return self.time.transfer(self.work.seconds(transfer, parts), "kv", self.time.issued())

    def _exchange_heads(self, transfer: traffic.Transfer, tensors: int, of: int = 4) -> None:
        """Tokens for heads of some of q, k, v and the output: as much of `transfer` as they are."""
        width = {1: self.q, 3: self.q + 2 * self.kv, 4: self.q + 2 * self.kv}[tensors]
        share = width / (2 * self.q + 2 * self.kv)
        self._elementwise(passes.PACK, width)
        sent = transfer._replace(sent=float(transfer.sent) * share)
        self.time.wait(self.time.transfer(self.work.seconds(sent), "kv", self.time.issued()))
        self._elementwise(passes.PACK, width)

    def _attend(self, share: float, backward: bool = False) -> None:
        flops = self.work.attention_flops * share
        if backward:
            flops *= passes.ATTENTION_BACKWARD
        self.time.kernel(self.work.hardware.attention(flops, backward))

    def _elementwise(self, count: float, width: float) -> None:
        self.time.kernel(self.work.elementwise(count, width * self.rows))


class FoldedLayer:
    """A layer of TSP."""

    def __init__(self, time: Timeline, work: Work):
        self.time, self.work = time, work
        self.walk, self.attention = Walk(time, work), Attention(time, work)
        model, layout, rows = work.model, work.layout, work.tokens
        shards = layout.degree
        qkv = model.q_width + 2 * model.kv_width
        weights, dw = traffic.weights(model, layout, "attention")
        part = qkv / (qkv + model.q_width)
        self.qkv, self.dqkv = _scaled(weights, part), _scaled(dw, part)
        self.proj, self.dproj = _scaled(weights, 1 - part), _scaled(dw, 1 - part)
        self.mlp, self.dmlp = traffic.weights(model, layout, "mlp")
        self.schedules = layout.attention_schedule, layout.mlp_schedule
        self._qkv = qkv
        self._products = {
            "qkv": work.matmul(rows, qkv / shards, model.hidden),
            "proj": work.matmul(rows, model.hidden, model.q_width / shards),
            "fc1": work.matmul(rows, model.fc1_width / shards, model.hidden),
            "fc2": work.matmul(rows, model.hidden, model.ffn / shards),
        }

    def forward(self) -> None:
        """x to the next layer's x."""
        model = self.work.model
        attention, mlp = self.schedules
        self._local(passes.NORM[model.element], model.hidden)
        self.walk(self.qkv, attention, lambda: self._product("qkv"), (self.proj, attention))
        self._rope()
        self.attend()
        self.walk(self.proj, attention, lambda: self._product("proj"), (self.mlp, mlp))
        self._local(passes.RESIDUAL + passes.NORM[model.element], model.hidden)
        self.feed_forward()
        self._local(passes.RESIDUAL, model.hidden)

    def backward(self) -> None:
        """The gradient of the output to that of x, and dW to its owners."""
        work, model, layout = self.work, self.work.model, self.work.layout
        attention, mlp = self.schedules
        again = not layout.save_activations

        def shard():
            if again:
                self._product("fc1")
            self._product("fc2")
            self._local(passes.ACTIVATION_BACKWARD, model.ffn / layout.degree)
            for name in ("fc1", "fc2", "fc1"):
                self._product(name)

        def twice(name: str):
            return lambda: (self._product(name), self._product(name))

        norm = passes.NORM[model.element] + passes.NORM_BACKWARD[model.element]
        self._local(passes.NORM[model.element], model.hidden)
        self.walk(self.mlp, mlp, shard, (self.proj, attention), self.dmlp)
        self._local(passes.NORM_BACKWARD[model.element] + passes.RESIDUAL, model.hidden)
        self.walk(self.proj, attention, twice("proj"), (self.qkv, attention), self.dproj)
        self.attention.backward()
        self._rope()
        self.walk(self.qkv, attention, twice("qkv"), (self.mlp, mlp), self.dqkv)
        self._local(norm + passes.RESIDUAL, model.hidden)
        self.time.kernel(work.elementwise(6, work.model_weights / layout.degree))  # to main_grad

    def attend(self) -> None:
        """The attention core."""
        self.attention.forward()

    def feed_forward(self) -> None:
        """The MLP."""
        width = self.work.model.ffn / self.work.layout.degree
        attention, mlp = self.schedules

        def shard():
            self._product("fc1")
            self._local(passes.ACTIVATION, width)
            self._product("fc2")

        self.walk(self.mlp, mlp, shard, (self.qkv, attention))

    def _product(self, name: str) -> None:
        self.time.kernel(self._products[name])

    def _local(self, count: float, width: float) -> None:
        self.time.kernel(self.work.elementwise(count, width * self.work.tokens))

    def _rope(self) -> None:
        model = self.work.model
        count = passes.ROPE if model.rope else 2
        self._local(count, model.q_width + model.kv_width)


class TensorParallelLayer:
    """A layer of Megatron's tensor and sequence parallelism, with the baseline's norm and core."""

    def __init__(self, time: Timeline, work: Work):
        self.time, self.work = time, work
        self.attention = Attention(time, work)
        model, layout, rows = work.model, work.layout, work.group_tokens
        degree = layout.degree
        qkv = (model.q_width + 2 * model.kv_width) / degree
        self._products = {
            "qkv": work.matmul(rows, qkv, model.hidden),
            "proj": work.matmul(rows, model.hidden, model.q_width / degree),
            "fc1": work.matmul(rows, model.fc1_width / degree, model.hidden),
            "fc2": work.matmul(rows, model.hidden, model.ffn / degree),
        }
        gather, scatter = traffic.activations(model, layout, 1, 1)
        self._gather, self._scatter = work.seconds(gather), work.seconds(scatter)
        self._shared = [work.seconds(t) for t in traffic.shared_heads(model, layout)]

    def forward(self) -> None:
        """x to the next layer's x."""
        self._local(passes.NORM[self.work.model.element])
        self._column("qkv")
        for seconds in self._shared[:1]:
            self.time.wait(self._transfer(seconds))
        self._rope()
        self.attend()
        self._row("proj")
        self._local(passes.RESIDUAL + passes.NORM[self.work.model.element])
        self.feed_forward()
        self._local(passes.RESIDUAL)

    def backward(self) -> None:
        """The gradient of the output to that of x, and dW."""
        work, model, layout = self.work, self.work.model, self.work.layout
        element = model.element
        if layout.recomputes("layernorm"):
            self._local(2 * passes.NORM[element])
        self._row_backward("fc2")
        self._sharded(passes.ACTIVATION_BACKWARD, model.ffn)
        self._column_backward("fc1")
        self._local(passes.NORM_BACKWARD[element] + passes.RESIDUAL)
        self._row_backward("proj")
        self.attention.backward()
        self._rope()
        for seconds in self._shared[1:]:
            self.time.wait(self._transfer(seconds))
        self._column_backward("qkv")
        self._local(passes.NORM_BACKWARD[element] + passes.RESIDUAL)
        self.time.kernel(work.elementwise(6, work.model_weights / layout.degree))  # to main_grad

    def attend(self) -> None:
        """The attention core."""
        self.attention.forward()

    def feed_forward(self) -> None:
        """The MLP."""
        self._column("fc1")
        self._sharded(passes.ACTIVATION, self.work.model.ffn)
        self._row("fc2")

    def _column(self, name: str) -> None:
        self.time.wait(self._transfer(self._gather))
        self.time.kernel(self._products[name])

    def _row(self, name: str) -> None:
        self.time.kernel(self._products[name])
        self.time.wait(self._transfer(self._scatter))

    def _column_backward(self, name: str) -> None:
        gathered = self._transfer(self._gather)  # the input, again, during the product for dX
        self.time.kernel(self._products[name])
        self.time.wait(gathered)
        scattered = self._transfer(self._scatter)  # dX, during the product for dW
        self.time.kernel(self._products[name])
        self.time.wait(scattered)

    def _row_backward(self, name: str) -> None:
        self.time.wait(self._transfer(self._gather))
        self.time.kernel(self._products[name])
        self.time.kernel(self._products[name])

    def _transfer(self, seconds: float) -> Event:
        return self.time.transfer(seconds, "activations", self.time.issued())

    def _local(self, count: float) -> None:
        self.time.kernel(self.work.elementwise(count, self.work.model.hidden * self.work.tokens))

    def _sharded(self, count: float, width: float) -> None:
        """Kernels on [s/C, b, width/t]: as many elements as local tokens have in full width."""
        self.time.kernel(self.work.elementwise(count, width * self.work.tokens))

    def _rope(self) -> None:
        model = self.work.model
        self._sharded(passes.ROPE if model.rope else 2, model.q_width + model.kv_width)


def layer(time: Timeline, work: Work):
    """The layer of the work's layout."""
    return (FoldedLayer if work.layout.fold else TensorParallelLayer)(time, work)


def _scaled(transfer: traffic.Transfer, share: float) -> traffic.Transfer:
    return transfer._replace(sent=float(transfer.sent) * share)
