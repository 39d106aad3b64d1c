"""From a configuration and the name of an arm to the trace of one of its ranks."""

import math
import os
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace

from megatron_tsp.ab import arms as ab_arms
from megatron_tsp.ab import config as ab_config
from megatron_tsp.ab.arms import Arm
from megatron_tsp.ab.config import Config, Flags
from megatron_tsp.errors import TSPError
from megatron_tsp.trace.pool import Pool
from megatron_tsp.trace.result import Trace

# Flags that a trace leaves out: there is nothing to load, and nobody to write for.
_DROPPED = (
    "--load", "--pretrained-checkpoint", "--load-main-params-from-ckpt", "--save",
    "--save-interval", "--save-retain-interval", "--tsp-record", "--tsp-log-traffic",
    "--tensorboard-dir", "--tensorboard-queue-size", "--wandb-project", "--wandb-exp-name",
    "--wandb-entity", "--wandb-save-dir", "--data-path", "--data-cache-path",
    "--data-args-path", "--per-split-data-args-path", "--train-data-path", "--valid-data-path",
    "--test-data-path", "--profile", "--num-workers", "--log-throughput", "--log-progress",
)  # fmt: skip
# The trace runs on the CPU's modules. A value given for these is set aside, and said so.
_FOR_A_GPU = (
    "--transformer-impl", "--distributed-backend", "--use-cpu-initialization", "--no-rope-fusion",
    "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm",
)  # fmt: skip

_pool: Pool | None = None


def settings(words: Iterable[str]) -> Flags:
    """``--set`` words, ``seq-length=131072``, as flags. true and false switch.

    Raises:
        TSPError: a word without a ``=``.
    """
    flags: Flags = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise TSPError(f"--set {word}: expected name=value, such as seq-length=131072")
        flag = "--" + name.lstrip("-").replace("_", "-")
        parts: bool | str | list[str] = value.split()
        if len(parts) == 1:
            parts = {"true": True, "false": False}.get(value.lower(), value)
        flags[flag] = parts
    return flags


def trace(
    config: Config | str | os.PathLike,
    arm: str,
    rank: int = 0,
    world: int | None = None,
    settings: Flags | None = None,
    pool: Pool | None = None,
) -> Trace:
    """What rank `rank` of `world` needs in a training step of an arm.

    Args:
        config: of an A/B run, or its path.
        arm: a name as in `ab`, built in or of the config.
        rank: from 0. Of pipeline stages the ranks of the first come first.
        world: ranks of the job; by default the arm's. More are data-parallel.
        settings: flags over those of the config, for every arm.
        pool: processes to use; by default one that all calls share.

    Raises:
        TSPError: the configuration is wrong or cannot run.
        TraceFailed: the trace itself failed.
    """
    global _pool
    if pool is None:
        pool = _pool = _pool or Pool()
    return start(config, arm, rank, world, settings, pool).result()


def start(
    config: Config | str | os.PathLike,
    arm: str,
    rank: int,
    world: int | None,
    settings: Flags | None,
    pool: Pool,
) -> Future:
    """As `trace`; a future of the result. What is wrong with the flags is raised at once."""
    if not isinstance(config, Config):
        config = ab_config.read(config)
    made, notes = prepare(config, arm, settings or {})
    world = made.ranks if world is None else world
    if world < 1:
        raise TSPError(f"--world-size {world}: a job has at least 1 rank")
    if not 0 <= rank < world:
        raise TSPError(f"{arm}: --rank {rank}: the job has ranks 0 to {world - 1}")
    ab_arms.check_flags(made)
    request = {"argv": made.words(), "rank": rank, "world": world, "environment": made.env}
    answer = pool.submit(arm, request)
    whole: Future = Future()

    def finish(answer: Future) -> None:
        if answer.cancelled():
            whole.cancel()
        elif answer.exception() is not None:
            whole.set_exception(answer.exception())
        else:
            whole.set_result(
                Trace(arm, rank, world, made.flags, notes=notes, **answer.result())
            )

    answer.add_done_callback(finish)
    return whole


def prepare(config: Config, name: str, settings: Flags) -> tuple[Arm, list[str]]:
    """The arm as it is traced, and what may differ from the arm as it is trained."""
    if config.data:
        from megatron_tsp import data

        made_of = data.flags(f"{config.data['OUT']}/{data.NAME}")
        settings = {flag: str(value) for flag, value in made_of.items()} | settings
    config = replace(config, model_args=config.model_args | settings)
    arm = ab_arms.make(name, config)
    notes = []
    for flag in (*_DROPPED, *_FOR_A_GPU):
        value = arm.flags.pop(flag, None)
        if flag in _FOR_A_GPU and value not in (None, False, True, "local", "gloo"):
            notes.append(f"{flag} {value} is set aside: the trace runs on local modules")
    if "--num-experts" in arm.flags:
        notes.append("the router is taken to be balanced: popular experts need more")
    length, known = arm.flags.get("--seq-length"), arm.flags.get("--max-position-embeddings")
    if isinstance(length, str) and isinstance(known, str) and length.isdigit() and known.isdigit():
        arm.flags["--max-position-embeddings"] = str(max(int(length), int(known)))
    return arm, notes


def unit_of(arm: Arm) -> int:
    """A number of tokens whose multiples every rank of the arm can share: 1024 where it can be."""
    sizes = ("--tsp-size", "--tensor-model-parallel-size", "--context-parallel-size")
    ranks = math.prod(int(arm.flags.get(flag, 1)) for flag in sizes)
    return math.lcm(1024, 2 * ranks)
