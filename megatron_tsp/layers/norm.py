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
        zero_centered: the stored weight is w - 1. The 1 is added, and w applied, in fp32: bf16
            has no number between 1 and 1 + 1/128.
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
        if not self.rms:
            wide, scale, shift = self._operands(x, weight, bias)
            y, *statistics = torch.native_layer_norm(wide, scale.shape, scale, shift, self.eps)
            return y.to(x.dtype), torch.stack(statistics)

        def part(x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            rstd = rstd.square_().div_(x.size(-1)).add_(self.eps).rsqrt_()
            return self._scaled(wide * rstd, weight, x.dtype), rstd

        y, rstd = _by_rows(part, x)
        return y, rstd

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor) -> Tensor:
        """y once more."""
        if not self.rms:
            return self.forward(x, weight, bias)[0]
        return _by_rows(
            lambda x, rstd: (self._scaled(x * rstd, weight, x.dtype),), x, statistics
        )[0]

    def backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor,
        reuse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(dx, dweight, dbias) of these tokens; with `reuse` dx may lie in the memory of dy."""
        if not self.rms:
            mask = [True, True, bias is not None]
            wide, scale, shift = self._operands(x, weight, bias)
            grads = torch.ops.aten.native_layer_norm_backward(
                dy.to(wide.dtype), wide, scale.shape, *statistics, scale, shift, mask
            )
            return tuple(None if grad is None else grad.to(x.dtype) for grad in grads)
        dweights = []

        def part(dy, x, rstd):
            xhat = x * rstd
            dweights.append((dy * xhat).sum(0))
            dxhat = (dy * self._weight(weight)).to(xhat.dtype)
            mean = (dxhat * xhat).mean(-1, keepdim=True)
            return (dxhat.sub_(xhat.mul_(mean)).mul_(rstd).to(x.dtype),)

        (dx,) = _by_rows(part, dy, x, statistics, into=dy if reuse else None)
        return dx, sum(dweights).to(weight.dtype), None

    def _scaled(self, normal: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if self.zero_centered:
            return normal.mul_(self._weight(weight)).to(dtype)
        return normal.to(dtype).mul_(weight)

    def _operands(self, x: Tensor, weight: Tensor, bias: Tensor | None):
        """(x, weight, bias) of a layer norm, in one dtype, as its kernels want them."""
        weight = self._weight(weight)
        return x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)

    def _weight(self, weight: Tensor) -> Tensor:
        if self.zero_centered:
            return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1
        return weight


#: Numbers that are wide at a time: a fp32 copy of all tokens would be the largest tensor there.
_AT_ONCE = 2**22


def _by_rows(function, *tensors: Tensor, into: Tensor | None = None) -> list[Tensor]:
    """function(rows of each tensor) → a tuple of rows, for all rows, some at a time.

    The tensors are [..., any], alike in front; so are the results. `into`: one of the tensors,
    contiguous, whose rows a single result may take the place of.
    """
    rows = [t.reshape(-1, t.size(-1)) for t in tensors]
    number, width = rows[0].shape
    step = max(1, _AT_ONCE // width)
    results: list[Tensor] = [] if into is None else [into.view(number, -1)]
    if number <= step:
        results = list(function(*rows))
    else:
        for at in range(0, number, step):
            parts = function(*(t[at : at + step] for t in rows))
            results = results or [part.new_empty(number, part.size(-1)) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[at : at + step] = part
    return [result.view(*tensors[0].shape[:-1], result.size(-1)) for result in results]


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
