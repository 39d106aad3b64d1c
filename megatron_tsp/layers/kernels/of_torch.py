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
            dq, *dkv = _aten._scaled_dot_product_flash_attention_backward(
                dout, q, *wide, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0,
                causal, *_no_dropout(q), scale=self.scale,
            )  # fmt: skip
        else:
            dq, *dkv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, *wide, out, lse, 0.0, causal, scale=self.scale
            )
        return dq, *(summed(d, k) for d in dkv)

    def packs(self, q):
        """As `Kernel.packs`. On ROCm PyTorch pads the lse to the longest sequence: not there."""
        return q.is_cuda and not torch.version.hip

    def forward_packed(self, q, k, v, lengths, causal):
        """As `Kernel.forward_packed`."""
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, causal, False, scale=self.scale
        )
        return out, lse

    def backward_packed(self, dout, q, k, v, out, lse, lengths, causal):
        """As `Kernel.backward_packed`."""
        return _aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *_no_dropout(q),
            scale=self.scale,
        )  # fmt: skip


class Cudnn:
    """cuDNN's fused attention, the one that Transformer Engine calls `fused`; bf16 and fp16."""

    has_dropout = False

    def __init__(self, scale: float):
        self.scale = scale

    def packs(self, q):
        """As `Kernel.packs`."""
        return False

    def forward(self, q, k, v, causal):
        """As `Kernel.forward`."""
        wide = (for_all_heads(t, q).contiguous() for t in (k, v))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, *wide, None, True, 0.0, causal, scale=self.scale
        )
        return out, lse.view(q.shape[:3])

    def backward(self, dout, q, k, v, out, lse, causal):
        """As `Kernel.backward`."""
        wide = (for_all_heads(t, q).contiguous() for t in (k, v))
        dq, *dkv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout.contiguous(), q, *wide, out, lse.contiguous().unsqueeze(-1), *_no_dropout(q), None,
            None, None, q.size(2), k.size(2), 0.0, causal, scale=self.scale,
        )  # fmt: skip
        return dq, *(summed(d, k) for d in dkv)


def for_all_heads(kv: Tensor, q: Tensor) -> Tensor:
    """k or v with as many heads as q, a view."""
    return kv.expand(-1, q.size(1), -1, -1)


def summed(dkv: Tensor, kv: Tensor) -> Tensor:
    """The inverse, for gradients."""
    return dkv if dkv.size(1) == kv.size(1) else dkv.sum(1, keepdim=True)


def _no_dropout(q: Tensor) -> list[Tensor]:
    """The random state that a backward wants, and does not read without dropout."""
    return [torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2)]
