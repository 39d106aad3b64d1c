"""One check for every attention kernel: against fp64, whole and put together from two parts."""

import torch

from megatron_tsp.layers import flash
from megatron_tsp.layers.mask import Tile

SHAPES = [(64, 64, 1), (64, 64, 3), (40, 72, 2)]  # queries, keys, query heads to a KV head
CHANNELS = 64


def _inputs(queries, keys, heads, dtype, device, logits):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, heads, queries), (3, 1, keys), (3, 1, keys), (3, heads, queries))
    q, k, v, dout = (
        torch.randn(*shape, CHANNELS, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    )
    return [t.to(device) for t in (q * logits, k, v, dout)]


def _expected(q, k, v, dout, hidden, scale):
    """(out, lse, dq, dk, dv) in fp64 from the definition."""
    q, k, v = (t.double().cpu().requires_grad_() for t in (q, k, v))
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), dout.double().cpu())
    return out, scores.logsumexp(-1), *grads


def errors(kernel, shape, causal, dtype, device, logits=1.0, whole=False) -> dict[str, float]:
    """The largest errors, relative to the largest value: of out, lse, dq, dk, dv.

    Args:
        kernel: a `Kernel`'s class.
        shape: of `SHAPES`; square for causal.
        logits: a factor on the queries.
        whole: in one call; else keys in two parts, merged, and gradients under the merged lse.
    """
    queries, keys, heads = shape
    q, k, v, dout = _inputs(queries, keys, heads, dtype, device, logits)
    made = kernel(CHANNELS**-0.5)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if causal:
        hidden = torch.ones_like(hidden).triu(1)
    if whole:
        kind = "causal" if causal else "full"
        tiles = [Tile(slice(0, queries), slice(0, keys), kind)]
    elif causal:  # two blocks on the diagonal, and what lies below them
        half = queries // 2
        everything = slice(0, queries)
        tiles = [
            Tile(everything, everything, "causal", blocks=2),
            Tile(slice(half, queries), slice(0, half), "full"),
        ]
    else:
        part = keys // 3
        tiles = [Tile(slice(0, queries), at, "full") for at in (slice(0, part), slice(part, keys))]
    out, lse = flash.attend(q, k, v, tiles, made)
    out = out.to(dtype)
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    flash.attend_backward(dout, q, k, v, out, lse, tiles, made, *grads)
    names = ("out", "lse", "dq", "dk", "dv")
    expected = _expected(q, k, v, dout, hidden, made.scale)
    return {
        name: ((got.double().cpu() - want).abs().max() / want.abs().max()).item()
        for name, got, want in zip(names, (out, lse, *grads), expected, strict=True)
    }
