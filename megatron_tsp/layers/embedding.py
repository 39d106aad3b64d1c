"""Token embeddings for local tokens: each owner sends the rows that a rank's tokens need.

The table is sharded over the vocabulary and every rank knows all token ids, so both ends know which
rows travel: no ids are sent, and each row travels once, to the one rank that needs it.
"""

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.traffic import block


class _Rows(torch.autograd.Function):
    """Look up local tokens in a table sharded over the group.

    ids [D, n]: the token ids of all ranks, each rank's in its local order; weight [V/D, h].
    Returns [n, h] for the ids of this rank.
    """

    @staticmethod
    def forward(ctx, ids, weight, group):
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        first, rows = rank * weight.size(0), weight.size(0)
        owners = ids.div(rows, rounding_mode="floor")
        asked = ids[owners == rank] - first  # by rank, then in the rank's order
        wanted = owners[rank].argsort(stable=True)  # own tokens, by owner
        sizes = torch.stack([(owners == rank).sum(1), owners[rank].bincount(minlength=size)])
        ctx.sizes = to_send, to_receive = sizes.tolist()
        ctx.group, ctx.rows = group, rows
        ctx.save_for_backward(asked, wanted)
        arrived = _all_to_all(weight[asked], to_receive, to_send, group)
        return torch.empty_like(arrived).index_copy_(0, wanted, arrived)

    @staticmethod
    def backward(ctx, dy):
        asked, wanted = ctx.saved_tensors
        sent, received = ctx.sizes
        wide = torch.promote_types(dy.dtype, torch.float32)
        home = _all_to_all(dy[wanted], sent, received, ctx.group)
        dweight = dy.new_zeros(ctx.rows, dy.size(-1), dtype=wide)
        return None, dweight.index_add_(0, asked, home.to(wide)), None


def _all_to_all(rows: Tensor, receive: list[int], send: list[int], group) -> Tensor:
    if group is None or group.size() == 1:
        return rows
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    with block("embedding"):
        dist.all_to_all_single(arrived, rows, receive, send, group=group)
    return arrived


class TSPVocabParallelEmbedding(VocabParallelEmbedding):
    """Megatron's vocabulary-sharded table, looked up for the local tokens in zigzag order."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [b, s], the same on all ranks → [s/D, b, h]."""
        size, rank = self.tp_group.size(), self.tp_group.rank()
        by_rank = [zigzag.take(input_ids, 1, size, r).t() for r in range(size)]  # [s/D, b] each
        ids = torch.stack(by_rank).flatten(1)
        return _Rows.apply(ids, self.weight, self.tp_group).view(*by_rank[rank].shape, -1)


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
