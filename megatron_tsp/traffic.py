"""Count the bytes this rank sends: by collective, by process group, by kind of block.

Where it listens. Every Python-level collective of torch (``torch.distributed.all_reduce`` and
its kin, the asynchronous forms, ``batch_isend_irecv``, the coalescing manager, object
collectives, and any alias bound early such as Megatron's ``dist_all_gather_func``) ends in one
method of torch's C++ class ``torch.distributed.ProcessGroup``. `install` replaces those methods
on the class, so nothing can keep an uncounted reference. Collectives issued from C++ alone
(torch's own DDP reducer, the functional collectives used by DTensor) do not pass here; Megatron
uses neither.

What it counts. Bytes sent by this rank under the bandwidth-optimal algorithm, with D ranks in the
group and S bytes in the whole (gathered, unscattered, reduced or broadcast) buffer:

=====================  ==========================================================================
all_gather             S (D-1)/D
reduce_scatter         S (D-1)/D
all_reduce             2 S (D-1)/D
broadcast, reduce      S (D-1)/D    (D-1 hops of S in all, shared evenly by the D ranks)
send                   S            (a receive counts nothing)
all_to_all             the bytes of this rank's parts that go to other ranks, uneven splits too
gather                 the input, on every rank but the root
scatter                on the root, the parts of the other ranks
barrier                0
=====================  ==========================================================================

The sums are exact fractions. `Counter.snapshot` and `Counter.total` round to the nearest whole
byte only when they are read (``exact=True`` gives the fraction).

Nothing is replaced, and so nothing is slower, until `install` is called.
"""

import functools
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

BLOCKS = ("attention", "mlp", "embedding", "loss", "other")

# ---------------------------------------------------------------------------------------------
# Block labels
# ---------------------------------------------------------------------------------------------


class _Label(threading.local):
    """The kind of block this thread is in. Thread-local: CUDA backwards run in their own thread."""

    kind: str | None = None  # by `block`
    outside = "other"  # by `set_kind`


_label = _Label()


class block:
    """``with block("attention"): ...`` labels what this thread sends inside. The innermost wins.

    Autograd functions set it in their forward and again in their backward: the backward may run
    in another thread, which knows nothing of the forward's label.
    """

    __slots__ = ("kind", "outer")

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self):
        self.outer = _label.kind
        _label.kind = self.kind
        return self

    def __exit__(self, *exc):
        _label.kind = self.outer


def set_kind(kind: str) -> None:
    """Label what this thread sends from now on, outside of any `block`."""
    _label.outside = kind


# ---------------------------------------------------------------------------------------------
# Group names
# ---------------------------------------------------------------------------------------------

# Short names for the groups of two modules, most telling first: one group may have several roles.
_KNOWN_GROUPS = {
    "megatron_tsp.parallel_state": {
        "_TSP_GROUP": "tsp",
        "_WEIGHT_GROUP": "tsp-weights",
        "_KV_GROUP": "tsp-kv",
    },
    "megatron.core.parallel_state": {
        "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
        "_CONTEXT_PARALLEL_GROUP": "cp",
        "_DATA_PARALLEL_GROUP": "dp",
        "_DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
        "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
        "_MODEL_PARALLEL_GROUP": "tp-pp",
        "_EMBEDDING_GROUP": "embedding",
    },
}

_given_names: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
_found_names: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()


def name_group(pg: dist.ProcessGroup, name: str) -> None:
    """Give a process group the name under which its bytes are counted, from now on."""
    _given_names[pg] = name


def group_name(pg: dist.ProcessGroup) -> str:
    """The given name; else the group's name in Megatron or here; else "world" or "group of N"."""
    name = _given_names.get(pg) or _found_names.get(pg)
    if name is None:
        name = _found_names[pg] = _find_name(pg)
    return name


def _find_name(pg: dist.ProcessGroup) -> str:
    for module, names in _KNOWN_GROUPS.items():
        for variable, name in names.items():
            if getattr(sys.modules.get(module), variable, None) is pg:
                return name
    if dist.is_initialized() and pg is dist.group.WORLD:
        return "world"
    mpu = sys.modules.get("megatron.core.parallel_state")
    for variable, value in vars(mpu).items() if mpu else ():
        if value is pg:
            return variable.strip("_").lower().replace("_", "-").removesuffix("-group")
    return f"group of {pg.size()}"


