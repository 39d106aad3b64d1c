"""PyTorch's own kernels: flash attention on CPU, CUDA and ROCm, and cuDNN's fused attention."""

import torch
from torch import Tensor

_aten = torch.ops.aten


class TorchFlash:
    """FlashAttention-2 as PyTorch has it, on any device; also fp32 and fp64 on the CPU."""

    has_dropout = False

    def __init__(self, scale: float):
        self.scale = scale

    def forward(self, q, k, v, causal):
        """As `Kernel.forward`."""
        k, v = for_all_heads(k, q), for_all_heads(v, q)
        if q.is_cuda:
            out, lse, *_ = _aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, causal, scale=self.scale
            )
            return out, lse
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=self.scale
        )

    def backward(self, dout, q, k, v, out, lse, causal):
        """As `Kernel.backward`."""
        wide = for_all_heads(k, q), for_all_heads(v, q)
        if q.is_cuda:
            no_dropout = torch.zeros((), dtype=torch.int64)
            dq, *dkv = _aten._scaled_dot_product_flash_attention_backward(
                dout, q, *wide, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0,
                causal, no_dropout, no_dropout, scale=self.scale,
            )  # fmt: skip
        else:
            dq, *dkv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, *wide, out, lse, 0.0, causal, scale=self.scale
            )
        return dq, *(summed(d, k) for d in dkv)


class Cudnn:
    """cuDNN's fused attention, the one that Transformer Engine calls `fused`; bf16 and fp16."""

    has_dropout = False

    def __init__(self, scale: float):
        self.scale = scale

    def forward(self, q, k, v, causal):
        """As `Kernel.forward`."""
        wide = (for_all_heads(t, q).contiguous() for t in (k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, *wide, None, True, 0.0, causal, scale=self.scale
        )
        return out, lse.squeeze(-1)

    def backward(self, dout, q, k, v, out, lse, causal):
        """As `Kernel.backward`."""
        wide = (for_all_heads(t, q).contiguous() for t in (k, v))
        no_dropout = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
        dq, *dkv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout.contiguous(), q, *wide, out, lse.contiguous().unsqueeze(-1), *no_dropout, None,
            None, None, q.size(2), k.size(2), 0.0, causal, scale=self.scale,
        )  # fmt: skip
        return dq, *(summed(d, k) for d in dkv)


def for_all_heads(kv: Tensor, q: Tensor) -> Tensor:
    """k or v with as many heads as q, a view."""
    return kv.expand(-1, q.size(1), -1, -1)


def summed(dkv: Tensor, kv: Tensor) -> Tensor:
    """The inverse, for gradients."""
    return dkv if dkv.size(1) == kv.size(1) else dkv.sum(1, keepdim=True)
