"""CPU mode: Megatron's own training loop, unedited, on CPU and gloo.

Megatron names "cuda" throughout and asks torch.cuda for devices, streams and generators.
`engage` answers with stand-ins when the machine has no GPU. Tensors stay ordinary CPU tensors
and `torch.cuda.is_available()` stays False (True would make data loaders pin memory). Streams
are no-ops, because CPU operations have finished when they return; so races between streams
cannot show here. What CPU mode cannot do faithfully raises instead of pretending.

Written for the torch and megatron-core versions that this package pins: it replaces private
names, and `engage` says which one a different version lacks.
"""

import contextlib
import functools
import importlib
import os
import sys
import time
import types

from megatron_tsp.errors import TSPError

_engaged = False

# Defaults that CPU mode needs, by argparse dest. None is a kernel or backend that a CPU has.
_REQUIRED = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
}
_PREFERRED = {"num_workers": 0}  # loader processes cost more than they save on a small model

# dest: (flag, why CPU mode cannot honour it). Refused when set to anything but off.
_REFUSED_FLAGS = {
    "cuda_graph_impl": ("--cuda-graph-impl", "there are no CUDA graphs"),
    "enable_cuda_graph": ("--enable-cuda-graph", "there are no CUDA graphs"),
    "external_cuda_graph": ("--external-cuda-graph", "there are no CUDA graphs"),
    "log_memory_to_tensorboard": ("--log-memory-to-tensorboard", "there is no device memory"),
    "log_memory_interval": ("--log-memory-interval", "there is no device memory"),
    "log_device_memory_used": ("--log-device-memory-used", "there is no device memory"),
    "record_memory_history": ("--record-memory-history", "there is no device memory"),
    "log_straggler": ("--log-straggler", "Megatron's detector is silent without a GPU"),
    "log_energy": ("--log-energy", "it reads the GPU's counters"),
    "nvtx_ranges": ("--nvtx-ranges", "there is no GPU timeline"),
    "gpu_sniff_test_interval": ("--gpu-sniff-test-interval", "there is no GPU"),
    "use_persistent_ckpt_worker": (
        "--use-persistent-ckpt-worker",
        "its worker is a new process, without CPU mode; plain --async-save works",
    ),
    "inprocess_restart": ("--inprocess-restart", "it restarts NCCL"),
    "use_megatron_fsdp": ("--use-megatron-fsdp", "it needs CUDA device meshes"),
    "use_torch_fsdp2": ("--use-torch-fsdp2", "it needs CUDA device meshes"),
    "use_nccl_ub": ("--use-nccl-ub", "there is no NCCL"),
    "nccl_ub": ("--use-nccl-ub", "there is no NCCL"),
    "use_sharp": ("--use-sharp", "there is no NCCL"),
    "nccl_communicator_config_path": ("--nccl-communicator-config-path", "there is no NCCL"),
    "high_priority_stream_groups": ("--high-priority-stream-groups", "there is no NCCL"),
    "fp8": ("--fp8-format", "it needs Transformer Engine"),
    "fp4": ("--fp4-format", "it needs Transformer Engine"),
    "tp_comm_overlap": ("--tp-comm-overlap", "it needs Transformer Engine"),
    "batch_invariant_mode": ("--batch-invariant-mode", "its kernels are GPU kernels"),
    "moe_grouped_gemm": ("--moe-grouped-gemm", "its kernels are GPU kernels"),
    "optimizer_cpu_offload": ("--optimizer-cpu-offload", "all memory is the CPU's"),
    "cpu_offloading_num_layers": ("--cpu-offloading-num-layers", "all memory is the CPU's"),
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "all memory is the CPU's",
    ),
}


def engaged() -> bool:
    """Whether CPU mode is on in this process."""
    return _engaged


