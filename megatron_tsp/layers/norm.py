"""RMSNorm and LayerNorm for local tokens, saving their input and the row statistics only.

Megatron's own choice without Transformer Engine and Apex refuses sequence parallelism. Here the
parameters carry `sequence_parallel`, by which Megatron sums their gradients over the group.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_tsp.errors import TSPError


@dataclass(frozen=True)
class Normalize:
    """The function, without its parameters: forward, and backward from x and the statistics.

    x is [..., h], weight and bias [h] or None, in one dtype; statistics are fp32 (fp64 for fp64).

    Attributes:
        rms: RMSNorm, x/rms(x)·w (arXiv 1910.07467), in fp32 inside; else LayerNorm.
        eps: added to the mean square or the variance.
        zero_centered: the stored weight is w - 1.
    """

    rms: bool
    eps: float
    zero_centered: bool

    @classmethod
    def of(cls, config: TransformerConfig, eps: float | None = None) -> "Normalize":
        """The norm that `config.normalization` names.

        Raises:
            TSPError: it is neither RMSNorm nor LayerNorm.
        """
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise TSPError(
                f"--normalization {config.normalization} is not supported by TSP; "
                "use RMSNorm or LayerNorm"
            )
        eps = config.layernorm_epsilon if eps is None else eps
        return cls(config.normalization == "RMSNorm", eps, config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(y, statistics): y like x; the statistics are what `again` and `backward` need."""
        weight = self._scale(weight)
        if not self.rms:
            y, *statistics = torch.native_layer_norm(x, weight.shape, weight, bias, self.eps)
            return y, torch.stack(statistics)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = rstd.square_().div_(x.size(-1)).add_(self.eps).rsqrt_()
        return (wide * rstd).to(x.dtype).mul_(weight), rstd

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor) -> Tensor:
        """y once more."""
        if not self.rms:
            return self.forward(x, weight, bias)[0]
        return (x * statistics).to(x.dtype).mul_(self._scale(weight))

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(dx, dweight, dbias) of these tokens."""
        weight = self._scale(weight)
        if not self.rms:
            mask = [True, True, bias is not None]
            return torch.ops.aten.native_layer_norm_backward(
                dy, x, weight.shape, *statistics, weight, bias, mask
            )
        xhat = x * statistics
        dweight = (dy * xhat).flatten(0, -2).sum(0).to(weight.dtype)
        dxhat = (dy * weight).to(xhat.dtype)
        mean = (dxhat * xhat).mean(-1, keepdim=True)
        return dxhat.sub_(xhat.mul_(mean)).mul_(statistics).to(x.dtype), dweight, None

    def _scale(self, weight: Tensor) -> Tensor:
        return weight + 1 if self.zero_centered else weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, normalize: Normalize):
        y, statistics = normalize.forward(x, weight, bias)
        ctx.normalize = normalize
        ctx.save_for_backward(x, weight, bias, statistics)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, statistics = ctx.saved_tensors
        return *ctx.normalize.backward(dy, x, weight, bias, statistics), None


def make_parameters(config: TransformerConfig, size: int) -> tuple[Parameter, Parameter | None]:
    """(weight, bias) of the norm that the config names, [size], as Megatron initializes them."""
    normalize = Normalize.of(config)
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    options = {"dtype": config.params_dtype, "device": device}
    start = torch.zeros if normalize.zero_centered else torch.ones
    weight = Parameter(start(size, **options))
    bias = None if normalize.rms else Parameter(torch.zeros(size, **options))
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel
    return weight, bias


class TSPNorm(Module):
    """The norm that `config.normalization` names, for Megatron's norm slots.

    Input and output [..., hidden_size], in the same dtype.

    Raises:
        TSPError: for a normalization that is neither RMSNorm nor LayerNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.normalize = Normalize.of(config, eps)
        self.weight, self.bias = make_parameters(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x."""
        return _Norm.apply(x, self.weight, self.bias, self.normalize)
