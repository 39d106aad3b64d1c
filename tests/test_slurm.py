"""scripts/slurm on a real Slurm: two nodes on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_cluster import Cluster, missing
from training import TINY, losses, train

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "slurm"
PRETRAIN, AB = str(SCRIPTS / "pretrain_tsp.sbatch"), str(SCRIPTS / "ab.sbatch")


def skip(reason):
    """Skip, visibly; where TSP_REQUIRE_SLURM is set, as in CI, fail."""
    if os.environ.get("TSP_REQUIRE_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster():
    if reason := missing():
        skip(reason)
    with Cluster() as running:
        running.env |= {"TSP_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        yield running


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "a folder"
    path.mkdir()
    return path


def log(folder, job, name="tsp"):
    return (folder / f"{name}-{job}.log").read_text()


def rank_log(folder, job, rank):
    first, *rest = (folder / "logs" / f"tsp-{job}" / f"rank{rank}.log").read_text().splitlines()
    assert first == f"slurm: rank {rank} of 4 on tsp-node{1 + rank // 2}"
    return "\n".join(rest)


def test_shellcheck():
    if shutil.which("shellcheck") is None:
        skip("not installed: shellcheck")
    scripts = [*SCRIPTS.iterdir(), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    done = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------------------------------
# Ranks, without Megatron
# ---------------------------------------------------------------------------------------------

SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURMD_NODENAME",
         "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""

FAIL = """
import os, sys, time
if os.environ["RANK"] == "2":
    print("megatron-tsp: error: this shard is bent", file=sys.stderr, flush=True)
    time.sleep(600)  # on its way out
if os.environ["RANK"] == "1":
    time.sleep(1)
    print("RuntimeError: Connection closed by peer")
    sys.exit(1)
time.sleep(600)
"""

KILLED = """
import os, signal, time
if os.environ["RANK"] == "3":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""

WAIT = """
import pathlib, signal, sys, time
def stop(*_):
    for path in sys.argv[1:2]:
        pathlib.Path(path, "latest_checkpointed_iteration.txt").write_text("7")
    sys.exit()
time.sleep(1)  # a rank does not listen from its first moment
signal.signal(signal.SIGURG, stop)
pathlib.Path("waiting").touch()
time.sleep(600)
"""


def script(folder, text):
    path = folder / "a script.py"
    path.write_text(text)
    return str(path)


