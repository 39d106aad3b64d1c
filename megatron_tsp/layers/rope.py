"""Rotary position embedding that keeps nothing of the tokens, and one cos and sin for all layers.

Megatron's unfused form saves a cos and a sin for each query and each key of each layer.
"""

import torch
from torch import Tensor


class _Rotate(torch.autograd.Function):
    """t·cos + rotate(t)·sin on the first features, the rest as they are (arXiv 2104.09864)."""

    @staticmethod
    def forward(ctx, t, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _apply(t, lambda part: part * cos + _turn(part, interleaved) * sin, cos.size(-1))

    @staticmethod
    def backward(ctx, dout):
        cos, sin = ctx.saved_tensors
        # A quarter turn's transpose is the turn back: -rotate.
        dt = _apply(
            dout, lambda part: part * cos - _turn(part * sin, ctx.interleaved), cos.size(-1)
        )
        return dt, None, None, None


def _apply(t: Tensor, function, features: int) -> Tensor:
    if features == t.size(-1):
        return function(t)
    return torch.cat((function(t[..., :features]), t[..., features:]), dim=-1)


def _turn(t: Tensor, interleaved: bool) -> Tensor:
    """(a, b) → (-b, a), for pairs that are halves apart or neighbours."""
    if interleaved:
        return torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
    first, second = t.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(t: Tensor, angles: Tensor, interleaved: bool, mscale: float = 1.0) -> Tensor:
    """t with its positions' rotation applied.

    Args:
        t: [s/D, b, n, d].
        angles: [s/D, 1 or b, 1, r] with r <= d, fp32, of the local tokens. Its cos and sin are
            computed once for each dtype and kept with it.
        interleaved: pairs are neighbouring features, not halves.
        mscale: factor on cos and sin (YaRN's concentration).
    """
    cache = angles.__dict__.setdefault("_tsp_cos_sin", {})
    key = t.dtype, mscale
    if key not in cache:
        cache[key] = tuple((f(angles) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
    return _Rotate.apply(t, *cache[key], interleaved)
