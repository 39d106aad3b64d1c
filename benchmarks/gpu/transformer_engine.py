"""On a GPU, with Transformer Engine and Apex: what TSP takes of them, against its own.

Their norms and dW; grouped experts against one after the other; gradients with activations moved
to the host and back (NVTE_CPU_OFFLOAD_V1=1 from Transformer Engine 2.10 on).

Transformer Engine's fused attention is one of the kernels of benchmarks/gpu/kernels.py.

    python -m benchmarks.gpu.transformer_engine

A line for each check says how far outputs and gradients are apart in bf16, of the largest value.
Exit code 1 when one is further off than bf16 explains, 2 without a GPU or with neither library.
"""

import importlib.util
import sys

import torch

TOKENS, HIDDEN = 8192, 2048
#: A few roundings of bf16, each 2 to the -9th of its value.
TOLERANCE = 2e-2


def main() -> int:
    """Run the checks; returns the exit code."""
    te, apex = map(
        importlib.util.find_spec, ("transformer_engine", "fused_weight_gradient_mlp_cuda")
    )
    if not torch.cuda.is_available() or not (te or apex):
        print("needs a GPU, and Transformer Engine or Apex", file=sys.stderr)
        return 2
    results = {**(_norms() if te else {}), **(_accumulation() if apex else {})}
    if te:
        _start()
        results |= {**_grouped_experts(), **_offloading()}
    for name, apart in results.items():
        print(f"{name:40s} {apart:.2e}  {'ok' if apart <= TOLERANCE else 'TOO FAR'}")
    return int(max(results.values()) > TOLERANCE)


def _random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _apart(ours, theirs) -> float:
    """The largest difference of two lists of tensors, relative to the largest number."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def _norms() -> dict[str, float]:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_tsp.layers.norm import TSPNorm

    results = {}
    for kind in ("RMSNorm", "LayerNorm"):
        for less_one in (False, True):
            config = TransformerConfig(
                num_layers=1, hidden_size=HIDDEN, num_attention_heads=16, bf16=True,
                params_dtype=torch.bfloat16, tensor_model_parallel_size=2, sequence_parallel=True,
                normalization=kind, layernorm_zero_centered_gamma=less_one,
            )  # fmt: skip
            x, dy, found = _random(TOKENS, HIDDEN), _random(TOKENS, HIDDEN), []
            values = 0.1 * _random(2, HIDDEN)  # of the weight, and of the bias where there is one
            for norm in (TSPNorm, TENorm):
                module = norm(config=config, hidden_size=HIDDEN, eps=1e-5)
                weights = list(module.parameters())
                for weight, value in zip(weights, values, strict=False):
                    weight.data.add_(value)  # to what it starts as, 0 or 1
                assert all(weight.sequence_parallel for weight in weights)
                leaf = x.clone().requires_grad_()
                y = module(leaf)
                found.append([y, *torch.autograd.grad(y, [leaf, *weights], dy)])
            results[f"{kind}{', weights less 1' if less_one else ''}"] = _apart(*found)
    return results


def _start() -> None:
    """Megatron's groups, and TSP's, of one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_tsp import parallel_state

    torch.cuda.set_device(0)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    parallel_state.initialize_model_parallel(1)
    model_parallel_cuda_manual_seed(1)


def _config(**changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=16, ffn_hidden_size=2 * HIDDEN,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0, attention_dropout=0, bf16=True,
        params_dtype=torch.bfloat16, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        **changes,
    )  # fmt: skip


def _grouped_experts() -> dict[str, float]:
    """--moe-grouped-gemm: the same weights in both."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_tsp.models.backends import TSPSpecProvider
    from megatron_tsp.options import TSPOptions

    experts, found = 4, []
    config = _config(num_moe_experts=experts, moe_ffn_hidden_size=HIDDEN, moe_grouped_gemm=True)
    x, dy = _random(TOKENS, HIDDEN), _random(TOKENS, HIDDEN)
    counts, probs = torch.tensor([TOKENS // experts] * experts), torch.ones(TOKENS, device="cuda")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    weights = [_random(2 * HIDDEN, HIDDEN) / 50, _random(HIDDEN, HIDDEN) / 50]
    for grouped in (True, False):
        config.moe_grouped_gemm = grouped
        submodules = TSPSpecProvider(TSPOptions()).moe(config).keywords["submodules"]
        module = submodules.experts(experts, config=config, pg_collection=groups).cuda()
        with torch.no_grad():
            for name, weight in module.named_parameters():
                weight.copy_(weights["linear_fc2" in name])
        leaf = x.clone().requires_grad_()
        y = module(leaf, counts, probs)[0]
        found.append([y, *torch.autograd.grad(y, [leaf], dy)])
    return {"grouped experts": _apart(*found)}


def _offloading() -> dict[str, float]:
    """--fine-grained-activation-offloading: the second step, when Megatron knows what to move."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig
    from megatron_tsp.options import TSPOptions

    groups, found, state = ProcessGroupCollection.use_mpu_process_groups(), [], None
    ids = torch.arange(TOKENS, device="cuda")[None] % 512
    for offload in (True, False):
        modules = ["qkv_linear", "core_attn", "attn_proj", "mlp_norm"] if offload else []
        config = _config(fine_grained_activation_offloading=offload, offload_modules=modules)
        gpt = TSPGPTModelConfig(
            transformer=config, vocab_size=512, seq_length=TOKENS, tsp=TSPOptions(),
            position_embedding_type="rope",
        )  # fmt: skip
        model = TSPGPTModelBuilder(gpt).build_model(groups).cuda()
        state = state or model.state_dict()
        model.load_state_dict(state)
        for _ in range(2):
            model.zero_grad()
            model(ids, ids, None, labels=ids).sum().backward()
            if offload:
                PipelineOffloadManager.get_instance().reset()
        found.append([weight.grad for weight in model.parameters()])
    moved = PipelineOffloadManager.get_instance().offload_summary_total_bytes
    return {f"offloading, {moved >> 20} MiB moved": _apart(*found) if moved else float("inf")}


def _accumulation() -> dict[str, float]:
    """dW += dyᵀ·x in fp32, by Apex's kernel (--gradient-accumulation-fusion)."""
    from megatron_tsp.layers.block import _apex_accumulate

    x, dy = _random(TOKENS, HIDDEN), _random(TOKENS, HIDDEN)
    target = torch.ones(HIDDEN, HIDDEN, device="cuda")
    _apex_accumulate()(x, dy, target)
    return {"Apex's dW": _apart([target], [1 + dy.float().t() @ x.float()])}


if __name__ == "__main__":
    sys.exit(main())
