"""What the layer tests share: a config, the groups, and weights that every D starts from."""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tsp import parallel_state


def start(degree: int, pipeline: int = 1, context: int = 1, **more):
    """Megatron's groups and TSP's; seeds."""
    mpu.initialize_model_parallel(degree, pipeline, context_parallel_size=context, **more)
    parallel_state.initialize_model_parallel(degree)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return parallel_state.get_tsp_group()


def config(degree: int, kind=TransformerConfig, **changes) -> TransformerConfig:
    """A small fp64 transformer; kind: the class of its config."""
    settings = dict(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=12,
        num_query_groups=12,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=degree,
        sequence_parallel=degree > 1,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    return kind(**{**settings, **changes})


def sent(counter) -> dict:
    """The bytes that a `traffic.Counter` counted, {block: bytes}; it starts again."""
    sums = {}
    for (_, _, block), size in counter.snapshot(exact=True).items():
        sums[block] = sums.get(block, 0) + size
    counter.reset()
    return {block: size for block, size in sums.items() if size}


def random(*shape, seed=0, dtype=torch.float64):
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
