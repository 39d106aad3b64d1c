"""What an attention's backward needs of its output: one number a row.

From the output the kernels take delta = Σ dout·out (arXiv 2205.14135, algorithm 4) and nothing
else. So delta is computed first, the output is let go, and the kernel gets a stand-in for it, a few
heads at a time, with the same delta.
"""

import torch
from torch import Tensor

#: Numbers that are in full precision at a time, on the way from low ones to low ones.
_WIDE_AT_ONCE = 2**21


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """Σ dout·out along the last dimension: [s, b, n, d] → [s, b, n, 1], fp32 (fp64 for fp64)."""
    wide = torch.promote_types(out.dtype, torch.float32)
    few_heads = zip(dout.chunk(8, 2), out.chunk(8, 2), strict=True)  # a wide copy of few at a time
    return torch.cat([(a.to(wide) * b).sum(-1, keepdim=True) for a, b in few_heads], 2)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor like `dout` [s, b, n, d] with Σ dout·it = delta [s, b, n, 1] along the last.

    It is as long as `dout` asks for and no longer: |it| = |delta|/|dout| <= |out|.
    """
    result = torch.empty_like(dout, memory_format=torch.contiguous_format)
    step = max(1, _WIDE_AT_ONCE // dout[0].numel())
    for some in zip(dout.split(step), delta.split(step), result.split(step), strict=True):
        dout_, delta_, into = some
        largest = dout_.abs().amax(-1, keepdim=True).to(delta.dtype)
        largest.clamp_(min=torch.finfo(delta.dtype).tiny)
        unit = dout_ / largest  # no square of it underflows unnoticed: one element is 1
        square = unit.square().sum(-1, keepdim=True).clamp_(min=1)  # 0 where dout is
        into.copy_(unit.mul_(delta_ / largest / square))
    return result
