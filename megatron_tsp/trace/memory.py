"""Live bytes of this rank's tensors, exactly, where the device keeps no statistics of its own.

On CUDA ``torch.cuda.max_memory_allocated`` answers this; on CPU it reads 0. `LiveBytes` watches
every operator's inputs and outputs; `Storages` follows each *storage* (not tensor: views share one)
from the first time it is seen to its release.
"""

import gc
import sys
import weakref

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

#: The size of a storage whose memory is counted as another's.
_SHARED = None


class Storages:
    """``with Storages() as live: ...`` counts the bytes of every storage that `see` was shown.

    Attributes:
        current: bytes alive now.
        peak: the highest `current` since the start or since `reset_peak`.

    On entry it counts what exists already: parameters, gradients, optimizer state, buffers.

    Counted: the size of each storage, once, however many tensors view it. Not counted: storages
    that torch's allocator does not own (NumPy arrays, memory-mapped files, shared memory), the
    scratch space inside one operator, the send and receive buffers of the communication library,
    and tensors that exist on entry but are held by C++ alone (those a graph saved for a backward)
    until an operator touches them.
    """

    def __init__(self):
        super().__init__()
        self.current = 0
        self.peak = 0
        # Key: address of the storage. The entry goes when the storage does, before reuse.
        self._storages: dict[int, tuple[weakref.ref, int | None]] = {}

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        # These two are no operators: nothing else tells.
        torch.UntypedStorage.resize_ = lambda *args: self._resized(*args)
        self._recompute = sys.modules.get("megatron.core.tensor_parallel.random")
        if self._recompute is not None:
            self._share = self._recompute._get_share_storage
            self._recompute._get_share_storage = lambda: self._shared
        for tensor in existing_tensors():
            self._see(tensor)
        self.peak = self.current
        return self

    def __exit__(self, *exc):
        torch.UntypedStorage.resize_ = self._resize
        if self._recompute is not None:
            self._recompute._get_share_storage = self._share
        self._storages.clear()  # drops the weak references, and with them their callbacks

    def reset_peak(self) -> None:
        """Measure the peak anew from here."""
        self.peak = self.current

    def see(self, values) -> None:
        """Look at the tensors among `values`, and in its lists and tuples."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._see(value)
            elif isinstance(value, (list, tuple)):
                self.see(value)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = _owned_storage(tensor)
        if storage is None:
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            release = weakref.ref(storage, lambda _, key=key: self._release(key))
            self._storages[key] = (release, size)
            self._change(key, size)
        elif known[1] is not _SHARED and known[1] != size:  # resized in place
            self._storages[key] = (known[0], size)
            self._change(key, size - known[1])

    def _resized(self, storage: torch.UntypedStorage, size: int):
        """`UntypedStorage.resize_`, with which Megatron empties what it will recompute."""
        result = self._resize(storage, size)
        known = self._storages.get(storage._cdata)
        if known is not None and known[1] is not _SHARED:
            self._storages[storage._cdata] = (known[0], size)
            self._change(storage._cdata, size - known[1])
        return result

    def _shared(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Megatron gives an emptied storage the memory of a recomputed one, which lives as long."""
        self._share()(to, source)
        storage = to.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and known[1] is not _SHARED:
            self._storages[storage._cdata] = (known[0], _SHARED)
            self._change(storage._cdata, -known[1])

    def _release(self, key: int) -> None:
        known = self._storages.get(key)
        if known is not None:
            if known[1] is not _SHARED:
                self._change(key, -known[1])
            del self._storages[key]

    def _change(self, key: int, change: int) -> None:
        """The storage `key` grew by `change` bytes."""
        self.current += change


class LiveBytes(Storages, TorchDispatchMode):
    """``with LiveBytes() as live: ...`` measures live tensor bytes of this process.

    The mode follows autograd, so a backward inside the ``with`` is measured too. It costs some tens
    of microseconds per operator: do not time what it measures.
    """

    def __enter__(self):
        Storages.__enter__(self)
        # gloo reduce-scatters a copy of its input, which shows when it is waited for.
        self._wait = dist.Work.wait
        dist.Work.wait = lambda *args, **kwargs: self._unseen(self._wait, *args, **kwargs)
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *exc):
        TorchDispatchMode.__exit__(self, *exc)
        dist.Work.wait = self._wait
        Storages.__exit__(self)

    @staticmethod
    def _unseen(function, *args, **kwargs):
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.see(args)
        self.see(kwargs.values())
        result = func(*args, **kwargs)
        self.see((result,))
        self.peak = max(self.peak, self.current)
        return result


def existing_tensors():
    """Every tensor that Python can reach in this process, and the gradients they hold."""
    for thing in gc.get_objects():
        # type(), not isinstance(): some objects answer __class__ by running code.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _owned_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, if torch's allocator owns its memory."""
    if tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" and not isinstance(tensor, FakeTensor):
            return None
        # Memory that came from elsewhere (NumPy, mmap, shared memory) cannot be resized.
        return storage if storage.resizable() else None
    except (NotImplementedError, RuntimeError):  # subclasses that wrap others have no storage
        return None
