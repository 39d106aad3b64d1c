"""Cross-entropy with the vocabulary streamed: the output weights go round, tokens stay.

The softmax over the vocabulary is built up shard by shard with a running maximum and sum (online
softmax, arXiv 1805.02867), so no more than a [chunk, V/D] block of logits ever exists, forward or
backward; the backward computes the logits again.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers.block import Block, deliver
from megatron_tsp.traffic import block as label


class _VocabStreamedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, block: Block, chunk: int, training: bool):
        ctx.block, ctx.chunk, ctx.shards = block, chunk, (weight,)
        tokens, part = x.size(0), weight.size(0)
        wide = torch.promote_types(x.dtype, torch.float32)
        maximum = x.new_full((tokens,), -torch.inf, dtype=wide)
        total, target = (x.new_zeros(tokens, dtype=wide) for _ in range(2))
        for owner, (w,) in block.forward(ctx.shards, training):
            for rows in _chunks(tokens, chunk):
                logits = (x[rows] @ w.t()).to(wide)
                column, mine = _local(labels[rows], owner, part)
                target[rows] += logits.gather(1, column[:, None]).squeeze(1) * mine
                above = torch.maximum(maximum[rows], logits.amax(1))
                total[rows] *= (maximum[rows] - above).exp_()
                total[rows] += logits.sub_(above[:, None]).exp_().sum(1)
                maximum[rows] = above
        ctx.save_for_backward(x, labels, maximum, total)
        hits = target == maximum
        ctx.mark_non_differentiable(hits)
        return total.log() - (target - maximum), hits

    @staticmethod
    def backward(ctx, dloss, _):
        x, labels, maximum, total = ctx.saved_tensors
        tokens, part = x.size(0), ctx.shards[0].size(0)
        grads = ctx.block.gradients(ctx.shards, ctx.needs_input_grad[1:2])
        dx = torch.zeros_like(x)
        for owner, (w,) in ctx.block.backward(ctx.shards, grads):
            for rows in _chunks(tokens, ctx.chunk):
                logits = (x[rows] @ w.t()).to(maximum.dtype)
                dlogits = logits.sub_(maximum[rows, None]).exp_().div_(total[rows, None])
                column, mine = _local(labels[rows], owner, part)
                dlogits.scatter_add_(1, column[:, None], -mine[:, None].to(dlogits.dtype))
                dlogits = dlogits.mul_(dloss[rows, None]).to(x.dtype)
                dx[rows].addmm_(dlogits, w)
                grads.add_product(0, dlogits, x[rows])
        return dx, *deliver(ctx.shards, grads), None, None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, tokens)) for at in range(0, tokens, chunk)]


def _local(labels: Tensor, owner: int, part: int) -> tuple[Tensor, Tensor]:
    """(column of each label in the owner's shard, 0 where it is not there; whether it is there)."""
    column = labels - owner * part
    mine = (column >= 0) & (column < part)
    return column.where(mine, 0), mine


class _GatherTokens(torch.autograd.Function):
    """[s/D, b] on each rank → [b, s] in natural order on all; backward takes the own tokens.

    Every rank computes the same loss from the same [b, s], so that each token's gradient is there
    on every rank, and counts once.
    """

    @staticmethod
    def forward(ctx, local, group):
        ctx.size, ctx.rank = (1, 0) if group is None else (group.size(), group.rank())
        if ctx.size == 1:
            return local.t().contiguous()
        whole = local.new_empty(ctx.size * local.size(0), local.size(1))
        with label("loss"):
            dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
        return zigzag.to_natural(whole, 0, ctx.size).t().contiguous()

    @staticmethod
    def backward(ctx, dwhole):
        return zigzag.take(dwhole, 1, ctx.size, ctx.rank).t(), None


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    block: Block,
    group: dist.ProcessGroup | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Loss of every token: -log softmax(hidden·Wᵀ)[label], over the whole vocabulary; and hits.

    Args:
        hidden: [s/D, b, h], the local tokens in zigzag order.
        weight: [V/D, h], this rank's shard.
        labels: int64 [b, s], natural order, the same on all ranks.
        block: the walk over the shards.
        group: the ranks that the tokens are spread over.
        chunk: tokens whose logits exist at a time.

    Returns:
        The loss [b, s] fp32 (fp64 for fp64), the same on every rank of the group; and for each
        local token whether its label has the largest logit, bool [s/D, b].
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    local = zigzag.take(labels, 1, size, rank).t()  # [s/D, b]
    loss, hits = _VocabStreamedCrossEntropy.apply(
        hidden.flatten(0, 1), weight, local.flatten(), block, chunk, torch.is_grad_enabled()
    )
    return _GatherTokens.apply(loss.view(local.shape), group), hits.view(local.shape)
