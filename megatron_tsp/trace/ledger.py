"""The live bytes of a step, by what they are for, and what its operators compute."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megatron_tsp.trace.memory import Storages

#: What memory is for. Temporaries include the buffers that shards in flight land in.
KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "loss")

_aten = torch.ops.aten


@dataclass
class Peak:
    """The moment of most live bytes.

    Attributes:
        bytes: alive then.
        split: the same, by `KINDS`.
        where, phase: what was running.
        operator: the torch operator that reached it.
        largest: the largest storages alive that are neither parameters nor gradients nor optimizer
            state: (bytes, how many of this kind, kind, operator that made them, where).
    """

    bytes: int = 0
    split: dict[str, int] = field(default_factory=dict)
    where: str = ""
    phase: str = ""
    operator: str = ""
    largest: list[tuple[int, int, str, str, str]] = field(default_factory=list)


class Ledger(Storages):
    """`Storages` that knows what each is for. A `FakeMode` shows it every operator.

    Args:
        where: tells what is running: its `label` (str), `phase` (str).

    Attributes:
        split: live bytes by `KINDS`.
        peak_at: the moment of most live bytes, complete when the step is over.
        timeline: live bytes after each operator.
        marks: (operator count, label, phase) at each change of what is running.
        flops: floating-point operations of matrix products and attention.
    """

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.split = dict.fromkeys(KINDS, 0)
        self.peak_at = Peak()
        self.timeline: list[int] = []
        self.marks: list[tuple[int, str, str]] = []
        self.flops = 0
        self._kinds: dict[int, str] = {}
        self._origins: dict[int, tuple] = {}  # operator, label; not of what is owned
        self._operator = None
        self._place: tuple[str, str] | None = None
        self._at_peak = False
        self._stored = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def own(self, tensors, kind: str) -> None:
        """Say, before it is entered, what the storages of `tensors` are for."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._kinds[tensor.untyped_storage()._cdata] = kind

    def __enter__(self):
        result = super().__enter__()
        self._stored.__enter__()
        return result

    def __exit__(self, *exc):
        self._stored.__exit__(*exc)
        self._note_peak()
        super().__exit__(*exc)

    def before(self, func, args, kwargs) -> None:
        """``func(*args, **kwargs)`` is about to run."""
        self._operator = func
        place = self.where.label, self.where.phase
        if place != self._place:
            self._place = place
            self.marks.append((len(self.timeline), *place))
        self._see_new(args)
        if kwargs:
            self._see_new(kwargs.values())

    def after(self, func, args, kwargs, result) -> None:
        """It gave `result`."""
        self.see((result,))
        self.timeline.append(self.current)
        self.flops += _flops(func, args, kwargs, result)

    def _see_new(self, values) -> None:
        """As `see`, once for each tensor: an operator that resizes one gives it as its result."""
        for value in values:
            if isinstance(value, Tensor):
                marks = value.__dict__
                if marks.get("_seen_by") is not self:
                    marks["_seen_by"] = self
                    self._see(value)
            elif isinstance(value, (list, tuple)):
                self._see_new(value)

    def _change(self, key, change):
        super()._change(key, change)
        if change < 0 and self._at_peak:
            self._at_peak = False
            self.current -= change  # as it was
            self._note_peak()
            self.current += change
        kind = self._kinds.get(key)
        if kind is None:  # a new storage
            kind = self._kinds[key] = "loss" if self.where.label == "loss" else "temporaries"
            self._origins[key] = self._operator, self.where.label
        self.split[kind] += change
        if self.current > self.peak:
            self._at_peak = True
            self.peak = self.current

    def _release(self, key):
        super()._release(key)
        self._kinds.pop(key, None)
        self._origins.pop(key, None)

    def _save(self, tensor: Tensor) -> Tensor:
        """Autograd keeps `tensor` for the backward."""
        self._see(tensor)
        key = tensor.untyped_storage()._cdata
        if self._kinds.get(key) == "temporaries":
            self._kinds[key] = "activations"
            size = self._storages[key][1] or 0
            self.split["temporaries"] -= size
            self.split["activations"] += size
        return tensor

    def _note_peak(self) -> None:
        """Describe this moment, if it is the highest so far: just before the first release."""
        if self.current <= self.peak_at.bytes:
            return
        alike: dict[tuple, int] = defaultdict(int)
        for key, origin in self._origins.items():
            size = self._storages[key][1]
            if size:
                alike[(size, self._kinds[key], *origin)] += 1
        largest = sorted(
            (
                (n * size, n, kind, _name(operator) or "before the step", label)
                for (size, kind, operator, label), n in alike.items()
            ),
            reverse=True,
        )
        self.peak_at = Peak(
            self.current, dict(self.split), *(self._place or ("", "")), _name(self._operator),
            largest[:12],
        )  # fmt: skip


def _name(operator) -> str:
    return operator.name() if operator is not None else ""


def _flops(func, args, kwargs, result) -> int:
    """Two for each multiply-add of a matrix product; of a causal mask, half of it."""
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
        return _attention(*args[:2], causal, 2)
    if func is _aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
        return _attention(*args[1:3], causal, 5)  # the logits again, and four products
    count = _counts.get(func, func)
    if count is func:
        packet = func._overloadpacket
        count = _counts[func] = flop_registry.get(_NOT_IN_PLACE.get(packet, packet))
    if count is None:
        return 0
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    return count(*args, **kwargs, out_val=result)


#: What torch's registry knows by another name.
_NOT_IN_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
#: Operators that have run, and what counts theirs.
_counts: dict = {}


def _attention(query: Tensor, key: Tensor, causal: bool, products: int) -> int:
    pairs = query.size(-2) * key.size(-2)
    if causal:
        pairs = (pairs + query.size(-2)) // 2
    return products * 2 * math.prod(query.shape[:-2]) * pairs * query.size(-1)
