"""What a rank does in a layer, as work on a `Timeline`: forward and backward.

The order is that of the code. TSP: `streaming.py` walks with the next shard on its way. TP+SP:
Megatron's linears gather before the product and scatter after it; backward they gather their input
during the product for dX and scatter dX during that for dW. Where a layer has a mixture of experts,
the MLP is its shared experts, if there are any.
"""

from megatron_tsp.plan import traffic
from megatron_tsp.plan import work as passes
from megatron_tsp.plan.attention import Attention
from megatron_tsp.plan.mixture import Mixture
from megatron_tsp.plan.timeline import Event, Timeline
from megatron_tsp.plan.walk import Next, Walk
from megatron_tsp.plan.work import Work


class FoldedLayer:
    """A layer of TSP."""

    def __init__(self, time: Timeline, work: Work):
        self.time, self.work = time, work
        self.walk, self.attention = Walk(time, work), Attention(time, work)
        self.mixture = Mixture(time, work) if work.moe else None
        model, layout, rows = work.model, work.layout, work.tokens
        shards = layout.degree
        qkv = model.q_width + 2 * model.kv_width
        weights, dw = traffic.weights(model, layout, "attention")
        part = qkv / (qkv + model.q_width)
        self.qkv, self.dqkv = _scaled(weights, part), _scaled(dw, part)
        self.proj, self.dproj = _scaled(weights, 1 - part), _scaled(dw, 1 - part)
        self.mlp, self.dmlp = traffic.weights(model, layout, "shared" if work.moe else "mlp")
        self.schedules = layout.attention_schedule, layout.mlp_schedule
        self._products = {
            "qkv": work.matmul(rows, qkv / shards, model.hidden),
            "proj": work.matmul(rows, model.hidden, model.q_width / shards),
            "fc1": work.matmul(rows, work.fc1_width / shards, model.hidden),
            "fc2": work.matmul(rows, model.hidden, work.ffn / shards),
        }
        # The walks after attention: the MLP's, or where there is none the next layer's.
        self._after = (self.mlp, layout.mlp_schedule) if work.ffn else self._first

    @property
    def _first(self) -> Next:
        return self.qkv, self.schedules[0]

    def forward(self) -> None:
        """x to the next layer's x."""
        model = self.work.model
        attention, _ = self.schedules
        self._local(passes.NORM[model.element], model.hidden)
        self.walk(self.qkv, attention, lambda: self._product("qkv"), (self.proj, attention))
        self._rope()
        self.attend()
        self.walk(self.proj, attention, lambda: self._product("proj"), self._after)
        self._local(passes.RESIDUAL + passes.NORM[model.element], model.hidden)
        self.feed_forward(self._first)
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
            self._local(passes.ACTIVATION_BACKWARD, work.ffn / layout.degree)
            for name in ("fc1", "fc2", "fc1"):
                self._product(name)

        def twice(name: str):
            return lambda: (self._product(name), self._product(name))

        norm = passes.NORM[model.element] + passes.NORM_BACKWARD[model.element]
        self._local(passes.NORM[model.element], model.hidden)
        if self.mixture:
            self.mixture.backward()
        if work.ffn:
            self.walk(self.mlp, mlp, shard, (self.proj, attention), self.dmlp)
        self._local(passes.NORM_BACKWARD[model.element] + passes.RESIDUAL, model.hidden)
        self.walk(self.proj, attention, twice("proj"), (self.qkv, attention), self.dproj)
        self.attention.backward()
        self._rope()
        before = (self.mlp, mlp) if work.ffn else (self.proj, attention)
        self.walk(self.qkv, attention, twice("qkv"), before, self.dqkv)
        self._local(norm + passes.RESIDUAL, model.hidden)
        self.time.kernel(work.elementwise(6, work.local_weights))  # to main_grad

    def attend(self) -> None:
        """The attention core."""
        self.attention.forward()

    def feed_forward(self, then: Next | None = None) -> None:
        """The MLP; `then`: the walk that follows, by default its own again."""
        width = self.work.ffn / self.work.layout.degree

        def shard():
            self._product("fc1")
            self._local(passes.ACTIVATION, width)
            self._product("fc2")

        if self.work.ffn:
            mine = self.mlp, self.schedules[1]
            self.walk(*mine, shard, then or mine)
        if self.mixture:
            self.mixture.forward()

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
        self.mixture = Mixture(time, work) if work.moe else None
        model, layout, rows = work.model, work.layout, work.group_tokens
        degree = layout.degree
        qkv = (model.q_width + 2 * model.kv_width) / degree
        self._products = {
            "qkv": work.matmul(rows, qkv, model.hidden),
            "proj": work.matmul(rows, model.hidden, model.q_width / degree),
            "fc1": work.matmul(rows, work.fc1_width / degree, model.hidden),
            "fc2": work.matmul(rows, model.hidden, work.ffn / degree),
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
        if self.mixture:
            self.mixture.backward()
        if work.ffn:
            self._row_backward("fc2")
            self._sharded(passes.ACTIVATION_BACKWARD, work.ffn)
            self._column_backward("fc1")
        self._local(passes.NORM_BACKWARD[element] + passes.RESIDUAL)
        self._row_backward("proj")
        self.attention.backward()
        self._rope()
        for seconds in self._shared[1:]:
            self.time.wait(self._transfer(seconds))
        self._column_backward("qkv")
        self._local(passes.NORM_BACKWARD[element] + passes.RESIDUAL)
        self.time.kernel(work.elementwise(6, work.local_weights))  # to main_grad

    def attend(self) -> None:
        """The attention core."""
        self.attention.forward()

    def feed_forward(self) -> None:
        """The MLP."""
        if self.work.ffn:
            self._column("fc1")
            self._sharded(passes.ACTIVATION, self.work.ffn)
            self._row("fc2")
        if self.mixture:
            self.mixture.forward()

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
        return self.time.transfer(seconds, "activations")

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
