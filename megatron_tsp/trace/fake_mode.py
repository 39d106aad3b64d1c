"""Tensors that have sizes and no contents, made fast.

torch's `FakeTensorMode` says what every operator gives, and takes some 200 microseconds for it. A
step of a large model has hundreds of thousands of operators, nearly all of them on shapes that were
met before: `FakeMode` asks once for each, and remembers.
"""

import contextlib
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")
_empty_strided = torch._C._VariableFunctions.empty_strided  # CPU mode replaces torch's


class FakeMode(FakeTensorMode):
    """`FakeTensorMode` on the CPU, in which ``tensor.item()`` answers 1.0, 0 or False where it
    cannot know."""

    def __init__(self):
        # Real tensors come in from outside, such as the states of random generators.
        super().__init__(allow_non_fake_inputs=True)
        self._ledger = None
        #: By operator and what its arguments look like: what its result looks like.
        self._known: dict[tuple, _Look | list[_Look] | None] = {}
        self._state = dict(FakeTensor(self, _empty((0,), (1,), torch.float32), _CPU).__dict__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs more than the rest

    @contextlib.contextmanager
    def shown_to(self, ledger):
        """``with mode.shown_to(ledger)``: the mode, which calls `ledger.before` and `ledger.after`
        every operator."""
        self._ledger = ledger
        try:
            with self:
                yield
        finally:
            self._ledger = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:  # asked more often than all else together
            return args[0].fake_device
        kwargs = kwargs or {}
        ledger, self._ledger = self._ledger, None  # it is not shown the parts of operators
        try:
            if ledger is None:
                return self._run(func, types, args, kwargs)
            ledger.before(func, args, kwargs)
            result = self._run(func, types, args, kwargs)
            ledger.after(func, args, kwargs, result)
            return result
        finally:
            self._ledger = ledger

    def _run(self, func, types, args, kwargs):
        if func in _OUT:
            return kwargs["out"]
        if func is _aten._local_scalar_dense.default and args[0].constant is None:
            # The loop reads losses, norms and Adam's count, by which it divides; flags, where 0
            # asks for nothing; and whether a loss is NaN.
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        key = _key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _IN_PLACE:
            return args[0]
        look = self._known.get(key)
        if type(look) is _Look:
            return self._like(look, args)
        if look is not None:
            return [self._like(one, args) for one in look]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in self._known:
            self._known[key] = _look(func, args, result)
        return result

    def _collective(self, func, args, kwargs):
        """It gives what it was given, and something to wait for."""
        # torch's in_kernel_invocation_manager
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            self.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                return func(*args, **kwargs)
            finally:
                self.in_kernel_invocation = False

    def _like(self, look, args) -> FakeTensor:
        """A result that looks like this."""
        size, stride, dtype, offset = look
        if offset is None:
            elem = _empty(size, stride, dtype)
        else:
            elem = _empty((0,), (1,), dtype)
            elem.set_(args[0].untyped_storage(), offset, size, stride)
        # what FakeTensor(self, elem, "cpu") makes
        made = torch.Tensor._make_subclass(
            FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._state)
        return made


class _Look(NamedTuple):
    """`offset`: of a view of the first argument, in its storage; None if it has its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int | None


def _empty(size, stride, dtype) -> torch.Tensor:
    return _empty_strided(size, stride, dtype=dtype, device="meta")


def _key(func, args, kwargs) -> tuple | None:
    """What the result depends on, if that is no more than looks of fake tensors and numbers."""
    key = [func]
    if not _add(key, args):
        return None
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            if not _add(key, (value,)):
                return None
    return tuple(key)


def _add(key: list, values) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            key += (value.shape, value.stride(), value.dtype, value.storage_offset())
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _add(key, value):
                return False
        elif kind in _PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal, and make other dtypes
        else:
            return False
    return True


_PLAIN = {
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
}  # fmt: skip


def _look(func, args, result) -> _Look | list[_Look] | None:
    """How the result looks, or each of several; None if there is more to it."""
    if isinstance(result, (list, tuple)):
        looks = [_look(func, args, one) for one in result]
        return None if None in looks else looks
    if type(result) is not FakeTensor or result.constant is not None or func._schema.is_mutable:
        return None
    storage = result.untyped_storage()
    look = _Look(tuple(result.shape), result.stride(), result.dtype, None)
    if func in _VIEWS:
        return look._replace(offset=result.storage_offset())
    given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
    whole = _empty(*look[:3]).untyped_storage().nbytes() == storage.nbytes()
    plain = whole and storage._cdata not in given and result.fake_device == _CPU
    return look if plain else None


# What they return is their first argument, whatever is in it.
_IN_PLACE = {
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor,
    _aten.mul_.Scalar, _aten.div_.Tensor, _aten.exp_.default, _aten.addmm_.default,
    _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.square_.default,
    _aten.scatter_add_.default, _aten.index_copy_.default, _aten.index_add_.default,
    _aten.add_.Scalar, _aten.sqrt_.default, _aten.addcmul_.default, _aten.addcdiv_.default,
    _aten.lerp_.Scalar,
}  # fmt: skip
_OUT = {_aten.mm.out, _aten.addmm.out, _aten.mul.out}
_VIEWS = {
    _aten.slice.Tensor, _aten.view.default, _aten.view.dtype, _aten.permute.default,
    _aten.unbind.int, _aten.expand.default, _aten.squeeze.dim, _aten.unsqueeze.default,
    _aten.t.default, _aten.transpose.int, _aten.select.int, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.detach.default, _aten.alias.default,
}  # fmt: skip
