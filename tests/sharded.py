"""Parameters of a layer that every D starts from, and what the ranks' parts make together."""

import zlib

import torch
from layers_common import random

from megatron_tsp import zigzag


def sections_of(layer, inner=None):
    """{parameter: (dimension, sizes)} of what is sharded: each section is cut by itself."""
    found = {
        name: (param.partition_dim, [param.size(param.partition_dim)])
        for name, param in layer.named_parameters()
        if getattr(param, "tensor_model_parallel", False)
    }
    for name, param in layer.named_parameters():
        if hasattr(param, "partition_sizes"):
            found[name] = 0, param.partition_sizes
    if hasattr(inner, "in_proj_split_sections"):
        found["self_attention.in_proj.weight"] = 0, inner.in_proj_split_sections
        keys, values = inner.qk_dim_local_tp, inner.v_dim_local_tp
        found["self_attention.conv1d.weight"] = 0, (keys, keys, values)
    return found


def fill(name, param, sections, degree, rank):
    """The rank's part of numbers that depend on the name only."""
    dim, sizes = sections.get(name, (0, [param.size(0)]))
    degree, rank = (degree, rank) if name in sections else (1, 0)
    parts = []
    for at, size in enumerate(sizes):
        shape = list(param.shape)
        shape[dim] = size * degree
        numbers = random(*shape, seed=zlib.crc32(f"{name}{at}".encode())) / 2
        parts.append(numbers.chunk(degree, dim)[rank])
    param.data.copy_(torch.cat(parts, dim))


def whole(name, parts, sections):
    """The tensor of one rank from those of all, in their order."""
    if name in ("y", "dx"):
        return zigzag.to_natural(torch.cat(parts), 0, len(parts))
    if name not in sections:  # each rank has its tokens' or heads' share
        return sum(parts)
    dim, sizes = sections[name]
    cut = [part.split(list(sizes), dim) for part in parts]
    return torch.cat([torch.cat(same, dim) for same in zip(*cut, strict=True)], dim)
