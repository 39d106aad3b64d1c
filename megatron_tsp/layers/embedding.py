"""Token embeddings for local tokens, from a table that is sharded over the vocabulary.

Two ways, the same result; which one moves fewer bytes depends on the shape:

- rows: each owner sends the rows that a rank's tokens need. Every rank knows all token ids, so both
  ends know which rows travel: no ids are sent, and each row goes to the one rank that needs it.
- table: the shards travel past the tokens, as other weights do; for long sequences and small
  vocabularies.
"""

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor

from megatron_tsp import parallel_state, zigzag
from megatron_tsp.layers.block import Block, deliver
from megatron_tsp.streaming import stream
from megatron_tsp.traffic import block as label


class _Rows(torch.autograd.Function):
    """ids [D, n], the token ids of all ranks, each rank's in its local order; weight [V/D, h] → the
    rows [n, h] of this rank's ids."""

    @staticmethod
    def forward(ctx, ids, weight, group):
        rows = weight.size(0)
        asked, wanted, ctx.to_send, ctx.to_receive = _routes(ids, rows, group.rank())
        ctx.group, ctx.rows = group, rows
        ctx.save_for_backward(asked, wanted)
        arrived = _all_to_all(weight[asked], ctx.to_receive, ctx.to_send, group)
        return torch.empty_like(arrived).index_copy_(0, wanted, arrived)

    @staticmethod
    def backward(ctx, dy):
        asked, wanted = ctx.saved_tensors
        home = _all_to_all(dy[wanted], ctx.to_send, ctx.to_receive, ctx.group)
        return None, _summed(home, asked, ctx.rows), None


def _routes(ids: Tensor, rows: int, rank: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Who needs which rows, from ids [D, n] and the `rows` of a shard.

    Returns the rows of this rank that are asked for, by asking rank and in its order; the places of
    the own tokens, by owner; and the numbers of both, by rank.
    """
    owners = ids.div(rows, rounding_mode="floor")
    asked = ids[owners == rank] - rank * rows
    wanted = owners[rank].argsort(stable=True)
    sizes = torch.stack([(owners == rank).sum(1), owners[rank].bincount(minlength=len(ids))])
    return asked, wanted, *sizes.tolist()


def _all_to_all(rows: Tensor, receive: list[int], send: list[int], group) -> Tensor:
    if group.size() == 1:
        return rows
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    with label("embedding"):
        dist.all_to_all_single(arrived, rows, receive, send, group=group)
    return arrived


def _summed(rows: Tensor, at: Tensor, size: int) -> Tensor:
    """[size, h], fp32 at least, with `rows` added up at the indices `at`."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.new_zeros(size, rows.size(-1), dtype=wide).index_add_(0, at, rows.to(wide))


class _Table(torch.autograd.Function):
    """ids [n] of this rank; weight [V/D, h] → [n, h], while the shards pass. The backward needs no
    weights: only dW travels."""

    @staticmethod
    def forward(ctx, ids, weight, block: Block, training):
        ctx.block, ctx.shards = block, (weight,)
        ctx.save_for_backward(ids)
        y = weight.new_empty(ids.size(0), weight.size(1))
        for owner, (table,) in block.forward(ctx.shards, training):
            at, rows = _owned(ids, owner, weight.size(0))
            y[at] = table[rows]
        return y

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        size = ctx.shards[0].size(0)
        grads = ctx.block.gradients(ctx.shards, ctx.needs_input_grad[1:2])
        for owner, _ in ctx.block.backward((), grads):
            at, rows = _owned(ids, owner, size)
            grads.add(0, _summed(dy[at], rows, size))
        return None, *deliver(ctx.shards, grads), None, None


def _owned(ids: Tensor, owner: int, size: int) -> tuple[Tensor, Tensor]:
    """(places of the ids in the owner's shard, their rows there)."""
    at = (ids.div(size, rounding_mode="floor") == owner).nonzero().squeeze(1)
    return at, ids[at] - owner * size


class TSPVocabParallelEmbedding(VocabParallelEmbedding):
    """Megatron's vocabulary-sharded table, looked up for the local tokens in zigzag order."""

    def set_block(self, schedule: str, wide_grads: bool) -> None:
        """How the table travels, where it does."""
        walk = stream(schedule, parallel_state.weight_group(self.tp_group))
        self.block = Block(walk, "embedding", lambda: (self.weight,), wide_grads)

    def streams_table(self, tokens: int) -> bool:
        """Whether the table moves fewer bytes than the rows of `tokens` local tokens.

        Forward and backward together, each times (D-1)/D: 2·tokens·h elements by rows; V·h and as
        many of dW by table.
        """
        element = self.weight.element_size()
        of_dw = max(element, 4) if self.block.wide_grads else element
        return 2 * tokens * element > self.num_embeddings * (element + of_dw)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [b, s], the same on all ranks → [s/D, b, h]."""
        size, rank = self.tp_group.size(), self.tp_group.rank()
        mine = zigzag.take(input_ids, 1, size, rank).t()  # [s/D, b]
        if self.streams_table(mine.numel()):
            training = torch.is_grad_enabled()
            rows = _Table.apply(mine.flatten(), self.weight, self.block, training)
        else:
            by_rank = [zigzag.take(input_ids, 1, size, r).t() for r in range(size)]
            rows = _Rows.apply(torch.stack(by_rank).flatten(1), self.weight, self.tp_group)
        return rows.view(*mine.shape, -1)


class TSPLanguageModelEmbedding(LanguageModelEmbedding):
    """Word and, if learned, position embeddings of the local tokens, with dropout."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, tokentype_ids=None) -> Tensor:
        """input_ids and position_ids [b, s], the same on all ranks → [s/D, b, h]."""
        assert tokentype_ids is None and self.tokentype_embeddings is None  # a BERT feature
        embeddings = self.word_embeddings(input_ids)
        if self.add_position_embedding:
            local = zigzag.take(position_ids, 1, self.tp_group.size(), self.tp_group.rank())
            embeddings = embeddings + self.position_embeddings(local.t())
        if self.config.fp32_residual_connection:
            embeddings = embeddings.float()
        if self.tp_group.size() == 1:
            return self.embedding_dropout(embeddings)
        with tensor_parallel.get_cuda_rng_tracker().fork():  # other masks on other tokens
            return self.embedding_dropout(embeddings)
