"""The attention kernels: (out, lse) forward, and an exact backward under a given lse.

Layout [B, H, s, d], any strides with the last dimension contiguous. Keys and values may have one
head for all H query heads (grouped queries). `causal` needs as many queries as keys: query i sees
keys 0 to i. No kernel ever holds an s x s tensor.

The backward takes the out and the log-sum-exp of the *whole* softmax even when k and v are a part
of its keys; then dq, dk and dv are this part's exact contributions (arXiv 2205.14135, 2310.01889).
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ)·v and its log-sum-exp.

    Args:
        q: [B, H, sq, d]. k, v: [B, H or 1, sk, d], the dtype of q.

    Returns:
        out [B, H, sq, d] in q's dtype; lse [B, H, sq], fp32 (fp64 for fp64).
    """
    k, v = _for_all_heads(k, q), _for_all_heads(v, q)
    if q.is_cuda:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), shaped as q, k and v: dk and dv are summed over the heads that share them."""
    wide_k, wide_v = _for_all_heads(k, q), _for_all_heads(v, q)
    if q.is_cuda:
        no_dropout = torch.zeros((), dtype=torch.int64)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, wide_k, wide_v, out, lse.contiguous(), None, None, q.size(2), k.size(2),
            0.0, causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
    else:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, wide_k, wide_v, out, lse, 0.0, causal, scale=scale
        )
    if k.size(1) != q.size(1):
        dk, dv = dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)
    return dq, dk, dv


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax's (out, lse) from those of two disjoint sets of its keys.

    out and more [B, H, s, d]; lse and more_lse [B, H, s]. The result is in the dtype of lse, and
    cannot overflow: each factor exp(lse_i - lse) is at most 1.
    """
    whole = torch.logaddexp(lse, more_lse)
    merged = out * (lse - whole).exp_().unsqueeze(-1)
    return merged.add_(more * (more_lse - whole).exp_().unsqueeze(-1)), whole


def _for_all_heads(kv: Tensor, q: Tensor) -> Tensor:
    return kv.expand(-1, q.size(1), -1, -1)
