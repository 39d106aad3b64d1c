"""What a hybrid model's pattern of layers and the other flags say together."""

from argparse import Namespace

from megatron_tsp.checks import nearest
from megatron_tsp.errors import TSPError


def check_hybrid(args: Namespace) -> None:
    """Raise `TSPError` for layers whose sizes do not fit D, whose kernels are missing, or that
    leave a pipeline rank without experts."""
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    if not pattern:
        return
    if args.num_experts:
        _check_experts(args, pattern)
    _check_recurrent(args, pattern)
    _check_kernels(pattern)


def _check_experts(args: Namespace, pattern: str) -> None:
    """The pattern may leave pipeline ranks without experts."""
    pattern = pattern.split("/")[0]
    balance, stages = args.moe_aux_loss_coeff, args.pipeline_model_parallel_size
    reported = args.moe_z_loss_coeff or any(balance if isinstance(balance, list) else [balance])
    segments = pattern.split("|")
    if len(segments) == 1:  # Megatron cuts it evenly
        length = max(1, len(pattern) // stages)
        segments = [pattern[at : at + length] for at in range(0, len(pattern), length)]
    ranks = ["".join(segments[rank::stages]) for rank in range(stages)]
    if reported and not all("E" in layers for layers in ranks):
        raise TSPError(
            f"--hybrid-layer-pattern {pattern}: where a pipeline rank has no expert layer (E), "
            "Megatron's report of the auxiliary losses hangs. Give each one, or drop "
            "--moe-aux-loss-coeff and --moe-z-loss-coeff"
        )


def _check_recurrent(args: Namespace, pattern: str) -> None:
    """Layers of a hybrid model that scan the sequence: their heads are spread over its ranks."""
    degree, context = args.tsp_size, args.context_parallel_size
    ranks, sizes = degree * context, {}
    if "G" in pattern:
        for dest in ("linear_num_key_heads", "linear_num_value_heads"):
            sizes[f"--{dest.replace('_', '-')}"] = getattr(args, dest)
    if "M" in pattern:
        inner = 2 * (args.hidden_size or 0)
        sizes["--mamba-num-heads"] = args.mamba_num_heads or inner // args.mamba_head_dim
    for flag, size in sizes.items():
        if size % ranks:
            raise TSPError(
                f"{flag} {size} is not divisible by the {ranks} ranks of a sequence, --tsp-size "
                f"{degree} x --context-parallel-size {context}: the nearest are "
                f"{nearest(size, lambda n: n % ranks == 0)}"
            )
    if "M" in pattern and args.mamba_num_groups % degree:
        groups = args.mamba_num_groups
        raise TSPError(
            f"--mamba-num-groups {groups} is not divisible by --tsp-size {degree}: the nearest are "
            f"{nearest(groups, lambda n: n % degree == 0)}"
        )


def _check_kernels(pattern: str) -> None:
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common

    needs = {
        "G": ("flash-linear-attention", common.HAVE_FLA),
        "M": ("mamba-ssm", mamba_mixer.HAVE_MAMBA_SSM),
    }
    for symbol, (package, found) in needs.items():
        if symbol in pattern and not found:
            raise TSPError(
                f"--hybrid-layer-pattern {pattern}: the kernels of {symbol} are in {package}, "
                f"which is not installed: pip install {package}"
            )
