"""How the arms of an A/B run come to start from the same weights."""

from pathlib import Path

from megatron_tsp.ab import runner
from megatron_tsp.ab.arms import Arm
from megatron_tsp.ab.config import Config

# The learning rate and all that shapes it, at nothing: one step leaves the weights as they were.
_STANDING_STILL = {
    "--lr": "0",
    "--min-lr": "0",
    "--weight-decay": "0",
    "--lr-decay-style": "constant",
    "--train-iters": "1",
    "--eval-iters": "0",
}


def choose(config: Config, arms: list[Arm]) -> tuple[str, str]:
    """(how, in words): "loaded", "seed" or "checkpoint".

    What the configuration says; else the seed, where that is enough: with CPU initialization
    every rank draws the whole weight and keeps its shard, whatever the tensor parallel size. The
    seed depends on the pipeline stage, so the arms must agree in that.
    """
    if "--load" in config.model_args:
        return "loaded", f"every arm loads {config.model_args['--load']}"
    stages = {str(arm.flags.get("--pipeline-model-parallel-size", "1")) for arm in arms}
    by_seed = config.model_args.get("--use-cpu-initialization") is True and len(stages) == 1
    how = config.initial_weights or ("seed" if by_seed else "checkpoint")
    if how == "seed":
        return how, "every arm draws them on the CPU from the same seed"
    return how, f"the initial weights of {arms[0].name} were saved, and every arm loaded them"


def save(arm: Arm, folder: Path) -> Path:
    """Save the weights that `arm` starts from, as a torch_dist checkpoint; return its folder.

    Megatron saves no checkpoint before the first step, so a job takes one step with a learning
    rate of zero.
    """
    target = folder / "checkpoint"
    flags = {flag: value for flag, value in arm.flags.items() if not flag.startswith("--lr-")}
    flags |= _STANDING_STILL
    flags |= {
        "--save": str(target.resolve()),
        "--save-interval": "1",
        "--ckpt-format": "torch_dist",
        "--no-save-optim": True,
        "--no-save-rng": True,
    }
    runner.run(Arm("initial weights", arm.ranks, flags, arm.env), folder, 1)
    return target


def load(arm: Arm, checkpoint: Path) -> None:
    """Make `arm` start from the weights of `checkpoint`, at iteration 0, with a new optimizer."""
    arm.flags |= {
        "--load": str(checkpoint.resolve()),
        "--ckpt-format": "torch_dist",
        "--finetune": True,
        "--no-load-optim": True,
        "--no-load-rng": True,
    }
