"""Self-attention on local tokens: every rank computes all heads, its QKV and output weights stream.

Megatron derives the heads of a partition from `pg_collection.tp` and gives its linears the same
group. Here the two part: the attention sees one rank holding all heads (tp of one rank), and the
linears the TSP group that holds their shards. Its `cp` group is the TSP group, over which the tokens
are spread, so that K/V exchange and RoPE follow the zigzag.
"""

import copy
from dataclasses import replace

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class TSPSelfAttention(SelfAttention):
    """Megatron's `SelfAttention` with the tokens, not the heads, spread over `pg_collection.tp`.

    Args as `SelfAttention`; its linears must be TSP's. Input and output [s/D, b, h].
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args,
        pg_collection: ProcessGroupCollection,
        **kwargs,
    ):
        shards = pg_collection.tp
        local = copy.copy(pg_collection)
        local.tp, local.cp = None, shards  # None is Megatron's group of one rank
        submodules = replace(
            submodules,
            linear_qkv=_over(shards, submodules.linear_qkv),
            linear_proj=_over(shards, submodules.linear_proj),
        )
        super().__init__(config, submodules, *args, pg_collection=local, **kwargs)
        # What is saved is sharded, or replicated, over the TSP group.
        self.tp_group = shards


def _over(group: dist.ProcessGroup, linear):
    """The builder of a linear, on `group` whatever group its caller names."""

    def build(*args, **kwargs):
        return linear(*args, **{**kwargs, "tp_group": group})

    return build
