"""A softmax put together from tiles of its keys, by any of the kernels, and with sinks.

Tensors as the kernels want them: [B, H, s, d], keys and values with H heads or one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_tsp.layers.kernels import Kernel
from megatron_tsp.layers.mask import Tile
from megatron_tsp.layers.varlen import Pack, calls

if TYPE_CHECKING:
    from megatron_tsp.layers.dropout import Between


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax's (out, lse) from those of two disjoint sets of its keys.

    out and more [B, H, s, d]; lse and more_lse [B, H, s]. The result is in the dtype of lse, and
    cannot overflow: each factor exp(lse_i - lse) is at most 1.
    """
    whole = torch.logaddexp(lse, more_lse)
    merged = out * (lse - whole).exp_().unsqueeze(-1)
    return merged.add_(more * (more_lse - whole).exp_().unsqueeze(-1)), whole


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Iterable[Tile],
    kernel: Kernel,
    so_far: tuple[Tensor, Tensor] | None = None,
    dropout: "Between | None" = None,
) -> tuple[Tensor, Tensor]:
    """The softmax of queries over the keys in `tiles`, merged with what it is `so_far`.

    Args:
        q: [B, H, sq, d]. k, v: [B, H or 1, sk, d]. B is the samples, each with its heads.
        tiles: as `Mask.tiles` lists them: causal ones first, which hold every query once.
        so_far: (out, lse) over other keys; may be changed in place.
        dropout: of the probabilities, between all of these queries and keys; None: none.

    Returns:
        out [B, H, sq, d], in the dtype of q or of lse; lse [B, H, sq], fp32 (fp64 for fp64).
    """
    out, lse = so_far or (None, None)
    # With dropout tile by tile: a mask is of a tile, by its seed or its places.
    for tile in calls(tiles, kernel, q) if dropout is None else tiles:
        if isinstance(tile, Pack):
            out, lse = _attend_packed(q, k, v, tile, kernel, out, lse, dropout)
            continue
        queries, keys = cut(q, tile, tile.queries), (cut(t, tile, tile.keys) for t in (k, v))
        more = () if dropout is None else (dropout.in_tile(tile),)
        part = kernel.forward(queries, *keys, tile.kind != "full", *more)
        part = [_uncut(t, tile) for t in part]
        if part[0].shape == q.shape:
            out, lse = part if out is None else merge(out, lse, *part)
            continue
        out, lse = _totals(out, lse, q, part[1], tile.kind)
        totals = _of(out, tile, tile.queries), _of(lse, tile, tile.queries)
        if tile.kind != "causal":
            part = merge(*totals, *part)
        for total, value in zip(totals, part, strict=True):
            total.copy_(value)
    return out, lse


def _attend_packed(q, k, v, pack, kernel, out, lse, dropout) -> tuple[Tensor, Tensor]:
    """(out, lse) with the tiles of a pack in them."""
    kind, of_keys = pack.first.kind, (pack.keys.take(t) for t in (k, v))
    more = () if dropout is None else (dropout.in_tile(pack.first),)
    part, part_lse = kernel.forward_packed(
        pack.queries.take(q), *of_keys, pack.lengths, kind != "full", *more
    )
    part = part, part_lse.t()
    totals = out, lse = _totals(out, lse, q, part_lse, kind)
    if kind != "causal":
        part = merge(*(pack.queries.take(t) for t in totals), *part)
    for total, value in zip(totals, part, strict=True):
        pack.queries.put(total, value)
    return out, lse


def _totals(
    out: Tensor | None, lse: Tensor | None, q: Tensor, like: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) to write a part into; in the dtype of the lse, which `like` has, to merge one."""
    if out is None:
        out, lse = torch.empty_like(q), like.new_empty(q.shape[:-1])
    return out if kind == "causal" else out.to(lse.dtype), lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Iterable[Tile],
    kernel: Kernel,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout: "Between | None" = None,
) -> None:
    """Add the gradients of `attend`'s inputs through `tiles` to dq, dk and dv.

    out and lse are those of the whole softmax; shapes as in `attend`, dq, dk and dv as q, k and v.
    """
    # With dropout tile by tile: a mask is of a tile, by its seed or its places.
    for tile in calls(tiles, kernel, q) if dropout is None else tiles:
        if isinstance(tile, Pack):
            more = () if dropout is None else (dropout.in_tile(tile.first),)
            rows = [tile.queries.take(t) for t in (dout, q, out, lse)]
            of_keys = [tile.keys.take(t) for t in (k, v)]
            grads = kernel.backward_packed(
                *rows[:2], *of_keys, rows[2], rows[3].t(), tile.lengths, tile.first.kind != "full",
                *more,
            )  # fmt: skip
            places = tile.queries, tile.keys, tile.keys
            for total, grad, at in zip((dq, dk, dv), grads, places, strict=True):
                at.add(total, grad)
            continue
        rows = [cut(t, tile, tile.queries) for t in (dout, q, out, lse)]
        keys = [cut(t, tile, tile.keys) for t in (k, v)]
        more = () if dropout is None else (dropout.in_tile(tile),)
        grads = kernel.backward(*rows[:2], *keys, *rows[2:], tile.kind != "full", *more)
        places = tile.queries, tile.keys, tile.keys
        for total, grad, at in zip((dq, dk, dv), grads, places, strict=True):
            _of(total, tile, at).add_(_uncut(grad, tile))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a softmax that has one more key, of logit `sinks` [B, H] and value 0.

    Given these, the backward of the other keys is exact as it stands (arXiv 2309.17453 and the
    off-by-one softmax, whose logit is 0).
    """
    whole = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    return out * (lse - whole).exp_().unsqueeze(-1), whole


def sinks_backward(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks [B, H], in the dtype of lse; out and lse as `with_sinks` gives them."""
    weight = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp_()
    return -(weight * (dout * out).sum(-1, dtype=lse.dtype)).sum(-1)


def _of(t: Tensor, tile: Tile, at: slice) -> Tensor:
    """The tile's part of [B, H, s, ...], a view."""
    sample, samples = tile.sample
    heads = t.size(0) // samples
    return t[sample * heads : (sample + 1) * heads, :, at]


def cut(t: Tensor, tile: Tile, at: slice) -> Tensor:
    """The same for a kernel: blocks as if they were heads, an edge in reverse order."""
    part = _of(t, tile, at)
    if tile.blocks > 1:
        part = part.unflatten(2, (tile.blocks, -1)).movedim(2, 1).flatten(0, 1)
    return part.flip(2) if tile.kind == "edge" else part


def _uncut(t: Tensor, tile: Tile) -> Tensor:
    """The inverse."""
    t = t.flip(2) if tile.kind == "edge" else t
    if tile.blocks > 1:
        t = t.unflatten(0, (-1, tile.blocks)).movedim(1, 2).flatten(2, 3)
    return t
