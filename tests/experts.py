"""Experts that start from the same numbers however they are spread; routers that choose as told."""

import torch
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.experts import SequentialMLP


def same_experts():
    """Experts start from numbers that depend on their place in the model only."""
    build, built = SequentialMLP.__init__, []

    def build_and_fill(self, *args, **kwargs):
        state = torch.get_rng_state()
        build(self, *args, **kwargs)
        torch.set_rng_state(state)
        built.append(self)
        first = self.ep_group.rank() * self.num_local_experts
        part, parts = self.tp_group.rank(), self.tp_group.size()
        for at, expert in enumerate(self.local_experts):
            generator = torch.Generator().manual_seed(100 * len(built) + first + at)
            for param in expert.parameters():
                param.data.copy_(_shard(param, part, parts, generator))

    SequentialMLP.__init__ = build_and_fill


def _shard(param, part, parts, generator):
    shape, dim = list(param.shape), getattr(param, "partition_dim", -1)
    if dim < 0 or parts == 1:
        return 0.02 * torch.randn(shape, generator=generator)
    shape[dim] *= parts
    whole = 0.02 * torch.randn(shape, generator=generator)
    return torch.cat(whole.chunk(parts * param.partition_stride, dim)[part::parts], dim)


def route_in_turn(experts=None):
    """Tokens go to all experts in turn, or only to the first so many."""
    route = router.topk_routing_with_score_function

    def in_turn(logits, topk, **kwargs):
        tokens, known = logits.shape
        chosen = torch.arange(tokens * topk).view(tokens, topk) % (experts or known)
        logits.data.zero_().scatter_(1, chosen, 1.0)
        return route(logits, topk, **kwargs)

    router.topk_routing_with_score_function = in_turn
