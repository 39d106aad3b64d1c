"""How the arms of an A/B run come to start from the same weights."""

import shutil
from pathlib import Path

from megatron_tsp.ab import runner
from megatron_tsp.ab.arms import Arm
from megatron_tsp.ab.config import Config, count
from megatron_tsp.errors import TSPError

# The learning rate and all that shapes it, at nothing: one step leaves the weights as they were.
_STANDING_STILL = {
    "--lr": "0",
    "--min-lr": "0",
    "--weight-decay": "0",
    "--lr-decay-style": "constant",
    "--train-iters": "1",
    "--eval-iters": "0",
}

#: The folders, below the report's, of the job that saves the common start and of what it saves.
FOLDER, CHECKPOINT = "initial", "checkpoint"

#: Flags that name weights to start from.
_SOURCES = ("--load", "--pretrained-checkpoint")
#: What spreads the layers over the pipeline, besides the number of stages.
_SPLIT = (
    "--pipeline-model-parallel-layout",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def choose(config: Config, arms: list[Arm]) -> tuple[str, str]:
    """(how, in words): "loaded", "seed" or "checkpoint".

    What the configuration says; else the seed, where that is enough (`_why_not_seed`).

    Raises:
        TSPError: the seed was asked for, and the arms would not draw the same weights from it; or
            some arms load weights, and others do not.
    """
    asked, why_not = config.initial_weights, _why_not_seed(arms)
    if asked == "seed" and why_not:
        raise TSPError(f"INITIAL_WEIGHTS: seed does not give every arm the same weights: {why_not}")
    sources = {arm.name: _source(arm) for arm in arms}
    if all(sources.values()):
        if len(set(sources.values())) == 1:
            return "loaded", f"every arm loads {sources[arms[0].name]}"
        return "loaded", f"the arms load different checkpoints: {_listed(sources)}"
    if any(sources.values()):
        raise TSPError(
            f"some arms load weights and others do not ({_listed(sources)}): give --load to every "
            "arm, in MODEL_ARGS, or to none"
        )
    if asked != "checkpoint" and not why_not:
        return "seed", "every arm draws them on the CPU from the same seed"
    return (
        "checkpoint",
        f"the initial weights of {arms[0].name} were saved, and every arm loaded them",
    )


def _why_not_seed(arms: list[Arm]) -> str | None:
    """Why the seed is not enough for the same weights, and what to do; None where it is.

    With CPU initialization every rank draws the whole weight and keeps its shard, whatever the
    tensor parallel size. The pipeline stage enters the seed, an expert parallel rank draws its own
    experts only, and the padded vocabulary is the first that is drawn: all later weights depend on
    its size.
    """
    for arm in arms:
        if _source(arm):
            return f"{arm.name} loads {_source(arm)}. Drop INITIAL_WEIGHTS, or load nothing"
    without = [arm.name for arm in arms if not arm.flags.get("--use-cpu-initialization")]
    if without:
        return (
            f"without --use-cpu-initialization (arms: {', '.join(without)}) each rank draws its "
            "own shards. Add it to MODEL_ARGS, or use INITIAL_WEIGHTS: checkpoint"
        )
    for what, value_of in (
        ("--seed", lambda arm: _word(arm, "--seed", "1234")),
        ("pipeline stages, which enter the seed", _pipeline),
        (
            "--expert-model-parallel-size",
            lambda arm: _word(arm, "--expert-model-parallel-size", "1"),
        ),
        (
            "what the vocabulary is padded to (--make-vocab-size-divisible-by times the tensor "
            "parallel size)",
            _padding,
        ),
    ):
        values = {arm.name: value_of(arm) for arm in arms}
        if len(set(values.values())) > 1:
            return (
                f"the arms differ in {what}: {_listed(values)}. Make them alike, or use "
                "INITIAL_WEIGHTS: checkpoint"
            )
    return None


def _word(arm: Arm, flag: str, default: str | None = None) -> str | None:
    value = arm.flags.get(flag, False)
    return default if value is False else str(value)


def _source(arm: Arm) -> str | None:
    return next((word for flag in _SOURCES if (word := _word(arm, flag))), None)


def _pipeline(arm: Arm) -> str:
    stages = _word(arm, "--pipeline-model-parallel-size", "1")
    if stages == "1":
        return stages
    given = ((flag, _word(arm, flag)) for flag in _SPLIT)
    return " ".join([stages, *(f"{flag} {word}" for flag, word in given if word)])


def _padding(arm: Arm) -> str:
    if size := _word(arm, "--padded-vocab-size"):
        return f"--padded-vocab-size {size}"
    if _word(arm, "--no-pad-vocab-size") or _word(arm, "--disable-pad-vocab-size"):
        return "nothing"
    degree = _word(arm, "--tsp-size") or _word(arm, "--tensor-model-parallel-size", "1")
    unit = _word(arm, "--make-vocab-size-divisible-by", "128")
    where = f"{arm.name}: --make-vocab-size-divisible-by"
    return f"multiples of {count(unit, where) * count(degree, f'{arm.name}: tensor parallel size')}"


def _listed(values: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {value or 'nothing'}" for name, value in values.items())


def save(arm: Arm, folder: Path) -> Path:
    """Save the weights that `arm` starts from, as a torch_dist checkpoint; return its folder.

    Megatron saves no checkpoint before the first step, so a job takes one step with a learning
    rate of zero. A checkpoint that an earlier run left there is removed first.

    Raises:
        TSPError: the older checkpoint cannot be removed.
        ArmFailed: as `runner.run`.
    """
    target = folder / CHECKPOINT
    remove(target)
    runner.run(saving(arm, target), folder, 1)
    return target


def remove(target: Path) -> None:
    """Remove a checkpoint that an earlier run left; TSPError where that fails."""
    try:
        shutil.rmtree(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise TSPError(f"cannot remove the older {target}: {error.strerror or error}") from error


def saving(arm: Arm, target: Path) -> Arm:
    """The job that saves to `target` the weights that `arm` starts from."""
    flags = {flag: value for flag, value in arm.flags.items() if not flag.startswith("--lr-")}
    flags |= _STANDING_STILL
    flags |= {
        "--save": str(target.resolve()),
        "--save-interval": "1",
        "--ckpt-format": "torch_dist",
        "--no-save-optim": True,
        "--no-save-rng": True,
    }
    return Arm("initial weights", arm.ranks, flags, arm.env)


def load(arm: Arm, checkpoint: Path) -> None:
    """Make `arm` start from the weights of `checkpoint`, at iteration 0, with a new optimizer."""
    arm.flags |= {
        "--load": str(checkpoint.resolve()),
        "--ckpt-format": "torch_dist",
        "--finetune": True,
        "--no-load-optim": True,
        "--no-load-rng": True,
    }
