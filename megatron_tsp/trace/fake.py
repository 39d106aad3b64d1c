"""One rank of a job that is not there: a process group and tensors that have sizes and no contents.

torch's fake process group answers every collective at once and moves nothing; in `FakeMode` every
operator gives a tensor of the right shape and does no arithmetic. What Megatron's training
loop asks of them and they do not have gets a stand-in here, each with its reason.
"""

import os
import weakref

import torch
import torch.distributed as dist


def start(rank: int, world: int) -> None:
    """Make this process rank `rank` of `world`, with nobody at the other end, for good.

    What counts the bytes sent (`traffic.install`) comes before.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    for owner, name, stand_in in _stand_ins(rank):
        if not hasattr(owner, name):
            raise AttributeError(f"{owner.__name__} has no {name}, which the tracer replaces")
        setattr(owner, name, stand_in)


def _stand_ins(rank: int):
    """Yield (owner, name, stand-in)."""
    from megatron.core import parallel_state as mpu
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
    from megatron.core.tensor_parallel import random

    from megatron_tsp.layers import embedding
    from megatron_tsp.trace import experts

    # Objects travel as bytes, and fake tensors have none.
    yield dist, "all_gather_object", _all_gather_object
    # Fake tensors have no rule for these operators: one by one, and counted so.
    for name, single in _COALESCED.items():
        if hasattr(dist.ProcessGroup, name):
            yield dist.ProcessGroup, name, _one_by_one(getattr(dist.ProcessGroup, single))
    # Groups of other ranks are of no use here, and a large world has very many.
    yield mpu, "create_group", _only_own(mpu.create_group, rank)
    # `module.bfloat16()` swaps a parameter's contents, which torch refuses for fake ones.
    yield torch.nn.Module, "_apply", _apply
    # It reads a number from the GPU: whether fp16 gradients overflowed.
    unscale = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan
    yield MixedPrecisionOptimizer, "_unscale_main_grads_and_check_for_nan", _finite(unscale)
    # It copies pointers, and there are none.
    yield random, "_get_share_storage", lambda: _share_storage
    # A generator's state, copied, is a fake tensor; and nothing is drawn.
    for owner, name in _STATE_SETTERS:
        yield owner, name, _nothing
    yield random, "_set_cuda_rng_state", _nothing
    # These depend on the token ids.
    yield embedding, "_routes", _even_routes
    yield embedding, "_owned", _even_owned
    yield from experts.stand_ins()


_COALESCED = {
    "allreduce_coalesced": "allreduce",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}


_STATE_SETTERS = (
    (torch, "set_rng_state"),
    (torch.random, "set_rng_state"),
    (torch.cuda, "set_rng_state"),
)


def _nothing(*args, **kwargs) -> None:
    pass


def _one_by_one(single):
    def coalesced(group, *args, **kwargs):
        tensors = [value for value in args if isinstance(value, list)]
        for each in zip(*tensors, strict=True):
            work = single(group, *each)
        return work

    return coalesced


def _all_gather_object(objects, own, group=None) -> None:
    objects[:] = [own] * len(objects)


def _only_own(create_group, rank):
    def create(ranks=None, *args, **kwargs):
        return create_group(ranks, *args, **kwargs) if ranks is None or rank in ranks else None

    return create


def _apply(self, function, recurse=True):
    if recurse:
        for child in self.children():
            child._apply(function)
    for name, old in self._parameters.items():
        if old is None:
            continue
        with torch.no_grad():
            value = function(old)
        if value is not old:
            new = torch.nn.Parameter(value, old.requires_grad)
            new.__dict__.update(old.__dict__)  # Megatron's marks
            self._parameters[name] = new
    for name, old in self._buffers.items():
        self._buffers[name] = None if old is None else function(old)
    return self


def _finite(unscale):
    def unscale_and_find_no_overflow(self):
        unscale(self)
        return False

    return unscale_and_find_no_overflow


def _share_storage(to: torch.Tensor, source: torch.Tensor) -> None:
    storage, held = to.untyped_storage(), source.untyped_storage()
    storage.resize_(held.nbytes())
    weakref.finalize(storage, lambda _: None, held)  # the source lives as long


def _share(count: int, parts: int, part: int) -> int:
    """The part's share of `count` things that are spread evenly, the first ones rounded up."""
    return count // parts + (part < count % parts)


def _even_routes(ids, rows, rank):
    """`embedding._routes` where each rank's tokens are spread evenly over the vocabulary."""
    ranks, tokens = ids.shape
    send = [_share(tokens, ranks, rank)] * ranks
    receive = [_share(tokens, ranks, owner) for owner in range(ranks)]
    return ids.new_empty(sum(send)), ids.new_empty(tokens), send, receive


def _even_owned(ids, owner, size):
    """`embedding._owned`, likewise."""
    from megatron_tsp.parallel_state import get_tsp_world_size

    tokens = _share(ids.size(0), get_tsp_world_size(), owner)
    return ids.new_empty(tokens), ids.new_empty(tokens)