# ---------------------------------------------------------------------------------------------
# The counter
# ---------------------------------------------------------------------------------------------

Key = tuple[str, str, str]


class Counter:
    """Bytes sent by this rank, keyed by (collective, group name, block kind)."""

    def __init__(self):
        self._lock = threading.Lock()
        self._sums: dict[Key, int | Fraction] = defaultdict(int)

    def add(self, collective: str, group: str, size: int | Fraction, kind: str | None = None):
        """Add `size` bytes sent. `kind` defaults to this thread's label (see `block`)."""
        if size:
            key = (collective, group, kind or _label.kind or _label.outside)
            with self._lock:
                self._sums[key] += size

    def snapshot(self, exact: bool = False) -> dict[Key, int | Fraction]:
        """Bytes by (collective, group, block) since the last `reset`.

        Each entry is rounded to the nearest byte; with `exact` it is the exact fraction.
        """
        with self._lock:
            sums = dict(self._sums)
        return sums if exact else {key: round(size) for key, size in sums.items()}

    def total(self, exact: bool = False) -> int | Fraction:
        """Bytes sent since the last `reset`: the exact sum, rounded once at the end."""
        with self._lock:
            size = sum(self._sums.values())
        return size if exact else round(size)

    def reset(self) -> None:
        """Start again from zero; groups without a given name are looked up anew."""
        with self._lock:
            self._sums.clear()
        _found_names.clear()


# ---------------------------------------------------------------------------------------------
# How many bytes one call sends
# ---------------------------------------------------------------------------------------------


