"""Attention sinks: one more logit of each head, which takes weight and has the value 0.

Megatron's `--softmax-type`: off-by-one (the logit is 0) or learnable (a parameter of each head,
sharded as Megatron shards it: by heads, over the ranks that shard the weights).
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_tsp import parallel_state
from megatron_tsp.traffic import block as label


def parameter(config: TransformerConfig, group: dist.ProcessGroup | None) -> torch.nn.Parameter:
    """This rank's part [n/D] of the learnable sinks, over `group`.

    All n are drawn on every rank, so that the weights that follow start as on one rank.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    whole = torch.zeros(
        config.num_attention_heads, dtype=config.params_dtype, device=torch.cuda.current_device()
    )
    if config.perform_initialization:
        config.init_method(whole)
    sinks = torch.nn.Parameter(whole.chunk(size)[rank].clone())
    set_tensor_model_parallel_attributes(sinks, is_parallel=size > 1, dim=0, stride=1)
    return sinks


class _Gather(torch.autograd.Function):
    """[n/D] of each rank → [n]. Each rank's gradient is that of its own tokens: they are summed."""

    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        whole = shard.new_empty(group.size() * shard.size(0))
        with label("attention"):
            dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, dwhole):
        dshard = dwhole.new_empty(dwhole.size(0) // ctx.group.size())
        with label("attention"):
            dist.reduce_scatter_tensor(dshard, dwhole.contiguous(), group=ctx.group)
        return dshard, None


def gather(shard: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sinks of all heads [n], from the parts [n/D] over `group`."""
    group = parallel_state.kv_group(group)
    return shard if group is None else _Gather.apply(shard, group)
