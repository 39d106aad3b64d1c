"""CPU mode's stand-ins for torch: devices, streams, events, generators, and refusals.

"cuda", "cuda:N", N and torch.device("cuda") all mean the CPU. There is one device, one stream
that is always drained, and one random generator for "CPU" and "GPU" alike.
"""

import contextlib
import functools
import os
import time
import types

import torch
from torch.utils._device import _device_constructors
from torch.utils.data import dataloader


def stand_ins():
    """Yield (owner, name, stand-in) for everything in torch that CPU mode replaces."""
    yield from _factory_stand_ins()
    yield from _tensor_stand_ins()
    yield from _cuda_stand_ins()
    yield dataloader._BaseDataLoaderIter, "__init__", _loader_init


def _names_gpu(value) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        getattr(value, "type", None) == "cuda"
    )


def _factory(function):
    """A tensor factory that builds on the CPU, in pageable memory, whatever it is asked for."""

    @functools.wraps(function)
    def on_cpu(*args, **kwargs):
        device = kwargs.get("device")
        if _names_gpu(device) or (isinstance(device, int) and not isinstance(device, bool)):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # get_pos_emb_on_this_cp_rank pins; needs a GPU
        args = tuple("cpu" if _names_gpu(arg) else arg for arg in args)
        return function(*args, **kwargs)

    return on_cpu


def _factory_stand_ins():
    # Not a TorchFunctionMode: a mode is off while its handler runs, so recompute inside
    # autograd.backward would not see it. Replaced functions work in every thread.
    factories = set(_device_constructors())
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if callable(function) and _hashed_in(function, factories):
                yield owner, name, _factory(function)
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint"):
        yield torch, f"{name}_like", _factory(getattr(torch, f"{name}_like"))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        yield torch.Tensor, name, _factory(getattr(torch.Tensor, name))


def _hashed_in(function, functions) -> bool:
    try:
        return function in functions
    except TypeError:  # unhashable
        return False


def _tensor_stand_ins():
    to, type_ = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(to)
    def to_cpu(self, *args, **kwargs):
        if args and isinstance(args[0], int):  # a device index, as current_device() gives it
            args = ("cpu", *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if _names_gpu(arg) else arg for arg in args)
        if _names_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
        return self

    @functools.wraps(type_)
    def cuda_type(self, dtype=None, *args, **kwargs):
        # Megatron's optimizers and clipping sort parameters by 'torch.cuda.FloatTensor' etc.
        if dtype is None:
            return type_(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return type_(self, dtype, *args, **kwargs)

    yield torch.Tensor, "to", to_cpu
    yield torch.Tensor, "cuda", cuda
    yield torch.Tensor, "type", cuda_type
    yield torch.Tensor, "pin_memory", lambda self, device=None: self
    yield torch.Tensor, "record_stream", lambda self, stream: None


_loader_original = dataloader._BaseDataLoaderIter.__init__


@functools.wraps(_loader_original)
def _loader_init(self, loader):
    # A loader draws its workers' seed from the CPU's generator. With one generator that would
    # shift dropout: differently on ranks that read no data, and after a resume.
    state = torch.get_rng_state()
    _loader_original(self, loader)
    torch.set_rng_state(state)


# ---- torch.cuda: one device, one stream, the CPU's random numbers ----


class _Event:
    """A point in time; everything recorded before it has already happened."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._seconds = None

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event) -> float:
        return (end_event._seconds - self._seconds) * 1000.0  # ms

    def query(self) -> bool:
        return True

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass


class _Stream:
    """A stream that is always drained; also the context manager that `torch.cuda.stream` gives."""

    device_index = 0
    stream_id = cuda_stream = 0

    def __init__(self, device=None, priority=0, **kwargs):
        self.priority = priority

    @staticmethod
    def priority_range():
        return 0, 0

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        event = _Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


_STREAM = _Stream()


def _device_properties(device=None):
    # Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1 below compute capability 10, for the order
    # of kernels on a GPU's queues. Here there is no queue, so the environment is left alone.
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return types.SimpleNamespace(
        name="CPU", major=10, minor=0, total_memory=pages, multi_processor_count=os.cpu_count()
    )


def _refused(name, reason):
    def refuse(*args, **kwargs):
        raise RuntimeError(f"CPU mode (no GPU found): torch.cuda.{name}: {reason}")

    return refuse


def _refused_class(name, reason):
    return type(name, (), {"__init__": _refused(name, reason)})


def _nothing(*args, **kwargs):
    return None


_NO_MEMORY = "there is no device memory to measure; 0 would be a wrong number"
_MEMORY_READERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_snapshot",
    "memory_summary",
    "mem_get_info",
    "device_memory_used",
    "memory_usage",
)


def _cuda_stand_ins():
    cuda = torch.cuda
    # initialize.py skips model-parallel groups and seeds, silently, when there are 0 devices
    yield cuda, "device_count", lambda: 1
    # `device=torch.cuda.current_device()` everywhere; random.py has its own name for it
    yield cuda, "current_device", lambda: 0
    yield cuda.random, "current_device", lambda: 0
    yield cuda, "set_device", _nothing  # initialize.py
    yield cuda, "_exchange_device", lambda device: 0  # `with torch.cuda.device(...)`
    yield cuda, "_maybe_exchange_device", lambda device: 0
    yield cuda, "get_device_properties", _device_properties  # arguments.py
    yield cuda, "get_device_capability", lambda device=None: (10, 0)
    yield cuda, "get_device_name", lambda device=None: "CPU"
    # with these two, torch's own seeding and RNG-state functions work on the CPU's generator:
    # tensor_parallel/random.py, checkpointing.py, rerun_state_machine.py
    yield cuda, "is_initialized", lambda: True
    yield cuda, "default_generators", (torch.default_generator,)
    # checkpoints, timers, p2p, DDP and the MoE dispatchers order work with these
    yield cuda, "Stream", _Stream
    yield cuda, "Event", _Event
    yield cuda, "current_stream", lambda device=None: _STREAM
    yield cuda, "default_stream", lambda device=None: _STREAM
    yield cuda, "set_stream", _nothing
    yield cuda, "stream", lambda stream: stream or contextlib.nullcontext()
    yield cuda, "synchronize", _nothing
    yield cuda, "is_current_stream_capturing", lambda: False
    yield cuda, "empty_cache", _nothing  # nothing is cached: training.py, checkpointing.py
    yield cuda, "ipc_collect", _nothing
    yield cuda, "reset_peak_memory_stats", _nothing  # harmless, since reading them raises
    for name in _MEMORY_READERS:
        yield cuda, name, _refused(name, _NO_MEMORY)
    for name in ("_snapshot", "_record_memory_history", "_dump_snapshot"):
        yield cuda.memory, name, _refused(f"memory.{name}", _NO_MEMORY)
    for name in ("utilization", "temperature", "power_draw", "clock_rate"):
        yield cuda, name, _refused(name, "there is no GPU to measure")
    for name in ("graph_pool_handle", "make_graphed_callables"):
        yield cuda, name, _refused(name, "there are no CUDA graphs")
    for name in ("CUDAGraph", "graph"):
        yield cuda, name, _refused_class(name, "there are no CUDA graphs")
    for name in ("MemPool", "use_mem_pool"):
        yield cuda, name, _refused_class(name, "there is no device memory")
    yield cuda, "ExternalStream", _refused_class("ExternalStream", "there is no stream to wrap")
