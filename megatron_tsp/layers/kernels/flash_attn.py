"""The flash-attn packages, 2 and 3 (https://github.com/Dao-AILab/flash-attention), on a GPU.

Both take [B, s, H, d], and fewer KV heads than query heads as they are.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from megatron_tsp.errors import TSPError

_MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}


class FlashAttention2:
    """flash-attn 2, from 2.7 on; bf16 and fp16."""

    has_dropout = False

    def __init__(self, scale: float):
        self.scale = scale
        self.module = importlib.import_module(_MODULES[2])

    def forward(self, q, k, v, causal):
        """As `Kernel.forward`."""
        rows = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = self.module._flash_attn_forward(
            *rows, 0.0, self.scale, causal, -1, -1, 0.0, None, False
        )
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal):
        """As `Kernel.backward`."""
        rows = [t.transpose(1, 2).contiguous() for t in (dout, q, k, v, out)]
        grads = [torch.empty_like(t) for t in rows[1:4]]
        self.module._flash_attn_backward(
            *rows, lse.contiguous(), *grads, 0.0, self.scale, causal, -1, -1, 0.0, None,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return tuple(t.transpose(1, 2) for t in grads)


class FlashAttention3:
    """flash-attn 3, for Hopper; bf16 and fp16."""

    has_dropout = False

    def __init__(self, scale: float):
        self.scale = scale
        self.module = importlib.import_module(_MODULES[3])

    def forward(self, q, k, v, causal):
        """As `Kernel.forward`."""
        rows = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, *_ = self.module._flash_attn_forward(
            *rows, softmax_scale=self.scale, causal=causal
        )
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal):
        """As `Kernel.backward`."""
        rows = [t.transpose(1, 2).contiguous() for t in (dout, q, k, v, out)]
        grads = [torch.empty_like(t) for t in rows[1:4]]
        fixed_lengths = (None,) * 6
        self.module._flash_attn_backward(
            *rows, lse.contiguous(), *fixed_lengths, *grads, self.scale, causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return tuple(t.transpose(1, 2) for t in grads)


_KERNELS = {2: FlashAttention2, 3: FlashAttention3}


def kernel(number: int, flag: str, gpu: bool) -> type:
    """The kernel of that version.

    Raises:
        TSPError: there is none, by the flag that asks for it.
    """
    if number not in _KERNELS:
        raise TSPError(f"{flag}: TSP takes 2 and 3")
    if not gpu:
        raise TSPError(f"{flag} needs a GPU: flash-attn has no CPU kernels")
    if why := _missing(number):
        raise TSPError(f"{flag}: {why}")
    return _KERNELS[number]


def newest() -> type | None:
    """The kernel of the newest version that is there, or None."""
    return next((_KERNELS[number] for number in (3, 2) if not _missing(number)), None)


def _missing(number: int) -> str:
    """Why that version cannot run here; empty if it can."""
    if not find_spec(_MODULES[number].split(".")[0]):
        return f"flash-attn {number} is not installed (no module {_MODULES[number].split('.')[0]})"
    if number == 3 and torch.cuda.get_device_capability()[0] != 9:
        return "flash-attn 3 is for Hopper GPUs"
    if number == 2 and _installed() < (2, 7):
        return f"flash-attn {'.'.join(map(str, _installed()))} is too old: from 2.7 on"
    return ""


def _installed() -> tuple[int, int]:
    try:
        major, minor, *_ = version("flash_attn").split(".")
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
