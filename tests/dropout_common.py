"""Which attention probabilities are dropped, by the definition, in unsigned numbers of numpy."""

from functools import cache

import numpy
import torch

U32, U64 = numpy.uint32, numpy.uint64


def _mixed(numbers, key):
    x = numbers.astype(U64) * U64(0x9E3779B97F4A7C15) + U64(key)
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


@cache
def kept(key: int, p: float, samples: int, heads: int, length: int) -> torch.Tensor:
    """bool [samples, heads, queries, keys]: what is not dropped."""
    head = numpy.arange(samples * heads).reshape(samples, heads, 1)
    rows = _mixed(head * 2**32 + numpy.arange(length), key)
    columns = _mixed(numpy.arange(length), key ^ 0x9E3779B97F4A7C15)
    half = U32(2**31)
    low, high, columns = (t.astype(U32) - half for t in (rows, rows >> U64(32), columns))
    x = low[..., None] + columns
    x = (x ^ (x >> U32(16))) * U32(0x85EBCA6B) ^ high[..., None]
    x = (x ^ (x >> U32(13))) * U32(0xC2B2AE35)
    return torch.from_numpy(x.astype(numpy.int32) >= round(p * 2**32) - 2**31)