def engage() -> bool:
    """Install the stand-ins if this machine has no GPU; returns whether CPU mode is on.

    With a GPU it returns False and changes nothing. Repeated calls change nothing more. Works
    before and after Megatron's import; names that other code took out of torch itself beforehand
    (``from torch import empty``) are out of reach.
    Raises ``TSPError`` naming the first torch or Megatron name that the installed version lacks.
    """
    global _engaged
    if _engaged:
        return True
    import torch

    if torch.cuda.is_available():
        return False
    # Megatron's jit_fuser is torch.compile, which costs a compiler run for each fused function
    # and shape; the eager functions are the same arithmetic.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    importlib.import_module("torch._dynamo")  # its tables want torch's own functions
    torch.compiler.set_stance("force_eager")  # functions compiled earlier

    for owner, name, stand_in in _torch_stand_ins():
        _replace(owner, name, stand_in)
    _engaged = True
    for owner, name, stand_in in _megatron_stand_ins():
        _replace(owner, name, stand_in, everywhere=True)
    from megatron_tsp.wheel import fill_gaps

    fill_gaps()
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            "no accelerator: CPU mode (gloo; streams are no-ops, device memory is not measured)",
            flush=True,
        )
    return True


def default_flags() -> dict:
    """Values, by argparse dest, for the flags CPU mode needs where the user gives none."""
    return {**_REQUIRED, **_PREFERRED}


def check_flags(args) -> None:
    """Raise ``TSPError`` for a parsed flag that CPU mode cannot honour, naming it."""
    for dest, needed in _REQUIRED.items():
        given = getattr(args, dest, needed)
        if given != needed:
            flag = "--" + dest.replace("_", "-")
            raise TSPError(
                f"CPU mode (no GPU found) needs {flag} {needed}, not {given!r}. Leave the flag "
                "out, or run on a GPU."
            )
    for dest, (flag, reason) in _REFUSED_FLAGS.items():
        given = getattr(args, dest, None)
        if given and given != "none":
            _refuse_flag(flag, reason)
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        _refuse_flag("--moe-token-dispatcher-type flex", "DeepEP and HybridEP are GPU libraries")
    if getattr(args, "profile", False) and not args.use_pytorch_profiler:
        _refuse_flag("--profile", "Nsight profiles a GPU; add --use-pytorch-profiler")


def _refuse_flag(flag, reason):
    raise TSPError(f"CPU mode (no GPU found) cannot honour {flag}: {reason}.")


def _replace(owner, name, stand_in, everywhere=False) -> None:
    original = getattr(owner, name, None)
    if original is None and not hasattr(owner, name):
        import torch

        raise TSPError(
            f"CPU mode: this torch ({torch.__version__}) or megatron-core has no "
            f"{getattr(owner, '__name__', owner)}.{name}, which CPU mode replaces. Install the "
            "versions that this package pins."
        )
    setattr(owner, name, stand_in)
    if everywhere:  # modules that took the function by name before
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("megatron."):
                for key, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, key, stand_in)


# ---- devices: "cuda", "cuda:N", N and torch.device("cuda") all mean the CPU ----


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
    import torch
    from torch.utils._device import _device_constructors

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
    import torch

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
    import torch

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


def _torch_stand_ins():
    yield from _factory_stand_ins()
    yield from _tensor_stand_ins()
    yield from _cuda_stand_ins()


# ---- Megatron: the few functions that no torch stand-in can help ----


def _report_memory(name, process_group=None):
    """In place of Megatron's report of device memory after the first iterations."""


def _move_to_host(tensor, as_numpy=False, record_stream=False):
    # Megatron converts only when `is_cuda`; the all-to-all then gets tensors for split sizes.
    if as_numpy and hasattr(tensor, "numpy"):
        return tensor.numpy()
    return tensor


def _megatron_stand_ins():
    initialize = importlib.import_module("megatron.training.initialize")
    importlib.import_module("megatron.training.training")

    original = initialize.initialize_megatron

    @functools.wraps(original)
    def initialize_without_cuda(allow_no_cuda=True, *args, **kwargs):
        return original(True, *args, **kwargs)

    yield initialize, "initialize_megatron", initialize_without_cuda
    # Its warm-up draws random numbers, of a shape that depends on TP and SP. On a GPU they come
    # from a generator that is reset later; here there is one generator, and losses would move.
    yield initialize, "_warmup_jit_function", _nothing
    yield importlib.import_module("megatron.training.utils.common_utils"), "report_memory", (
        _report_memory
    )
    yield importlib.import_module("megatron.core.transformer.moe.moe_utils"), (
        "maybe_move_tensor_to_cpu"
    ), _move_to_host
