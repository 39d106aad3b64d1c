"""Megatron's all-to-all dispatch of tokens to experts, on tensors without contents.

How many tokens go where depends on what the router computes, and sizes follow from it. A trace
takes the router to be balanced: of each rank's tokens, times the experts of a token, every expert
of every rank gets the same share; what is left over goes one each to the first experts.
"""

import numpy
import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_tsp.errors import TSPError


def check(args) -> None:
    """Raise `TSPError` for a dispatch that `stand_ins` does not know. `args`: Megatron's."""
    if args.num_experts is None:
        return
    kind = args.moe_token_dispatcher_type
    if kind != "alltoall":
        raise TSPError(
            f"a trace does not know --moe-token-dispatcher-type {kind}: its sizes depend on the "
            "tokens; trace with --set moe-token-dispatcher-type=alltoall"
        )
    for dest in ("moe_expert_capacity_factor", "moe_router_padding_for_quantization"):
        if getattr(args, dest):
            flag = "--" + dest.replace("_", "-")
            raise TSPError(
                f"a trace does not know {flag}: what is dropped or padded depends on the tokens; "
                "drop the flag"
            )


def stand_ins():
    """Yield (owner, name, stand-in)."""
    # They know the sizes from the contents of counts.
    dispatcher = MoEAlltoAllTokenDispatcher
    yield dispatcher, "preprocess", _balanced(dispatcher.preprocess)
    yield token_dispatcher, "sort_chunks_by_idxs", _sort_chunks


def shares(count: int, parts: int) -> list[int]:
    """`count` things spread evenly, the first parts rounded up."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def _balanced(preprocess):
    """The same, with counts that have contents, those of a balanced router: arrays on the host."""

    def balanced(self, routing_map):
        preprocess(self, routing_map)  # what it sends and makes
        experts = shares(routing_map.size(0) * self.config.moe_router_topk, self.num_experts)
        of_rank = [
            experts[first : first + self.num_local_experts]
            for first in range(0, self.num_experts, self.num_local_experts)
        ]
        own = of_rank[self.ep_rank]
        if self.input_splits is not None:  # experts are spread over ranks
            self.input_splits = [sum(rank) for rank in of_rank]
            self.output_splits = [sum(own)] * self.ep_size
            self.output_splits_tp = numpy.full(self.tp_size, self.ep_size * sum(own))
        return self.tp_size * self.ep_size * numpy.array(own)

    return balanced


def _sort_chunks(input, split_sizes, sorted_idxs, probs=None, fused=False):
    """In any order the chunks make the same tensor, and of any sizes."""

    def sort(whole):
        return torch.cat(torch.split(whole, shares(whole.size(0), split_sizes.numel())))

    return sort(input), None if probs is None else sort(probs)