def _nbytes(tensors) -> int:
    """Bytes of a tensor, or of a nested list of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(t) for t in tensors)


def _share(size: int, ranks: int, times: int = 1) -> int | Fraction:
    """times * size * (ranks - 1) / ranks, exactly; an int when it is whole."""
    whole, rest = divmod(times * size * (ranks - 1), ranks)
    return whole + Fraction(rest, ranks) if rest else whole


def _argument(args: tuple, kwargs: dict, position: int, *names: str, default=None):
    """An argument of an overloaded method: by position, or by whichever name it has there."""
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _root(args: tuple, kwargs: dict, position: int) -> int:
    """The root rank, given as an int or inside an options object."""
    root = _argument(args, kwargs, position, "opts", "root", default=0)
    return getattr(root, "rootRank", root)


_OUTPUT = ("output_tensors", "outputs", "output_lists", "output", "output_tensor")
_INPUT = (
    "input_tensors", "inputs", "input_list", "input", "inputTensor", "input_tensor"
)  # fmt: skip


def _whole_at(position: int, *names: str, times: int = 1) -> Callable:
    """The rule S (D-1)/D, where the argument at `position` is the whole buffer."""

    def rule(pg, args, kwargs):
        return _share(_nbytes(_argument(args, kwargs, position, *names)), pg.size(), times)

    return rule


def _send(pg, args, kwargs):
    return _nbytes(_argument(args, kwargs, 0, "tensors"))


def _all_to_all(pg, args, kwargs):
    parts = _argument(args, kwargs, 1, *_INPUT)
    return _nbytes(parts) - _nbytes(parts[pg.rank()])


def _all_to_all_single(pg, args, kwargs):
    whole = _argument(args, kwargs, 1, *_INPUT)
    splits = _argument(args, kwargs, 3, "input_split_sizes")  # a list, or Megatron's array
    if splits is None or len(splits) == 0:
        return _share(_nbytes(whole), pg.size())
    row = _nbytes(whole[0]) if len(whole) else 0
    return row * (sum(splits) - splits[pg.rank()])


def _gather(pg, args, kwargs):
    if pg.rank() == _root(args, kwargs, 2):
        return 0
    return _nbytes(_argument(args, kwargs, 1, *_INPUT))


def _scatter(pg, args, kwargs):
    if pg.rank() != _root(args, kwargs, 2):
        return 0
    parts = _argument(args, kwargs, 1, *_INPUT)
    if parts and not isinstance(parts[0], torch.Tensor):  # the list form: one list per device
        parts = parts[0]
    return _nbytes(parts) - _nbytes(parts[pg.rank()])


def _nothing(pg, args, kwargs):
    return 0


class _Hook(NamedTuple):
    collective: str
    rule: Callable


_ALL_REDUCE = _Hook("all_reduce", _whole_at(0, "tensors", "tensor", times=2))
_ALL_GATHER = _Hook("all_gather", _whole_at(0, *_OUTPUT))
_REDUCE_SCATTER = _Hook("reduce_scatter", _whole_at(1, *_INPUT))

#: Every method of ``ProcessGroup`` that moves data between ranks. Old and new names both: torch
#: renames them now and then, and only those that exist are hooked.
HOOKS = {
    "allreduce": _ALL_REDUCE,
    "allreduce_coalesced": _ALL_REDUCE,
    "allgather": _ALL_GATHER,
    "allgather_coalesced": _ALL_GATHER,
    "_allgather_base": _ALL_GATHER,
    "all_gather_single": _ALL_GATHER,
    "allgather_into_tensor_coalesced": _ALL_GATHER,
    "all_gather_single_coalesced": _ALL_GATHER,
    "reduce_scatter": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "reduce_scatter_single": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER,
    "broadcast": _Hook("broadcast", _whole_at(0, "tensors", "tensor")),
    "reduce": _Hook("reduce", _whole_at(0, "tensors", "tensor")),
    "send": _Hook("send", _send),
    "recv": _Hook("recv", _nothing),
    "recv_anysource": _Hook("recv", _nothing),
    "alltoall": _Hook("all_to_all", _all_to_all),
    "alltoall_base": _Hook("all_to_all", _all_to_all_single),
    "all_to_all_single": _Hook("all_to_all", _all_to_all_single),
    "gather": _Hook("gather", _gather),
    "scatter": _Hook("scatter", _scatter),
    "barrier": _Hook("barrier", _nothing),
    "monitored_barrier": _Hook("barrier", _nothing),
}

#: The other methods of ``ProcessGroup``: none of them moves tensors.
NO_DATA = frozenset(
    """
    abort boxed get_group_store merge_remote_group name rank set_timeout shutdown size split_group
    unbox _backend_id _enable_collectives_timing _end_coalescing _get_backend _get_backend_name
    _get_sequence_number_for_group _has_hooks _id _pybind11_conduit_v1_ _register_backend
    _register_on_completion_hook _set_default_backend _set_group_desc _set_group_name
    _set_sequence_number_for_group _start_coalescing _wait_for_pending_works
    """.split()
)


def unknown_methods() -> list[str]:
    """Methods of this torch's ``ProcessGroup`` about which this module knows nothing."""
    return sorted(
        name
        for name, value in vars(dist.ProcessGroup).items()
        if not name.startswith("__")
        and callable(getattr(dist.ProcessGroup, name))
        and not isinstance(value, (type, property))
        and name not in HOOKS
        and name not in NO_DATA
    )


# ---------------------------------------------------------------------------------------------
# Install
# ---------------------------------------------------------------------------------------------

_counter: Counter | None = None
_originals: dict[str, object] = {}


def install() -> Counter:
    """Start counting in this process, and return the one counter. Calling it again is harmless."""
    global _counter
    if _counter is not None:
        return _counter
    if unknown := unknown_methods():
        warnings.warn(
            f"torch {torch.__version__} has ProcessGroup methods that the traffic counter does not "
            f"know: {', '.join(unknown)}. What they send is not counted.",
            stacklevel=2,
        )
    counter = Counter()
    for name, hook in HOOKS.items():
        original = vars(dist.ProcessGroup).get(name)
        if original is not None:
            _originals[name] = original
            setattr(
                dist.ProcessGroup, name, _counted(getattr(dist.ProcessGroup, name), hook, counter)
            )
    _counter = counter
    return counter


def uninstall() -> None:
    """Put torch's own methods back. The counter keeps what it has counted."""
    global _counter
    for name, original in _originals.items():
        setattr(dist.ProcessGroup, name, original)
    _originals.clear()
    _counter = None


def _counted(method: Callable, hook: _Hook, counter: Counter) -> Callable:
    """`method`, then the bytes it sent added to `counter`. A call that raises counts nothing."""
    collective, rule = hook

    @functools.wraps(method)
    def call(pg, *args, **kwargs):
        work = method(pg, *args, **kwargs)
        if size := rule(pg, args, kwargs):
            counter.add(collective, group_name(pg), size)
        return work

    return call
