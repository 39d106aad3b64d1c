"""The flash-attn packages, 2 and 3 (https://github.com/Dao-AILab/flash-attention), on a GPU.

Both take [B, s, H, d], or sequences of different lengths side by side as [tokens, H, d], with any
strides if the last dimension is contiguous, and fewer KV heads than query heads as they are. Their
arguments differ; what they mean does not.
"""

from contextlib import contextmanager, nullcontext

import torch

from megatron_tsp.errors import TSPError
from megatron_tsp.layers.kernels.packages import first_module, parameters, version


class FlashAttention:
    """What the versions share. A subclass has `modules`, `_forward` and `_backward`."""

    def __init__(self, scale: float):
        self.scale = scale
        self.module = first_module(self.modules)

    def packs(self, q):
        """As `Kernel.packs`."""
        return True

    def forward(self, q, k, v, causal, dropout=None):
        """As `Kernel.forward`."""
        rows = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = self._forward(*rows, causal, None, dropout)
        return out.transpose(1, 2), lse

    def backward(self, dout, q, k, v, out, lse, causal, dropout=None):
        """As `Kernel.backward`."""
        rows = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        grads = self._gradients(*rows, lse, causal, None, dropout)
        return tuple(t.transpose(1, 2) for t in grads)

    def forward_packed(self, q, k, v, lengths, causal, dropout=None):
        """As `Kernel.forward_packed`."""
        return self._forward(q, k, v, causal, lengths, dropout)

    def backward_packed(self, dout, q, k, v, out, lse, lengths, causal, dropout=None):
        """As `Kernel.backward_packed`."""
        return self._gradients(dout, q, k, v, out, lse, causal, lengths, dropout)

    def _gradients(self, dout, q, k, v, out, lse, causal, lengths, dropout):
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        # The kernels read the lse by its address, without strides.
        self._backward(dout, q, k, v, out, lse.contiguous(), grads, causal, lengths, dropout)
        return grads


class FlashAttention2(FlashAttention):
    """flash-attn 2, from 2.7 on, for CUDA and ROCm; bf16 and fp16. With dropout by masks of its
    own, which it draws from the seed of the call."""

    has_dropout = True
    modules = ("flash_attn.flash_attn_interface",)

    def _arguments(self, causal, lengths, dropout):
        return dict(
            **(lengths._asdict() if lengths else {}), dropout_p=dropout.p if dropout else 0.0,
            softmax_scale=self.scale, causal=causal, window_size_left=-1, window_size_right=-1,
            softcap=0.0, alibi_slopes=None,
        )  # fmt: skip

    def _forward(self, q, k, v, causal, lengths, dropout):
        name = "_flash_attn_varlen_forward" if lengths else "_flash_attn_forward"
        arguments = self._arguments(causal, lengths, dropout)
        with _seeded(q.device, dropout.seed) if dropout else nullcontext():
            out, lse, *_ = getattr(self.module, name)(q, k, v, **arguments, return_softmax=False)
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, grads, causal, lengths, dropout):
        name = "_flash_attn_varlen_backward" if lengths else "_flash_attn_backward"
        getattr(self.module, name)(
            dout, q, k, v, out, lse, *grads, **self._arguments(causal, lengths, dropout),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=philox_state(q, dropout.seed) if dropout else None,
        )  # fmt: skip


class FlashAttention3(FlashAttention):
    """flash-attn 3, from 3.0.0b1 on, for Hopper; bf16 and fp16."""

    has_dropout = False
    modules = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")

    def __init__(self, scale: float):
        super().__init__(scale)
        # Where arguments have no defaults (3.0.0b1), those that training leaves out are None.
        self.forward_unused, self.backward_unused = (
            dict.fromkeys(name for name, required in parameters(function).items() if required)
            for function in (self.module._flash_attn_forward, self.module._flash_attn_backward)
        )
        known = parameters(self.module._flash_attn_backward)
        self.causal = "is_causal" if "is_causal" in known else "causal"

    def _forward(self, q, k, v, causal, lengths, _):
        given = dict(q=q, k=k, v=v, softmax_scale=self.scale, causal=causal)
        given |= lengths._asdict() if lengths else {}
        out, lse, *_ = self.module._flash_attn_forward(**{**self.forward_unused, **given})
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, grads, causal, lengths, _):
        given = dict(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse)
        given |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        given |= {self.causal: causal, "softmax_scale": self.scale}
        given |= lengths._asdict() if lengths else {}
        given["deterministic"] = torch.are_deterministic_algorithms_enabled()
        self.module._flash_attn_backward(**{**self.backward_unused, **given})


@contextmanager
def _seeded(device: torch.device, seed: int):
    """The device's random generator starts at a seed, and afterwards is where it was."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def philox_state(q: torch.Tensor, seed: int) -> torch.Tensor:
    """(seed, offset) of a generator that has just got this seed: int64 [2], beside q."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    state[0] = seed
    return state


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


def newest(dropout: bool = False) -> type | None:
    """The kernel of the newest version that is there, and has dropout if that is asked; or None."""
    able = [number for number in (3, 2) if _KERNELS[number].has_dropout or not dropout]
    return next((_KERNELS[number] for number in able if not _missing(number)), None)


def _missing(number: int) -> str:
    """Why that version cannot run here; empty if it can."""
    if number == 3 and (torch.version.hip or torch.cuda.get_device_capability()[0] != 9):
        return "flash-attn 3 is for Hopper GPUs"
    names = _KERNELS[number].modules
    module = first_module(names)
    if module is None:
        return f"flash-attn {number} is not installed (no module {' or '.join(names)})"
    if number == 2:
        found = version("flash_attn")
        if found is None or not (2, 7) <= found.release[:2] < (3,):
            return f"flash-attn {found or 'of unknown version'}: TSP takes 2.7 and later ones of 2"
    elif "cu_seqlens_q" not in parameters(module._flash_attn_backward):
        return "this flash-attn 3 is older than 3.0.0b1, which TSP takes, and later ones of 3"
    return ""