def test_ranks_get_their_places_and_their_words(cluster, folder):
    words = ["a b", "", 'c"d', "$HOME", "*", "--e=f g"]
    job = cluster.submit(folder, PRETRAIN, script(folder, SHOW), *words)
    assert cluster.finished(job, 60) == "COMPLETED", log(folder, job)
    shown = [json.loads(rank_log(folder, job, rank)) for rank in range(4)]
    for rank, seen in enumerate(shown):
        assert seen["argv"] == [*words, "--exit-signal-handler", "--exit-signal", "SIGURG"]
        assert (seen["RANK"], seen["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert seen["SLURMD_NODENAME"] == f"tsp-node{1 + rank // 2}"
        assert (seen["WORLD_SIZE"], seen["MASTER_ADDR"]) == ("4", "127.0.0.11")
        assert seen["MASTER_PORT"] == str(12000 + int(job))
        assert (seen["CUDA_DEVICE_MAX_CONNECTIONS"], seen["OMP_NUM_THREADS"]) == ("1", "1")


def test_the_first_of_many_nodes(cluster):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", '. "$0/common.sh"; rendezvous; echo "$MASTER_ADDR"',
         str(SCRIPTS)],
        env={**cluster.env, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "tsp-node[2,1],n[1-60000]"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "127.0.0.12\n"), done.stderr


def test_what_is_set_is_kept(cluster, folder):
    job = cluster.submit(
        folder, PRETRAIN, script(folder, SHOW), tasks=1,
        CUDA_DEVICE_MAX_CONNECTIONS="8", OMP_NUM_THREADS="3", TSP_PORT="23456", TSP_LOGS="my logs",
    )  # fmt: skip
    assert cluster.finished(job, 60) == "COMPLETED", log(folder, job)
    seen = json.loads((folder / "my logs" / "rank1.log").read_text().splitlines()[-1])
    assert (seen["CUDA_DEVICE_MAX_CONNECTIONS"], seen["OMP_NUM_THREADS"]) == ("8", "3")
    assert seen["MASTER_PORT"] == "23456"


def test_a_failing_rank_ends_the_job_and_is_named(cluster, folder):
    job = cluster.submit(folder, PRETRAIN, script(folder, FAIL))
    assert cluster.finished(job, 60) == "FAILED"
    said = log(folder, job)
    # Slurm saw rank 1 end, but that had lost its connection.
    assert "task 1: Exited with exit code 1" in said
    assert "slurm: failed: rank 2 of 4 on tsp-node2. The end of its log" in said, said
    assert "megatron-tsp: error: this shard is bent" in said


def test_a_killed_rank_ends_the_job_and_is_named(cluster, folder):
    job = cluster.submit(folder, PRETRAIN, script(folder, KILLED))
    assert cluster.finished(job, 60) == "FAILED"
    said = log(folder, job)
    assert "tsp-node2: task 3: Killed" in said
    assert "slurm: failed: rank 3 of 4 on tsp-node2." in said, said


def test_a_cancelled_job_is_not_requeued(cluster, folder):
    job = cluster.submit(folder, PRETRAIN, script(folder, WAIT))
    cluster.until((folder / "waiting").exists, 60)
    cluster.command("scancel", job)
    assert cluster.finished(job, 60) == "CANCELLED"


def test_a_stop_without_a_checkpoint_is_not_requeued(cluster, folder):
    job = cluster.submit(folder, PRETRAIN, script(folder, WAIT))
    cluster.until((folder / "waiting").exists, 60)
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    assert cluster.finished(job, 60) == "FAILED"
    assert "no checkpoint since this start" in log(folder, job)


def test_a_preempted_job_is_requeued(cluster, folder):
    saved = folder / "saved"
    saved.mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("5")
    (folder / "urgent.py").write_text(SHOW)

    def preempted():
        (folder / "waiting").unlink(missing_ok=True)
        job = cluster.submit(folder, PRETRAIN, script(folder, WAIT), "saved", "--save=saved")
        cluster.until((folder / "waiting").exists, 60)
        urgent = cluster.submit(folder, PRETRAIN, "urgent.py", SBATCH_PARTITION="urgent")
        assert cluster.finished(urgent, 60) == "COMPLETED"
        assert cluster.job(job)["Restarts"] == "1"
        return job

    # By default Slurm ends the ranks with SIGTERM.
    job = preempted()
    cluster.command("scancel", job)
    assert "slurm: preempted, requeued from iteration 5" in log(folder, job)
    # Where it sends the job's own signal, they save.
    cluster.configure("SlurmctldParameters=preempt_send_user_signal")
    job = preempted()
    cluster.command("scancel", job)
    assert "slurm: saved at iteration 7, requeued" in log(folder, job)


def test_weights_from_elsewhere_at_every_restart_are_refused(cluster, folder):
    job = cluster.submit(folder, PRETRAIN, "--save", "x", "--finetune", "--load", "y")
    assert cluster.finished(job, 60) == "FAILED"
    assert "slurm: error: --finetune would hold for every restart" in log(folder, job)


def test_containers(folder):
    """The command lines only: neither pyxis nor Apptainer is here."""

    def words(**env):
        done = subprocess.run(
            ["bash", "-c", '. "$0/common.sh"; launcher "/l o"; printf "%s\\n" "${launch[@]}" '
             '"${inside[@]}"', str(SCRIPTS)],
            env={"PATH": os.environ["PATH"], **env}, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout.splitlines(), done.stderr

    mounts = f"{folder}:{folder},/l o:/l o"
    code, pyxis, _ = words(TSP_CONTAINER="my image.sqsh", TSP_CONTAINER_MOUNTS="/d a:/d a")
    assert code == 0 and pyxis[0] == "srun"
    assert "--container-image=my image.sqsh" in pyxis
    assert f"--container-mounts={mounts},/d a:/d a" in pyxis
    _, apptainer, _ = words(TSP_CONTAINER="my image.sif", TSP_CONTAINER_RUNTIME="apptainer")
    start = apptainer.index("apptainer")
    gpu = "--rocm" if Path("/dev/kfd").exists() else "--nv"
    inside = ["exec", "--bind", mounts, "--pwd", str(folder), gpu, "my image.sif"]
    assert apptainer[start + 1 :] == inside
    code, _, error = words(TSP_CONTAINER="x", TSP_CONTAINER_RUNTIME="docker")
    assert code == 2 and "TSP_CONTAINER_RUNTIME=docker: it is pyxis or apptainer" in error


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


def test_ab(cluster, folder):
    """The tiny configuration, smaller, as TP+SP and as TSP on two nodes with two ranks each."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    top = yaml.safe_load((ROOT / "configs/tiny_cpu/ab.yaml").read_text())
    top["DATA"] = {"OUT": "the data", "INPUT": "text.txt"}
    top["MODEL_ARGS"] |= {
        "--num-layers": 1, "--hidden-size": 32, "--ffn-hidden-size": 64, "--train-iters": 5,
        "--seq-length": 64, "--max-position-embeddings": 64, "--lr-warmup-iters": 1,
    }  # fmt: skip
    (folder / "my ab.yaml").write_text(yaml.safe_dump(top))
    job = cluster.submit(folder, AB, "my ab.yaml", "--out", "the report")
    assert cluster.finished(job) == "COMPLETED", log(folder, job, "tsp-ab")
    assert "| tsp / tp_sp |" in log(folder, job, "tsp-ab")
    report = json.loads((folder / "the report" / "report.json").read_text())
    assert report["initial_weights"].startswith("every arm draws them")
    assert report["parity"]["steps"] == 5 and report["parity"]["max_abs_loss_diff"] <= 2e-6
    for name, flag in (("tp_sp", "--sequence-parallel"), ("tsp", "--tsp-size 4")):
        arm = report["arms"][name]
        assert arm["ranks"] == 4 and len(arm["loss"]) == 5 and arm["loss"][-1] < arm["loss"][0]
        assert arm["command"].startswith("OMP_NUM_THREADS=1 srun --ntasks 4 python -m megatron_tsp")
        assert flag in arm["command"]


def test_a_killed_job_goes_on(cluster, folder):
    """Killed without warning, then asked to stop; the losses are the uninterrupted run's."""
    flags = "--tsp-size 2 --train-iters 60 --save-interval 5"
    job = cluster.submit(
        folder, PRETRAIN, *TINY, *flags.split(), "--save", "the checkpoint", "--tsp-record", "rec",
        tasks=1,
    )  # fmt: skip
    record, saved = folder / "rec" / "rank0.jsonl", folder / "the checkpoint"
    latest = saved / "latest_checkpointed_iteration.txt"

    def steps():
        return [json.loads(line) for line in record.read_text().splitlines(keepends=True)[:-1]]

    def interrupted(start, *command):
        """Interrupt this start; (iteration it begins with, loss) of each step that it took."""
        cluster.command(*command, job)
        cluster.until(lambda: cluster.job(job)["Restarts"] == str(start + 1), 120)
        cluster.until(lambda: cluster.job(job)["JobState"] == "PENDING", 120)
        taken = [json.loads(line) for line in record.read_text().splitlines()]
        record.unlink()
        return {step["iteration"]: step["loss"] for step in taken}

    cluster.until(lambda: latest.exists() and latest.read_text() == "5", 300)
    parts = [interrupted(0, "scontrol", "requeue")]
    cluster.until(lambda: record.exists() and len(steps()) > 2, 300)
    parts.append(interrupted(1, "scancel", "--batch", "--signal=USR1"))
    stopped_at = int(latest.read_text())
    assert cluster.finished(job) == "COMPLETED", log(folder, job)
    parts.append({step["iteration"]: step["loss"] for step in map(json.loads, open(record))})

    begun = [min(part) for part in parts]
    assert begun[0] == 1 and begun[1] in (6, 11) and begun[2] == stopped_at + 1
    assert f"slurm: saved at iteration {stopped_at}, requeued" in log(folder, job)
    reference = losses(train(folder / "reference", 2, flags))
    assert len(reference) == 60 and reference[5] != reference[0]
    for part in parts:
        assert part == {i: reference[i - 1] for i in part}
    assert set().union(*parts) == set(range(1, 61))
