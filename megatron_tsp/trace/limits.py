"""``--max-context``: the longest sequence of which a rank's peak still fits."""

from concurrent.futures import Future
from dataclasses import dataclass

from megatron_tsp.trace.result import Trace

GIB = 2**30

#: GiB that a trace does not see: about 0.6 for the CUDA context and kernels, 0.3 for workspaces
#: of cuBLAS and attention kernels, 1 for communicators, 2 for fragmentation. An estimate.
RESERVE = 4.0
#: The answer is exact to one part of this.
_STEPS = 64


@dataclass
class Limit:
    """The longest sequence that fits. `trace` is of that length, None if not even one step fits;
    `traces` were needed."""

    arm: str
    tokens: int
    trace: Trace | None
    traces: int


def longest(arm: str, start_one, unit: int, room: int, guess: int) -> Limit:
    """Find the longest sequence whose traced peak is at most `room` bytes.

    A peak is close to a straight line in the length: a try takes the length at which the line
    through the two nearest tries meets `room`, every second one the middle. Lengths are multiples
    of a step of at most 1/64 of the answer.

    Args:
        start_one(tokens): a future of the trace at this length.
        unit: lengths are multiples of it.
        guess: a first length.
    """
    known: dict[int, int] = {}
    traces: dict[int, Trace] = {}

    def peak(tokens: int) -> int:
        if tokens not in known:
            future: Future = start_one(tokens)
            traces[tokens] = future.result()
            known[tokens] = traces[tokens].peak_bytes
        return known[tokens]

    low, high = 0, None
    tokens = max(unit, guess // unit * unit)
    while True:
        if peak(tokens) <= room:
            low = tokens
        else:
            high = tokens
        step = _step(low or high, unit)
        if high is not None and high - low <= step:
            return Limit(arm, low, traces.get(low), len(known))
        tokens = _next(known, low, high, room, step)


def _step(tokens: int, unit: int) -> int:
    step = unit
    while step * 2 * _STEPS <= tokens:
        step *= 2
    return step


def _next(known: dict[int, int], low: int, high: int | None, room: int, step: int) -> int:
    """The next length to try, between `low` and `high`, at neither."""
    if len(known) == 1:
        return low * 2 if high is None else max(step, high // 2 // step * step)
    near = sorted(known, key=lambda tokens: abs(known[tokens] - room))[:2]
    a, b = near
    slope = (known[a] - known[b]) / (a - b)
    target = a + (room - known[a]) / slope if slope > 0 else 2 * low
    if high is not None and len(known) % 2:
        target = (low + high) / 2  # the line alone may creep up from one side
    tokens = int(target) // step * step
    if high is None:
        return max(low + step, min(tokens, 8 * low))
    if tokens <= low:
        tokens = low + step
    if tokens >= high:
        tokens = high - step
    return max(step, tokens)
