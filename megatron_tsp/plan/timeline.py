"""A rank's streams: what runs when, in the order in which it is issued."""

from collections import defaultdict

COMPUTE = "compute"

#: Something that ends at a time, on a stream.
Event = tuple[float, str]
START: Event = (0.0, COMPUTE)


class Timeline:
    """Streams of one rank. Work on a stream runs in order; transfers also share the links.

    Attributes:
        now: when the last kernel ends.
        computed: seconds of kernels.
        moved: seconds by stream, of transfers.
        waited: seconds in which no kernel ran, by the stream that was waited for.
    """

    def __init__(self, overlap: bool = True):
        self.overlap = overlap
        self.now = self.computed = 0.0
        self.moved: dict[str, float] = defaultdict(float)
        self.waited: dict[str, float] = defaultdict(float)
        self._links = 0.0

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of work by stream."""
        return {COMPUTE: self.computed, **self.moved}

    def kernel(self, seconds: float) -> None:
        """Run a kernel."""
        self.now += seconds
        self.computed += seconds

    def transfer(self, seconds: float, stream: str) -> Event:
        """Start a transfer of what the kernels issued so far make: after them, and after the
        transfers that were issued before, whose links it shares."""
        if not seconds:
            return START
        self.moved[stream] += seconds
        if not self.overlap:  # the processor does it
            self.now += seconds
            self.waited[stream] += seconds
            return self.now, stream
        self._links = max(self._links, self.now) + seconds
        return self._links, stream

    def wait(self, event: Event) -> None:
        """Let the kernels that follow wait."""
        end, stream = event
        if end > self.now:
            self.waited[stream] += end - self.now
            self.now = end
