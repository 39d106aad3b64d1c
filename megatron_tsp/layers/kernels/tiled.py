"""Attention in plain PyTorch, tile by tile with a running softmax, on any device and in any dtype.

Slower than a fused kernel. It is for attention dropout where the fused kernel has none.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_tsp.layers.kernels.of_torch import for_all_heads, summed

#: Queries, and keys, of a tile.
_ROWS, _COLUMNS = 256, 512


class Tiled:
    """arXiv 2205.14135, algorithms 2 and 4; sums and exponentials in fp32, or fp64 for fp64."""

    has_dropout = True

    def __init__(self, scale: float):
        self.scale = scale

    def packs(self, q):
        """As `Kernel.packs`."""
        return False

    def forward(self, q, k, v, causal, dropout=None):
        """As `Kernel.forward`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        k, v = for_all_heads(k, q), for_all_heads(v, q)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
        drops = _Drops(dropout)
        for rows in _parts(q.size(2), _ROWS):
            queries = q[:, :, rows].to(wide) * self.scale
            largest = lse.new_full(queries.shape[:-1], -torch.inf)
            total, sums = torch.zeros_like(largest), torch.zeros_like(queries)
            for columns in _columns(rows, k.size(2), causal):
                p = _scores(queries, k[:, :, columns].to(wide), rows, columns, causal)
                before, largest = largest, torch.maximum(largest, p.amax(-1))
                p.sub_(largest.unsqueeze(-1)).exp_()
                shrunk = before.sub_(largest).exp_()
                total = total.mul_(shrunk).add_(p.sum(-1))
                p = drops.dropped(p, drops.keep(rows, columns))
                sums = sums.mul_(shrunk.unsqueeze(-1)).add_(p @ v[:, :, columns].to(wide))
            out[:, :, rows] = sums.div_(total.unsqueeze(-1))
            lse[:, :, rows] = largest.add_(total.log_())
        return out, lse

    def backward(self, dout, q, k, v, out, lse, causal, dropout=None):
        """As `Kernel.backward`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
        shared, k, v = k, for_all_heads(k, q), for_all_heads(v, q)
        drops = _Drops(dropout)
        for rows in _parts(q.size(2), _ROWS):
            queries, douts = (t[:, :, rows].to(wide) for t in (q, dout))
            delta = (douts * out[:, :, rows]).sum(-1, keepdim=True)
            dqueries = torch.zeros_like(queries)
            for columns in _columns(rows, k.size(2), causal):
                keys = k[:, :, columns].to(wide)
                p = _scores(queries * self.scale, keys, rows, columns, causal)
                p.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
                keep = drops.keep(rows, columns)
                dp = drops.dropped(douts @ v[:, :, columns].to(wide).mT, keep)
                ds = dp.sub_(delta).mul_(p).mul_(self.scale)
                dv[:, :, columns] += summed(drops.dropped(p, keep).mT @ douts, shared)
                dk[:, :, columns] += summed(ds.mT @ queries, shared)
                dqueries += ds @ keys
            dq[:, :, rows] = dqueries
        return dq, *(d.to(q.dtype) for d in (dk, dv))


class _Drops:
    """The dropout of one call; or none."""

    def __init__(self, dropout):
        self.dropout = dropout
        if dropout is not None:
            self.rows, self.columns = dropout.hashed()

    def keep(self, rows: slice, columns: slice) -> Tensor | None:
        """What stays of a tile, bool; None: all of it."""
        if self.dropout is None:
            return None
        return self.dropout.keeps(self.rows[:, :, rows], self.columns[:, :, columns])

    def dropped(self, p: Tensor, keep: Tensor | None) -> Tensor:
        """What is left of p, scaled; changes p."""
        return p if keep is None else p.mul_(keep).div_(1 - self.dropout.p)


def _parts(length: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, length)) for at in range(0, length, step))


def _columns(rows: slice, length: int, causal: bool) -> Iterator[slice]:
    """The keys that some of these queries see."""
    return _parts(rows.stop if causal else length, _COLUMNS)


def _scores(queries: Tensor, keys: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """queries · keysᵀ, -inf where a key is not seen."""
    scores = queries @ keys.mT
    if causal and columns.stop - 1 > rows.start:
        query = torch.arange(rows.start, rows.stop, device=keys.device).unsqueeze(-1)
        scores.masked_fill_(torch.arange(columns.start, columns.stop, device=keys.device) > query,
                            -torch.inf)  # fmt: skip
    return scores
