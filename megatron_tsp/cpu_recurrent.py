"""CPU mode's stand-ins for the kernels of layers that scan the sequence: they are for GPUs.

Gated delta net layers call flash-linear-attention. Its recurrence is replaced by Megatron's own in
PyTorch, which Megatron takes on a GPU too, with --deterministic-mode. Mamba layers call mamba_ssm:
one function that convolves and scans (arXiv 2405.21060, listing 1), and a norm.
"""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


def stand_ins():
    """Yield (owner, name, stand-in) for what Megatron imports from both, found or not."""
    yield common, "HAVE_FLA", True
    yield common, "l2norm", _l2norm
    yield gdn, "causal_conv1d", _causal_conv1d
    yield gdn, "chunk_gated_delta_rule", common.torch_chunk_gated_delta_rule
    yield mamba_mixer, "HAVE_MAMBA_SSM", True
    yield mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False
    yield mamba_mixer, "mamba_split_conv1d_scan_combined", _convolve_and_scan
    yield mamba_mixer, "ExtendedRMSNorm", _GroupedRMSNorm


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _l2norm(x: Tensor, eps=1e-6) -> Tensor:
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=None, **_):
    """x [b, s, d], weight [d, w] → ([b, s, d], None): each channel by itself, of w tokens."""
    if cu_seqlens is not None or activation != "silu":
        raise NotImplementedError("CPU mode: a convolution over packed sequences, or not with SiLU")
    padded = F.pad(x.transpose(1, 2), (weight.size(1) - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))).mT, None


def _convolve_and_scan(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, dt_bias: Tensor, A: Tensor,
    *, D: Tensor, chunk_size: int, headdim: int, ngroups: int, seq_idx=None, **_,
) -> Tensor:  # fmt: skip
    """[b, s, z + x + B + C + dt] → [b, s, heads · headdim], gated by SiLU(z)."""
    if seq_idx is not None:
        raise NotImplementedError("CPU mode: a scan over packed sequences")
    heads = len(A)
    width, mixed = heads * headdim, len(conv1d_weight)
    z, mix, dt = zxbcdt.split([width, mixed, heads], -1)
    mix = _wide(_causal_conv1d(mix, conv1d_weight, conv1d_bias)[0])
    x, B, C = mix.split([width, *[(mixed - width) // 2] * 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (
        t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for t in (B, C)
    )
    dt = F.softplus(_wide(dt) + dt_bias)
    steps = (t.split(chunk_size, 1) for t in (dt * A, dt.unsqueeze(-1) * x, B, C))
    state = x.new_zeros(len(x), heads, headdim, B.size(-1))
    outputs = []
    for chunk in zip(*steps, strict=True):
        output, state = _scan_chunk(*chunk, state)
        outputs.append(output)
    y = torch.cat(outputs, 1) + D.view(heads, -1) * x
    return (y.flatten(2) * F.silu(_wide(z))).to(zxbcdt.dtype)


def _scan_chunk(log_decay, x, B, C, state):
    """h_t = exp(log_decay_t)·h_(t-1) + x_t ⊗ B_t, y_t = h_t·C_t, over a chunk: (y, last h).

    log_decay [b, c, n], x [b, c, n, p], B and C [b, c, n, states], h [b, n, p, states].
    """
    total = log_decay.cumsum(1)
    between = total.unsqueeze(2) - total.unsqueeze(1)  # [b, to, from, n]
    later = torch.ones(between.shape[1:3], dtype=torch.bool).triu(1)
    between = between.masked_fill(later[:, :, None], -torch.inf).exp()
    y = torch.einsum("btns,bfns,btfn,bfnp->btnp", C, B, between, x)
    y = y + torch.einsum("btns,btn,bnps->btnp", C, total.exp(), state)
    left = (total[:, -1:] - total).exp()
    kept = state * total[:, -1, :, None, None].exp()
    return y, kept + torch.einsum("bfns,bfn,bfnp->bnps", B, left, x)


class _GroupedRMSNorm(torch.nn.Module):
    """RMSNorm of each group of features; the gate has been applied before."""

    def __init__(self, hidden_size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → the same."""
        groups = _wide(x).unflatten(-1, (-1, self.group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (groups.flatten(-2) * self.weight).to(x.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The weight, sharded over tensor-parallel ranks."""
        group = getattr(self, "tp_group", None)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=group or parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
