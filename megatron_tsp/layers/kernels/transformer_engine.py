"""Transformer Engine's fused attention, which is cuDNN's, on a GPU.

Of its backends F16_arbitrary_seqlen is taken: it keeps one statistic for the backward, the
log-sum-exp [B, H, s, 1], beside the state of a random generator. Layout [s, B, H, d], contiguous,
and fewer KV heads than query heads as they are. A tile is whole rows of it, so that cutting one out
copies nothing, and in this layout no release takes another backend for short sequences.
"""

import torch
from torch import Tensor

from megatron_tsp.layers.kernels.flash_attn import philox_state
from megatron_tsp.layers.kernels.packages import first_module, parameters, version

_EXTENSIONS = "transformer_engine.pytorch.cpp_extensions"
_LAYOUT = "sbhd_sbhd_sbhd"


class TransformerEngineFused:
    """Transformer Engine's `fused_attn_fwd` and `fused_attn_bwd`, releases 2.x; bf16 and fp16."""

    has_dropout = True  # by masks of its own, which it draws from the seed of the call

    def __init__(self, scale: float):
        self.scale = scale
        self.module = first_module([_EXTENSIONS])
        self.generator: torch.Generator | None = None

    def packs(self, q):
        """As `Kernel.packs`."""
        return False

    def forward(self, q, k, v, causal, dropout=None):
        """As `Kernel.forward`."""
        if self.generator is None:  # of its own: the forward advances it even without dropout
            self.generator = torch.Generator(q.device)
        if dropout:
            self.generator.manual_seed(dropout.seed)
        rows = [_rows(t) for t in (q, k, v)]
        out, (lse, *_), *_ = self.module.fused_attn_fwd(
            True, *_lengths(q, k), *rows, q.dtype, **self._arguments(causal, dropout),
            rng_gen=self.generator,
        )  # fmt: skip
        return out.permute(1, 2, 0, 3), lse.squeeze(-1)

    def backward(self, dout, q, k, v, out, lse, causal, dropout=None):
        """As `Kernel.backward`."""
        rows = [_rows(t) for t in (q, k, v, out, dout)]
        state = philox_state(q, dropout.seed if dropout else 0)
        if _names_types(self.module):
            types = first_module(["transformer_engine.pytorch.constants"]).TE_DType
            how = {"dqkv_dtype": types[q.dtype]}
        else:
            how = {"dqkv_layout": _LAYOUT}
        grads = self.module.fused_attn_bwd(
            *_lengths(q, k), *rows, q.dtype,
            aux_ctx_tensors=[lse.contiguous().unsqueeze(-1), state],
            **self._arguments(causal, dropout), **how,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return tuple(t.permute(1, 2, 0, 3) for t in grads[:3])

    def _arguments(self, causal, dropout):
        return dict(
            fused_attention_backend=self.module.FusedAttnBackend["F16_arbitrary_seqlen"],
            attn_scale=self.scale, dropout=dropout.p if dropout else 0.0, qkv_layout=_LAYOUT,
            attn_mask_type="causal" if causal else "no_mask",
            window_size=(-1, 0) if causal else (-1, -1),
        )  # fmt: skip


def _names_types(module) -> bool:
    """Whether the backward wants the gradients' type by name (up to 2.14), or their layout."""
    return "dqkv_dtype" in parameters(module.fused_attn_bwd)


def _rows(t: Tensor) -> Tensor:
    """[B, H, s, d] as [s, B, H, d], contiguous: how most tensors of the layers lie."""
    return t.permute(2, 0, 1, 3).contiguous()


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """(longest sequence of queries, of keys, cumulated lengths of queries, of keys)."""
    longest = q.size(2), k.size(2)
    cumulated = (
        torch.arange(0, (len(q) + 1) * n, n, dtype=torch.int32, device=q.device) for n in longest
    )
    return *longest, *cumulated


def installed() -> bool:
    """Whether Transformer Engine is there, in whatever version."""
    return version("transformer_engine") is not None


def misfit() -> str:
    """Why the one that is installed cannot be called; empty if it can."""
    found = version("transformer_engine")
    if found.major != 2:
        return f"Transformer Engine {found}, and TSP takes 2.x"
    if first_module([_EXTENSIONS]) is None:
        return f"Transformer Engine {found} without {_EXTENSIONS}"
    return ""
