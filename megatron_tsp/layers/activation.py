"""The elementwise middle of an MLP, forward and backward, for any activation Megatron takes."""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Activation:
    """act(z), or for a gated linear unit act(gate)∘(up + offset), z = [gate; up] side by side.

    Args:
        config: its `activation_func`, `gated_linear_unit`, `activation_func_clamp_value` and
            `glu_linear_offset` are used, as in Megatron's MLP.
    """

    def __init__(self, config: TransformerConfig):
        self.function = config.activation_func
        if self.function is F.gelu and config.bias_activation_fusion:
            # Megatron's fused kernel is the tanh approximation: the same model, the same function.
            self.function = partial(F.gelu, approximate="tanh")
        self.gated = config.gated_linear_unit
        self.clamp = config.activation_func_clamp_value
        self.offset = config.glu_linear_offset
        self.swiglu = (
            self.gated and self.function is F.silu and self.clamp is None and not self.offset
        )

    def __call__(self, z: Tensor) -> Tensor:
        """z [N, 2f] (gated) or [N, f] → [N, f]."""
        if not self.gated:
            return self.function(z)
        gate, up = z.chunk(2, dim=-1)
        if self.clamp is not None:
            gate = gate.clamp(max=self.clamp)
            up = up.clamp(min=-self.clamp, max=self.clamp)
        if self.offset:
            up = up + self.offset
        return self.function(gate) * up

    def backward(self, z: Tensor, dactive: Tensor, reuse: bool = False) -> tuple[Tensor, Tensor]:
        """(act(z), dz) for the gradient `dactive` of act(z); shapes as in the forward.

        The result may lie in the memory of `dactive`, and with `reuse` in that of z.
        """
        if self.swiglu:
            dz = z if reuse else torch.empty_like(z)
            step = max(1, _AT_ONCE // z.size(-1))
            for rows in zip(z.split(step), dactive.split(step), dz.split(step), strict=True):
                _swiglu_backward(*rows)
            return dactive, dz
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            active = self(z)
            (dz,) = torch.autograd.grad(active, z, dactive)
        return active.detach(), dz


#: Numbers of z at a time: what lies between z and dz is then small.
_AT_ONCE = 2**22


def _swiglu_backward(z: Tensor, dactive: Tensor, dz: Tensor) -> None:
    """Put dz into `dz`, which may be z, and silu(gate)·up into `dactive`."""
    (gate, up), (dgate, dup) = z.chunk(2, dim=-1), dz.chunk(2, dim=-1)
    silu, dsilu = F.silu(gate), dactive * up
    active = silu * up
    torch.mul(dactive, silu, out=dup)
    dgate.copy_(torch.ops.aten.silu_backward(dsilu, gate))
    dactive.copy_(active)
