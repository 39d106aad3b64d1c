"""RMSNorm and LayerNorm for local tokens, saving their input and the row statistics only.

Megatron's own choice without Transformer Engine and Apex refuses sequence parallelism. Here the
parameters carry `sequence_parallel`, by which Megatron sums their gradients over the group.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_tsp.errors import TSPError


class _RMSNorm(torch.autograd.Function):
    """y = x·rstd·w with rstd = 1/sqrt(mean(x²) + eps), in fp32 inside (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = rstd.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        xhat = x.to(rstd.dtype) * rstd
        dweight = (dy.to(rstd.dtype) * xhat).flatten(0, -2).sum(0).to(weight.dtype)
        dxhat = (dy * weight).to(rstd.dtype)
        mean = (dxhat * xhat).mean(-1, keepdim=True)
        dx = dxhat.sub_(xhat.mul_(mean)).mul_(rstd)
        return dx.to(x.dtype), dweight, None


class TSPNorm(torch.nn.Module):
    """The norm that `config.normalization` names: RMSNorm or LayerNorm.

    Input and output [..., hidden_size], in the same dtype.

    Raises:
        TSPError: for another normalization.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise TSPError(
                f"--normalization {config.normalization} is not supported by TSP; "
                "use RMSNorm or LayerNorm"
            )
        self.eps = eps
        self.hidden_size = hidden_size
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(start(hidden_size, **options))
        self.weight.sequence_parallel = config.sequence_parallel
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, **options))
            self.bias.sequence_parallel = config.sequence_parallel
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.bias is None:
            return _RMSNorm.apply(x, weight, self.eps)
        return F.layer_norm(x, (self.hidden_size,), weight, self.bias, self.eps)
