"""The TSP dimension of the device grid, next to Megatron's own, and its communicators.

Today the TSP axis is Megatron's tensor-parallel axis: `--tsp-size D` sets TP = D. Code asks here
and never assumes so. A sequence is spread over the *token group*: the TSP group, or beside context
parallelism of C the D x C ranks of Megatron's tensor-and-context-parallel group. There are two more
communicators, one over the TSP group for weight shards, one over the token group for K and V: NCCL
runs what shares a communicator one after the other, and a shard must not queue behind Megatron's
collectives.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_tsp import streaming
from megatron_tsp.errors import TSPError

_TSP_GROUP: dist.ProcessGroup | None = None
_TOKEN_GROUP: dist.ProcessGroup | None = None
_WEIGHT_GROUP: dist.ProcessGroup | None = None
_KV_GROUP: dist.ProcessGroup | None = None


def initialize_model_parallel(tsp_size: int, timeout: timedelta | None = None) -> None:
    """Create the TSP groups. Every rank calls it, after Megatron's `initialize_model_parallel`.

    Raises:
        TSPError: Megatron's groups do not exist yet, its tensor-parallel size is not `tsp_size`,
            the TSP groups exist already, or Megatron's order of ranks is not tensor parallel
            inside context parallel.
    """
    global _TSP_GROUP, _TOKEN_GROUP, _WEIGHT_GROUP, _KV_GROUP
    if not mpu.model_parallel_is_initialized():
        raise TSPError("call Megatron's initialize_model_parallel before megatron_tsp's")
    if is_initialized():
        raise TSPError("the TSP groups exist already; call destroy_model_parallel first")
    tp = mpu.get_tensor_model_parallel_group()
    if tp.size() != tsp_size:
        raise TSPError(
            f"TSP size {tsp_size} needs tensor parallel size {tsp_size}, not {tp.size()}"
        )
    context = mpu.get_context_parallel_group()
    tokens = tp if context.size() == 1 else mpu.get_tensor_and_context_parallel_group()
    # Megatron cuts the sequence in zigzag over the context-parallel ranks, and TSP cuts each part
    # so over its D. In this order of ranks that is the zigzag over all D x C of them.
    if tokens.rank() != context.rank() * tp.size() + tp.rank():
        raise TSPError(
            f"rank {tokens.rank()} of the tensor-and-context-parallel group should be rank "
            f"{context.rank() * tp.size() + tp.rank()}: TSP needs Megatron's order tp-cp"
        )
    _TSP_GROUP, _TOKEN_GROUP = tp, tokens
    _WEIGHT_GROUP = _communicator(tp, timeout, "TSP_WEIGHT_GROUP")
    _KV_GROUP = _communicator(tokens, timeout, "TSP_KV_GROUP")


def _communicator(over: dist.ProcessGroup, timeout, description: str) -> dist.ProcessGroup:
    """One more communicator over the ranks of `over`.

    As Megatron does, every rank takes part in making every group. (Local synchronization would name
    a group by its ranks, and one made again would meet the keys of the old one.)
    """
    made = [
        (ranks, mpu.create_group(ranks, timeout, group_desc=description))
        for ranks in _all_groups(over)
    ]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


def _all_groups(mine: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of every group like `mine` in the world, in an order that all ranks agree on."""
    device = "cpu" if dist.get_backend() == "gloo" else torch.cuda.current_device()
    ranks = torch.tensor(dist.get_process_group_ranks(mine), device=device)
    everyones = [torch.empty_like(ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, ranks)
    return sorted(list(group) for group in {tuple(ranks.tolist()) for ranks in everyones})


def destroy_model_parallel() -> None:
    """Forget the TSP groups and destroy the communicators that are TSP's own."""
    global _TSP_GROUP, _TOKEN_GROUP, _WEIGHT_GROUP, _KV_GROUP
    own = [group for group in (_WEIGHT_GROUP, _KV_GROUP) if group is not None]
    streaming.forget(own)
    for group in own:
        dist.destroy_process_group(group)
    _TSP_GROUP = _TOKEN_GROUP = _WEIGHT_GROUP = _KV_GROUP = None


def is_initialized() -> bool:
    """Whether the TSP groups exist."""
    return _TSP_GROUP is not None


def get_tsp_group() -> dist.ProcessGroup:
    """The ranks that share one copy of the weights with this one.

    Raises:
        TSPError: the TSP groups have not been created.
    """
    if _TSP_GROUP is None:
        raise TSPError("the TSP groups are not initialized")
    return _TSP_GROUP


def get_tsp_world_size() -> int:
    """The TSP degree D."""
    return get_tsp_group().size()


def get_tsp_rank() -> int:
    """This rank's place in its TSP group, from 0 to D-1."""
    return get_tsp_group().rank()


def weight_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The communicator for weight traffic over `group`: `group` itself, if it is not TSP's."""
    return _WEIGHT_GROUP if group is not None and group is _TSP_GROUP else group


def token_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that the sequence of `group` is spread over, in zigzag order: the token group for
    the TSP group, `group` itself if it is not TSP's."""
    return _TOKEN_GROUP if group is not None and group is _TSP_GROUP else group


def kv_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The communicator for K and V over `group`: `group` itself, if it is not the token group."""
    return _KV_GROUP if group is not None and group is _TOKEN_GROUP else group
