"""Multi-token prediction (arXiv 2412.19437) with local tokens: Megatron's, but for its projection.

A layer concatenates the embedding of the token one further on and the hidden state, projects 2h to
h, and runs a transformer layer. Token ids and labels are whole on every rank, so Megatron shifts
them as they are.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction
from torch import Tensor

from megatron_tsp import zigzag
from megatron_tsp.layers.linear import TSPOutputLayer


class TSPMultiTokenPredictionLayer(multi_token_prediction.MultiTokenPredictionLayer):
    """Megatron's layer, whose projection streams its weights past the local tokens.

    Args as Megatron's; `eh_proj` must be a `TSPColumnParallelLinear`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        multi_token_prediction._compute_mtp_acceptance_counts = _acceptance_counts

    def _concat_embeddings(self, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        """Both [s/D, b, h], the local tokens, to [s/D, b, h]: nothing to gather or scatter."""
        both = torch.cat((self.enorm(decoder_input), self.hnorm(hidden_states)), -1)
        return self.eh_proj(both)[0]


_of_logits = multi_token_prediction._compute_mtp_acceptance_counts


def _acceptance_counts(logits, labels, loss_mask, output_layer, runtime_gather_output, tp_group):
    """Megatron's (tokens predicted right, tokens that count), fp32 scalars, for its report; where
    there are no logits, from the hits of the loss just computed."""
    if not isinstance(output_layer, TSPOutputLayer):
        return _of_logits(
            logits, labels, loss_mask, output_layer, runtime_gather_output, tp_group
        )
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    counts = loss_mask.bool()
    right = (output_layer.hits & zigzag.take(counts, 1, size, rank).t()).sum().float()
    if size > 1:
        dist.all_reduce(right, group=tp_group)
    return right, counts.sum().float()
