"""The same A/B in separate steps, where something else than torchrun starts the ranks: Slurm.

    prepare      check everything, make the data set, write ``jobs``: a line `RANKS NAME` for each
                 job to run, in order. The job ``initial``, where there is one, saves the start
    rank JOB     become one rank of JOB, as torch.distributed's RANK, WORLD_SIZE and so on say; to
                 be started on as many ranks as the job's line has
    report       the report of the arms that ran

All steps take the same CONFIG, --arms and --out; they may run on machines that share files.
"""

import os
import shutil
import sys
from pathlib import Path

from megatron_tsp.ab import initial
from megatron_tsp.ab.arms import Arm
from megatron_tsp.ab.config import Config, nearest
from megatron_tsp.errors import TSPError

JOBS = "jobs"
LAUNCHER = "srun --ntasks {ranks} python"


def prepare(config: Config, arms: list[Arm], folder: Path) -> None:
    """Check everything and write the list of jobs; what an earlier run recorded is removed.

    Raises:
        TSPError: as the whole A/B before its first arm.
    """
    from megatron_tsp.ab import check

    check(config, arms)
    how, _ = initial.choose(config, arms)
    jobs = [(arm.ranks, arm.name) for arm in arms]
    if how == "checkpoint":
        initial.remove(folder / initial.FOLDER / initial.CHECKPOINT)
        jobs.insert(0, (arms[0].ranks, initial.FOLDER))
    for _, name in jobs:
        shutil.rmtree(folder / name / "record", ignore_errors=True)
    lines = "".join(f"{ranks} {name}\n" for ranks, name in jobs)
    (folder / JOBS).write_text(lines, encoding="utf-8")


def become_rank(name: str, config: Config, arms: list[Arm], folder: Path) -> None:
    """Replace this process by one rank of the job `name`. Does not return.

    Raises:
        TSPError: no such job; not started as a rank, or not on as many ranks as the job has.
    """
    checkpoint = folder / initial.FOLDER / initial.CHECKPOINT
    how, _ = initial.choose(config, arms)
    jobs = {}
    if how == "checkpoint":
        jobs[initial.FOLDER] = initial.saving(arms[0], checkpoint)
        for arm in arms:
            initial.load(arm, checkpoint)
    jobs |= {arm.name: arm for arm in arms}
    if name not in jobs:
        raise TSPError(f"--rank-of: no job {name!r}{nearest(name, jobs)}")
    job, world = jobs[name], os.environ.get("WORLD_SIZE")
    if world != str(job.ranks):
        raise TSPError(
            f"--rank-of {name}: WORLD_SIZE is {world or 'not set'}, and this job has {job.ranks} "
            "ranks (NPROC_PER_NODE): start as many, with torch.distributed's variables set"
        )
    record = (folder / name / "record").resolve()
    words = ["-m", "megatron_tsp.pretrain_gpt", *job.words(), "--tsp-record", str(record)]
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, **job.env})


def results(config: Config, arms: list[Arm], folder: Path) -> tuple[dict[str, dict], str]:
    """(each arm's entry of the report, how the arms came to the same weights) of recorded jobs.

    Raises:
        ArmFailed: an arm has no whole record.
    """
    from megatron_tsp.ab import report

    how, words = initial.choose(config, arms)
    if how == "checkpoint":
        for arm in arms:
            initial.load(arm, folder / initial.FOLDER / initial.CHECKPOINT)
    entries = {
        arm.name: {
            **report.read_arm(folder / arm.name / "record", arm.ranks),
            "command": arm.shown(LAUNCHER),
        }
        for arm in arms
    }
    return entries, words
