"""Shared experts: an MLP that every token passes, so its weights travel as a dense MLP's do.

The routed experts are another matter: they stay on their rank, and Megatron's dispatcher brings
them the tokens. To it the TSP group holds sequence shards, as under sequence parallelism; in which
order the tokens come does not matter to a router.
"""

from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_tsp.layers.mlp import TSPMLP


class TSPSharedExpertMLP(SharedExpertMLP, TSPMLP):
    """Megatron's shared experts, with or without their gate, computed shard by shard.

    Args as `SharedExpertMLP`, whose linears must be TSP's, and:
        keep_activations: as `TSPMLP`.

    Input and output [s/D, b, h]: the local tokens, in any order.
    """

    def __init__(self, *args, keep_activations: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.keep_activations = keep_activations
