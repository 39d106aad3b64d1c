"""Multi-latent attention: Megatron's, with TSP's core and its linears.

Keys and values of a token come from one small latent, and their heads differ in size. The latents
are projected where their tokens lie. From them each rank gets the queries, keys and values of 1/D
of the heads for the whole sequence (`heads_linear`): the exchange `alltoall`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers.core_attention import TSPCoreAttention
from megatron_tsp.layers.linear import TSPColumnParallelLinear
from megatron_tsp.traffic import block as label


class LatentCore(TSPCoreAttention):
    """`TSPCoreAttention` for values smaller than queries and keys: its kernels want one size."""

    def __init__(self, *args, k_channels: int = 0, v_channels: int = 0, **kwargs):
        # Megatron builds it twice, at first as if for plain attention
        super().__init__(*args, **kwargs)
        self.missing = k_channels - v_channels

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> Tensor:
        """Values are padded, and what comes of the padding is cut off."""
        out = super().forward(query, key, F.pad(value, (0, self.missing)), *args, **kwargs)
        return out.unflatten(-1, (query.size(2), -1))[..., : value.size(-1)].flatten(2)


class TSPLatentAttention(MLASelfAttention):
    """Megatron's `MLASelfAttention` with local tokens. Input and output [s/D, b, h].

    Args as `MLASelfAttention`. Of its linears those behind the latents are `TSPLinearToHeads`, the
    last one is `TSPLinearFromHeads`; the ones in front of the latents are Megatron's, and become
    TSP's: its constructor takes no others.
        down: how these travel, the keywords of `set_block`.
    """

    def __init__(self, *args, down: dict, **kwargs):
        super().__init__(*args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            linear = getattr(self, name, None)
            if linear is not None:
                if type(linear) is not ColumnParallelLinear:
                    raise TypeError(f"expected Megatron's linear, found {type(linear).__name__}")
                linear.__class__ = TSPColumnParallelLinear
                linear.set_block(**down)

    def _resolve_qk_norm_config(self, submodules) -> dict:
        names = "linear_q_proj linear_q_up_proj linear_kv_up_proj q_layernorm kv_layernorm".split()
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states):
        """(latents of queries, latents of keys and values beside the keys' rotary part).

        Megatron gathers the rotary part over the group as contiguous shards of the sequence.
        """
        queries, combined = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() > 1:
            sizes = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
            latents, rotary = combined.split(sizes, -1)
            combined = torch.cat([latents, _Relaid.apply(rotary, self.tp_group)], -1)
        return queries, combined


class _Relaid(torch.autograd.Function):
    """Local tokens [s/D, ...] from zigzag order, chunks r and 2D-1-r, to chunks 2r and 2r+1."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _relay(x, group, _zigzag, _contiguous)

    @staticmethod
    def backward(ctx, dy):
        return _relay(dy, ctx.group, _contiguous, _zigzag), None


def _zigzag(rank: int, degree: int) -> list[int]:
    return list(zigzag.chunks_of(rank, degree))


def _contiguous(rank: int, degree: int) -> list[int]:
    return [2 * rank, 2 * rank + 1]


def _relay(x: Tensor, group: dist.ProcessGroup, before, after) -> Tensor:
    """Each chunk from its owner before to its owner after."""
    degree, rank = group.size(), group.rank()
    mine, wanted = before(rank, degree), after(rank, degree)
    chunks = dict(zip(mine, x.chunk(2), strict=True))
    leaving = [[c for c in after(to, degree) if c in chunks] for to in range(degree)]
    arriving = [[c for c in before(of, degree) if c in wanted] for of in range(degree)]
    size = len(x) // 2
    # what one rank sends another is in the receiver's order
    sent = torch.cat([chunks[c] for chunk in leaving for c in chunk])
    got = torch.empty_like(sent)
    with label("attention"):
        dist.all_to_all_single(
            got, sent, [size * len(c) for c in arriving], [size * len(c) for c in leaving], group
        )
    order = [c for of in range(degree) for c in wanted if c in arriving[of]]
    return torch.cat([got.split(size)[order.index(c)] for c in wanted])
