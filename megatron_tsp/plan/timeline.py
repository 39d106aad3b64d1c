"""A rank's streams: what runs when, in the order in which it is issued."""

from collections import defaultdict
from typing import NamedTuple

COMPUTE = "compute"


class Event(NamedTuple):
    """Something that ends at a time, on a stream."""

    end: float
    stream: str


START = Event(0.0, COMPUTE)


class Timeline:
    """Streams of one rank. Work on a stream runs in order; transfers also share the links.

    Attributes:
        busy: seconds by stream, of work.
        waited: seconds in which no kernel ran, by the stream that was waited for.
    """

    def __init__(self, overlap: bool = True):
        self.overlap = overlap
        self.busy: dict[str, float] = defaultdict(float)
        self.waited: dict[str, float] = defaultdict(float)
        self._kernel = self._links = START
        self._last: dict[str, Event] = {}

    @property
    def now(self) -> float:
        """When the last kernel ends."""
        return self._kernel.end

    def kernel(self, seconds: float, *after: Event) -> Event:
        """Run a kernel after these events."""
        start = free = self._kernel.end
        for end, stream in after:
            if end > start:
                start, cause = end, stream
        if start > free:
            self.waited[cause] += start - free
        self.busy[COMPUTE] += seconds
        self._kernel = Event(start + seconds, COMPUTE)
        return self._kernel

    def transfer(self, seconds: float, stream: str, *after: Event) -> Event:
        """Start a transfer after what has been issued to `stream`, the links, and these events."""
        if not seconds:
            return max(after, default=START)
        if not self.overlap:  # the processor does it
            event = self.kernel(seconds, *after)
            self.busy[COMPUTE] -= seconds
            self.busy[stream] += seconds
            self.waited[stream] += seconds
            return event
        start = max(self._last.get(stream, START).end, self._links.end, *(e.end for e in after))
        self.busy[stream] += seconds
        self._last[stream] = self._links = Event(start + seconds, stream)
        return self._links

    def issued(self) -> Event:
        """What the compute stream has been given so far: transfers of its results come after."""
        return self._kernel

    def wait(self, *events: Event) -> None:
        """Let the compute stream wait."""
        self.kernel(0.0, *events)
