"""The attention kernels, behind one interface: (out, lse) forward, backward under a given lse.

Layout [B, H, s, d], any strides with the last dimension contiguous. Keys and values may have one
head for all H query heads (grouped queries). `causal` needs as many queries as keys: query i sees
keys 0 to i. No kernel ever holds an s x s tensor.

The backward takes the out and the log-sum-exp of the *whole* softmax even when k and v are a part
of its keys; then dq, dk and dv are this part's exact contributions (arXiv 2205.14135, 2310.01889).

Some kernels also take many sequences of different lengths in one call (`packs`).

`choose` follows Megatron's --attention-backend and --flash-attention-version. What is asked for and
not there is an error, not another kernel.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_tsp.errors import TSPError
from megatron_tsp.layers.kernels import flash_attn, transformer_engine
from megatron_tsp.layers.kernels.of_torch import Cudnn, TorchFlash
from megatron_tsp.layers.kernels.tiled import Tiled
from megatron_tsp.layers.kernels.transformer_engine import TransformerEngineFused

if TYPE_CHECKING:
    from megatron_tsp.layers.dropout import TileDropout


class Lengths(NamedTuple):
    """Sequences that lie one behind the other; sequence i of the queries meets i of the keys.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 [n + 1], where each begins, and the end.
        max_seqlen_q, max_seqlen_k: tokens of the longest.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Kernel(Protocol):
    """One kernel, with its scale of the logits."""

    #: Whether it drops probabilities, by masks of its own or by `TileDropout.keeps`.
    has_dropout: bool

    def __init__(self, scale: float): ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: "TileDropout | None" = None
    ) -> tuple[Tensor, Tensor]:
        """softmax(scale·q·kᵀ)·v and its log-sum-exp.

        Args:
            q: [B, H, sq, d]. k, v: [B, H or 1, sk, d], the dtype of q.
            dropout: of the probabilities, after the softmax; only if `has_dropout`.

        Returns:
            out [B, H, sq, d] in q's dtype; lse [B, H, sq], fp32 (fp64 for fp64).
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        dropout: "TileDropout | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), shaped as q, k and v: dk and dv are summed over heads that share them."""
        ...

    def packs(self, q: Tensor) -> bool:
        """Whether it has the two that follow, for tensors such as q."""
        ...

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool,
        dropout: "TileDropout | None" = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same for sequences of different lengths, none of them empty.

        Args:
            q: [tokens, n, d]. k, v: [tokens of the keys, g, d]; query head i has KV head i·g/n.

        Returns:
            out [tokens, n, d]; lse [n, tokens].
        """
        ...

    def backward_packed(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        lengths: Lengths, causal: bool, dropout: "TileDropout | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(dq, dk, dv), shaped as q, k and v."""
        ...


def choose(
    backend: str = "auto",
    version: int | None = None,
    gpu: bool | None = None,
    dropout: bool = False,
    engine: bool = False,
) -> type:
    """The kernel's class.

    Args:
        backend: "auto": Transformer Engine's where `engine` asks for it and it can be called, else
            PyTorch's flash attention; "flash": flash-attn 3 or 2 where one is
            installed, else PyTorch's; "fused": Transformer Engine's where it is installed, else
            cuDNN's as PyTorch has it, which is the same.
        version: of flash-attn, 2 or 3: that one.
        gpu: whether the tensors are on one; None: whether there is one.
        dropout: whether it must have dropout: then "auto" takes `Tiled` where PyTorch's has none.
        engine: whether the model is to be Transformer Engine's (--transformer-impl).

    Raises:
        TSPError: the kernel is not there, or has no dropout, by the flag that asks for it.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    flag = f"--attention-backend {backend}"
    if version is not None:
        if backend not in ("auto", "flash"):
            raise TSPError(
                f"--flash-attention-version {version} contradicts {flag}; drop one of them"
            )
        flag = f"--flash-attention-version {version}"
        found = flash_attn.kernel(version, flag, gpu)
    elif backend == "fused":
        found = _fused(flag, gpu)
    elif backend == "flash":
        found = (flash_attn.newest(dropout) if gpu else None) or TorchFlash
    elif backend == "auto":
        found = TransformerEngineFused if engine and _engine(gpu) else TorchFlash
    else:
        raise TSPError(f"{flag} builds scores of s x s; use auto, flash or fused")
    if dropout and not found.has_dropout:
        if flag != "--attention-backend auto":
            raise TSPError(
                f"{flag}: this kernel has no attention dropout; pass --attention-dropout 0, or "
                "leave the kernel to TSP with --attention-backend auto"
            )
        return Tiled
    return found


def _has_cudnn(gpu: bool) -> bool:
    return gpu and not torch.version.hip and torch.backends.cudnn.is_available()


def _engine(gpu: bool) -> bool:
    """Whether Transformer Engine's attention can be called."""
    if not _has_cudnn(gpu) or not transformer_engine.installed():
        return False
    try:
        return not transformer_engine.misfit()
    except TSPError:  # built for another PyTorch: Megatron does without it as well
        return False


def _fused(flag: str, gpu: bool) -> type:
    if not _has_cudnn(gpu):
        raise TSPError(f"{flag} needs cuDNN and its GPU; elsewhere use auto or flash")
    if not transformer_engine.installed():
        return Cudnn
    if why := transformer_engine.misfit():
        raise TSPError(f"{flag}: {why}; use auto or flash")
    return TransformerEngineFused


def check_shapes(channels: int, half: bool) -> None:
    """What every kernel asks of the model on a GPU.

    Args:
        channels: of a head.
        half: whether the model is in bf16 or fp16.

    Raises:
        TSPError: the kernels do not take such heads, or such a dtype.
    """
    if not half:
        raise TSPError(
            "attention kernels on a GPU take bf16 or fp16, and the model is in fp32: pass --bf16"
        )
    if channels % 8 or channels > 256:
        near = min(max(8, (channels + 4) // 8 * 8), 256)
        raise TSPError(
            f"attention kernels on a GPU take heads of a multiple of 8 channels, up to 256, not "
            f"{channels}: set --kv-channels, the nearest is {near}"
        )
