"""CPU mode's stand-ins for the few Megatron functions that no torch stand-in can help."""

import functools

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe import moe_utils
from megatron.training import initialize
from megatron.training.utils import common_utils


def stand_ins():
    """Yield (owner, name, stand-in) for everything in Megatron that CPU mode replaces."""
    # asserts torch.cuda.is_available() unless told otherwise, which `pretrain` never does
    yield initialize, "initialize_megatron", _initialize_without_cuda
    # Its warm-up draws random numbers, of a shape that depends on TP and SP. On a GPU the CPU's
    # generator stays as it was; here there is one generator, and losses would move.
    yield initialize, "_warmup_jit_function", _nothing
    yield common_utils, "report_memory", _nothing  # after the first iterations, always
    # torch.norm in fp32 on the CPU is off by some 1e-6, more for larger tensors: TP 1 and TP 4,
    # with shards of other sizes, would clip by other norms
    yield clip_grads, "l2_norm_impl", _l2_norm
    yield moe_utils, "maybe_move_tensor_to_cpu", _move_to_host
    yield FileSystemWriterAsync, "preload_tensors", staticmethod(_preload_copies)
    yield PersistentAsyncCaller, "async_loop", staticmethod(_checkpoint_worker)


_initialize = initialize.initialize_megatron
_async_loop = PersistentAsyncCaller.async_loop


@functools.wraps(_initialize)
def _initialize_without_cuda(allow_no_cuda=True, *args, **kwargs):
    return _initialize(True, *args, **kwargs)


def _l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args):
    norms = [torch.norm(tensor, dtype=torch.float64) for tensor in tensor_lists[0]]
    return torch.stack(norms).norm().float().view(1), None


def _nothing(*args, **kwargs):
    return None


def _move_to_host(tensor, as_numpy=False, record_stream=False):
    # Megatron converts only when `is_cuda`; the all-to-all then gets tensors for split sizes.
    if as_numpy and hasattr(tensor, "numpy"):
        return tensor.numpy()
    return tensor


def _preload_copies(write_buckets, non_blocking=True):
    # From a GPU this copies to the host, and training goes on while a worker process writes the
    # copy. On the CPU .to("cpu") copies nothing: the worker would write what training changes.
    return [
        (file_name, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file_name, key, (data, tensors) in write_buckets
    ]


def _checkpoint_worker(*args, **kwargs):
    # A new process: it divides by the number of devices before anything else.
    from megatron_tsp import cpu

    cpu.engage()
    _async_loop(*args, **kwargs)
