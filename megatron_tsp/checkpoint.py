"""Whether a run can go on from a checkpoint: its optimizer state, in the layout that TSP reads."""

from argparse import Namespace
from pathlib import Path

from megatron_tsp.errors import TSPError


def check_checkpoint(args: Namespace) -> None:
    """Refuse optimizer state that only the kind of run that saved it can read."""
    skips = getattr(args, "no_load_optim", False) or getattr(args, "finetune", False)
    if not getattr(args, "load", None) or skips:
        return
    tracker = Path(args.load, "latest_checkpointed_iteration.txt")
    if not tracker.is_file() or not (iteration := tracker.read_text().strip()).isdigit():
        return
    from megatron.core.dist_checkpointing import load_common_state_dict

    folder = Path(args.load, f"iter_{int(getattr(args, 'ckpt_step', None) or iteration):07d}")
    common = load_common_state_dict(str(folder))
    metadata = common.get("content_metadata")  # None of an older Megatron
    layout = (metadata or {}).get("distrib_optim_sharding_type", "")
    if metadata is not None and bool(layout) != args.use_distributed_optimizer:
        raise TSPError(
            f"--load {args.load}: its optimizer state is saved {'with' if layout else 'without'} "
            "--use-distributed-optimizer, and Megatron does not convert it. Go on as it was saved, "
            "or pass --no-load-optim"
        )
    if layout and not layout.startswith("fully"):
        raise TSPError(
            f"--load {args.load}: its optimizer state is saved as {layout}, which TSP cannot read. "
            "Save it once with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"
        )
    saved = common.get("args")
    if saved is not None and _experts_apart(saved) != _experts_apart(args):
        raise TSPError(
            f"--load {args.load}: only one of the checkpoint and this run has an optimizer of its "
            "own for the experts, and Megatron does not convert between the two. Pass "
            "--no-load-optim, or save with --expert-model-parallel-size above 1, or with "
            "--expert-tensor-parallel-size other than --tensor-model-parallel-size"
        )


def _experts_apart(args: Namespace) -> bool:
    """Whether Megatron reduces and updates expert weights apart from the others."""
    if not args.num_experts:
        return False
    apart = args.expert_tensor_parallel_size != args.tensor_model_parallel_size
    return args.expert_model_parallel_size > 1 or apart
