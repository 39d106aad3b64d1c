"""The checks for every attention kernel: against fp64, whole, put together from parts, masked."""

from itertools import pairwise

import torch

from megatron_tsp.layers import flash
from megatron_tsp.layers.dropout import Dropout
from megatron_tsp.layers.kernels import Tiled, TransformerEngineFused
from megatron_tsp.layers.kernels.flash_attn import FlashAttention2, FlashAttention3
from megatron_tsp.layers.kernels.of_torch import TorchFlash
from megatron_tsp.layers.mask import Mask, Span, Tile

#: What runs on a CPU: PyTorch's kernel, and those whose packages have stand-ins, by their names.
KERNELS = {
    "PyTorch": TorchFlash,
    "tiled": Tiled,
    "flash-attn 2": FlashAttention2,
    "flash-attn 3.0.0b1": FlashAttention3,
    "flash-attn 3": FlashAttention3,
    "Transformer Engine 2.8": TransformerEngineFused,
    "Transformer Engine 2.18": TransformerEngineFused,
}
SHAPES = [(64, 64, 1), (64, 64, 3), (40, 72, 2)]  # queries, keys, query heads to a KV head
CHANNELS = 64

#: Of two samples with two KV heads and three query heads to each: more documents than are called
#: one by one, of which some are shorter than the window.
DOCUMENTS = ((0, 3, 4, 19, 32, 33, 50, 64), (0, 1, 24, 40, 43, 47, 60, 64))
MASKS = {
    "documents": Mask(documents=DOCUMENTS),
    "documents-window": Mask(5, DOCUMENTS),
    "window": Mask(5),
}


def _inputs(queries, keys, heads, dtype, device, logits, batch=3):
    """q [B, H, sq, d], k and v [B, 1, sk, d], dout, with strides as the layers' tensors have them:
    tokens first in memory, k and v side by side, and some heads of more."""
    generator = torch.Generator().manual_seed(0)

    def made(tokens, each):
        shape = (tokens, batch, each, CHANNELS)
        t = torch.randn(shape, generator=generator, dtype=torch.float64)
        return t.to(device, dtype).permute(1, 2, 0, 3)

    q, kv, dout = made(queries, heads + 1)[:, 1:], made(keys, 2), made(queries, heads)
    return q * logits, kv[:, :1], kv[:, 1:], dout


def _expected(q, k, v, dout, hidden, scale, sinks=None):
    """(out, lse, dq, dk, dv, and dsinks) in fp64 from the definition."""
    leaves = [t.double().cpu().requires_grad_() for t in (q, k, v, sinks) if t is not None]
    q, k, v, *rest = leaves
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    if rest:  # one more key, of value 0
        scores = torch.cat((scores, rest[0][..., None, None].expand(*q.shape[:-1], 1)), -1)
    out = scores.softmax(-1)[..., : k.size(-2)] @ v
    grads = torch.autograd.grad(out, leaves, dout.double().cpu())
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


def masked_errors(kernel, mask: Mask, sinks: bool, dtype, device, length=64) -> dict[str, float]:
    """As `errors`, of a mask's tiles over two samples of `length`; with sinks also of dsinks."""
    samples, heads = 2, 3
    q, k, v, dout = _inputs(length, length, heads, dtype, device, 1.0, batch=2 * samples)
    made, whole = kernel(CHANNELS**-0.5), Span(0, length)
    of_heads = torch.linspace(-1, 1, 2 * samples * heads, dtype=torch.float64).view(-1, heads)
    tiles = mask.tiles(whole, [whole])
    out, lse = flash.attend(q, k, v, tiles, made)
    logit = of_heads.to(device, lse.dtype)
    if sinks:
        out, lse = flash.with_sinks(out, lse, logit)
    out = out.to(dtype)
    got = [torch.zeros_like(t) for t in (q, k, v)]
    flash.attend_backward(dout, q, k, v, out, lse, tiles, made, *got)
    if sinks:
        got.append(flash.sinks_backward(dout, out, lse, logit))
    seen = torch.stack([_seen(mask, length, sample) for sample in range(samples)])
    hidden = ~seen.repeat_interleave(2, 0).unsqueeze(1)
    expected = _expected(q, k, v, dout, hidden, made.scale, of_heads if sinks else None)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")[: len(expected)]
    return {
        name: ((value.double().cpu() - want).abs().max() / want.abs().max()).item()
        for name, value, want in zip(names, (out, lse, *got), expected, strict=True)
    }


def dropout_error(kernel, mask: Mask, dtype, device, other_key=None) -> float:
    """How far Σ v·dv is from Σ dout·out, which it is for any mask that both ways agree on."""
    q, k, v, _ = _inputs(64, 64, 3, dtype, device, 1.0, batch=4)
    made, whole = kernel(CHANNELS**-0.5), Span(0, 64)
    tiles, grads = mask.tiles(whole, [whole]), [torch.zeros_like(t) for t in (q, k, v)]
    drops = [
        Dropout(0.3, key, samples=2, heads=6).of(q, [whole], [whole])
        for key in (2**62 + 12345, other_key or 2**62 + 12345)
    ]
    out, lse = flash.attend(q, k, v, tiles, made, None, drops[0])
    out = out.to(dtype)
    flash.attend_backward(out, q, k, v, out, lse, tiles, made, *grads, drops[1])
    expected = out.double().square().sum()
    return ((v.double() * grads[2].double()).sum() / expected - 1).abs().item()


def _seen(mask: Mask, length: int, sample: int) -> torch.Tensor:
    """bool [length, length], from the definition."""
    at = torch.arange(length)
    back = at.unsqueeze(1) - at
    seen = (back >= 0) & (back <= (length if mask.window is None else mask.window))
    document = torch.zeros(length, dtype=torch.long)
    for number, (begin, end) in enumerate(pairwise((mask.documents or [(0, length)] * 2)[sample])):
        document[begin:end] = number
    return seen & (document.unsqueeze(1) == document)
