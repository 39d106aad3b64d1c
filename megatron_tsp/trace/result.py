"""What a trace says, as Python and as JSON."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field


@dataclass
class Trace:
    """One rank's training step, from the real code on tensors without contents.

    Bytes are those of tensors. Not in them: scratch space inside kernels, workspaces of cuBLAS,
    buffers of the communication library, the CUDA context, fragmentation.

    Attributes:
        arm, rank, world: which rank of which job.
        flags: its command line, as a dict.
        peak: at the moment of most live bytes: `bytes`; `split` of these into parameters,
            gradients, optimizer, activations, temporaries, loss; `where` in the model, in which
            `phase`, at which torch `operator`; the `largest` storages besides parameters, gradients
            and optimizer state (bytes, count, kind, operator, where).
        at_start: the split before the step.
        sent: bytes that this rank sends in the step, (collective, group, block, bytes).
        flops: floating-point operations of matrix products and attention, two for each
            multiply-add.
        microbatches: of the step.
        timeline: live bytes after each operator.
        marks: (operator, label, phase) where what is running changes.
        seconds: that the trace took.
        notes: what was changed in the flags for the trace, and what it assumes.
    """

    arm: str
    rank: int
    world: int
    flags: dict
    peak: dict
    at_start: dict
    sent: list
    flops: int
    microbatches: int
    timeline: list = field(default_factory=list, repr=False)
    marks: list = field(default_factory=list, repr=False)
    seconds: float = 0.0
    notes: list = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The most live bytes."""
        return self.peak["bytes"]

    @property
    def split(self) -> dict[str, int]:
        """`peak_bytes` by what they are for."""
        return self.peak["split"]

    @property
    def sent_bytes(self) -> int:
        """All bytes that this rank sends in the step."""
        return sum(size for *_, size in self.sent)

    def sent_by(self, *names: str) -> dict:
        """Bytes sent, summed by some of "collective", "group", "block".

        Keys are a word for one name, a tuple for several.
        """
        at = [("collective", "group", "block").index(name) for name in names]
        sums: dict = defaultdict(int)
        for row in self.sent:
            key = tuple(row[i] for i in at)
            sums[key[0] if len(at) == 1 else key] += row[3]
        return dict(sums)

    def json(self) -> dict:
        """For a report; without the timeline."""
        fields = asdict(self)
        del fields["timeline"], fields["marks"]
        return {
            **fields,
            "sent_bytes": self.sent_bytes,
            **{f"sent_by_{name}": self.sent_by(name) for name in ("collective", "group", "block")},
        }
