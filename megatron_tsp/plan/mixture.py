"""The routed experts of a layer on a timeline."""

from megatron_tsp.plan import experts
from megatron_tsp.plan import work as passes
from megatron_tsp.plan.timeline import Timeline
from megatron_tsp.plan.work import Work


class Mixture:
    """The router, tokens to the experts, the experts, tokens back; and backward. Megatron's
    dispatcher waits for each of its transfers, so that what the experts take does not depend on
    what runs before and after them."""

    def __init__(self, time: Timeline, work: Work):
        self.time, self.work = time, work
        model, layout = work.model, work.layout
        mixture, element = model.mixture, model.element
        self.there, self.back = experts.dispatch(model, layout)
        rows = mixture.chosen * work.tokens  # (token, expert) pairs that this rank works on
        local = mixture.count // layout.expert
        width = mixture.ffn * model.gates
        self._router = work.matmul(work.tokens, mixture.count, model.hidden)
        self._router += work.elementwise(passes.ROUTER * 4 / element, work.tokens * mixture.count)
        self._sorted = work.elementwise(passes.PACK, rows * model.hidden)
        # One product an expert; its weights are read once.
        self._products = local * (
            work.matmul(rows / local, width, model.hidden)
            + work.matmul(rows / local, model.hidden, mixture.ffn)
        )
        self._active = work.elementwise(passes.ACTIVATION, mixture.ffn * rows)
        self._active_backward = work.elementwise(passes.ACTIVATION_BACKWARD, mixture.ffn * rows)

    def forward(self) -> None:
        """Forward."""
        self.time.kernel(self._router)
        self._around(self.there, self._products + self._active)

    def backward(self) -> None:
        """Backward: each product twice."""
        self._around(self.back, 2 * self._products + self._active_backward)
        self.time.kernel(2 * self._router)

    def _around(self, transfers, seconds: float) -> None:
        """Sort the tokens, send them, use them, sort them, and send them back."""
        self.time.kernel(2 * self._sorted)
        for transfer in transfers:
            self.time.wait(self.time.transfer(self.work.seconds(transfer), "experts"))
        self.time.kernel(seconds)
        self.time.kernel(2 * self._sorted)
