"""What attention dropout costs: attention by tiles against PyTorch's flash attention without it.

    python -m benchmarks.dropout

On one core of this machine, forward and backward of causal attention, in seconds of its time.
"""

import time

import torch

from megatron_tsp.layers import flash
from megatron_tsp.layers.dropout import Between, Dropout
from megatron_tsp.layers.kernels import Kernel, Tiled
from megatron_tsp.layers.kernels.of_torch import TorchFlash
from megatron_tsp.layers.mask import Span, Tile

TOKENS, KV_HEADS, QUERIES, CHANNELS = 2048, 4, 2, 128  # queries to a KV head
TILE = Tile(slice(0, TOKENS), slice(0, TOKENS), "causal")
TIMES = 3


def seconds(kernel: Kernel, dtype: torch.dtype, dropout: float = 0.0) -> float:
    """The shortest of `TIMES` times."""
    generator = torch.Generator().manual_seed(0)
    heads = (QUERIES, 1, 1, QUERIES)
    q, k, v, dout = (
        torch.randn(KV_HEADS, n, TOKENS, CHANNELS, generator=generator).to(dtype) for n in heads
    )
    between: Between | None = None
    if dropout:
        whole = [Span(0, TOKENS)]
        between = Dropout(dropout, 1, 1, KV_HEADS * QUERIES).of(q, whole, whole)
    found = []
    for _ in range(TIMES):
        start = time.process_time()
        out, lse = flash.attend(q, k, v, [TILE], kernel, None, between)
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        flash.attend_backward(dout, q, k, v, out, lse, [TILE], kernel, *grads, between)
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Print a line for each dtype."""
    torch.set_num_threads(1)
    scale = CHANNELS**-0.5
    for dtype in (torch.float32, torch.bfloat16):
        fused, tiled = seconds(TorchFlash(scale), dtype), seconds(Tiled(scale), dtype, 0.1)
        print(f"{dtype}: flash {fused:.2f} s, by tiles with dropout {tiled:.2f} s, "
              f"{tiled / fused:.1f} times")  # fmt: skip


if __name__ == "__main__":
    main()
