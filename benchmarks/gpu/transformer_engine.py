"""On a GPU, with Transformer Engine and Apex: their norm and dW against TSP's and PyTorch's.

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


def _accumulation() -> dict[str, float]:
    """dW += dyᵀ·x in fp32, by Apex's kernel (--gradient-accumulation-fusion)."""
    from megatron_tsp.layers.block import _apex_accumulate

    x, dy = _random(TOKENS, HIDDEN), _random(TOKENS, HIDDEN)
    target = torch.ones(HIDDEN, HIDDEN, device="cuda")
    _apex_accumulate()(x, dy, target)
    return {"Apex's dW": _apart([target], [1 + dy.float().t() @ x.float()])}


if __name__ == "__main__":
    sys.exit(main())
