"""A Slurm of two nodes on this machine, on loopback: munged, slurmctld, one slurmd a node."""

import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("tsp-node1", "tsp-node2")
#: A cluster ends after this, whatever becomes of the tests.
LIFETIME_S = 1800
#: Slurm does not start a requeued job before credentials of its former start have expired.
CREDENTIALS_S = 10

os.environ["PATH"] += ":/usr/sbin"  # the daemons' place, not in every PATH


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    absent = [name for name in DAEMONS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """Use as a context manager: on leaving, every process of it is gone. So it is when this process
    dies: another one (`_reap`) waits for that."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
        self.env = {key: v for key, v in os.environ.items() if not key.startswith("SLURM")}
        self.env |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}
        self.daemons = []

    def __enter__(self):
        self.reaper = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.reaper.stdin.close()
        self.reaper.wait(60)
        for daemon in self.daemons:
            daemon.wait(30)

    def _start(self):
        here = self.folder
        key = here / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (here / "slurm.conf").write_text(self._conf())
        (here / "cgroup.conf").write_text(f"CgroupPlugin={self._cgroups()}\n")
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={here}/munge", f"--pid-file={here}/munged.pid"),
            *(f"--log-file={here}/munged.log", f"--seed-file={here}/munge.seed"),
        )
        self.until((here / "munge").exists, 20)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            (here / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self._states() == ["idle"] * len(NODES), 60)

    def _states(self):
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            env=self.env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout.split()

    def _daemon(self, *command):
        log = open(self.folder / f"{command[0]}{len(self.daemons)}.out", "wb")
        self.daemons.append(
            subprocess.Popen(command, env=self.env, cwd=self.folder, stdout=log, stderr=log)
        )
        log.close()

    def _cgroups(self):
        """No cgroups: older versions cannot say so, and do nothing with those of version 1."""
        version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True)
        return "disabled" if int(re.search(r"(\d+)\.", version.stdout)[1]) >= 23 else "cgroup/v1"

    def _conf(self):
        host, here = socket.gethostname().partition(".")[0], self.folder
        # Ranks meet at a port that follows from the job's id: another cluster, in another worker
        # of pytest, has other ids.
        first_job = 1 + 30 * (os.getpid() % 600)
        control, *ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.{i} Port={port} CPUs=2"
            for i, (node, port) in enumerate(zip(NODES, ports, strict=True), 11)
        ]
        return "\n".join([
            "ClusterName=tsp", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={control}",
            "SlurmUser=root", "SlurmdUser=root", "AuthType=auth/munge", "CredType=cred/munge",
            f"AuthInfo=socket={here}/munge,cred_expire={CREDENTIALS_S}",
            f"StateSaveLocation={here}/state", f"SlurmdSpoolDir={here}/spool-%n",
            f"SlurmctldPidFile={here}/slurmctld.pid", f"SlurmdPidFile={here}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none", "MpiDefault=none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",  # whatever CPUs there are
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2",
            f"FirstJobId={first_job}", "ReturnToService=2", "KillWait=5", *nodes,
            # A job in `urgent` takes the nodes from one in `main`, which gets SIGTERM 60 s before.
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES PriorityTier=1 GraceTime=60",
            f"PartitionName=urgent Nodes={','.join(NODES)} PriorityTier=2",
        ]) + "\n"  # fmt: skip

    # -----------------------------------------------------------------------------------------

    def until(self, condition, seconds):
        """Wait until `condition()` is true; its value. AssertionError after so many seconds."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.1)
        return value

    def _logs(self):
        logs = sorted(self.folder.glob("*.out"))
        return "\n".join(f"{p.name}:\n{p.read_text(errors='replace')[-2000:]}" for p in logs)

    def command(self, *words, **env) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            words, env={**self.env, **env}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def configure(self, line):
        """Add a line to the running cluster's configuration."""
        with open(self.env["SLURM_CONF"], "a") as conf:
            conf.write(line + "\n")
        self.command("scontrol", "reconfigure")

    def submit(self, folder, script, *words, nodes=2, tasks=2, **env) -> str:
        """Submit a job from `folder`; its id."""
        done = subprocess.run(
            ["sbatch", "--parsable", f"--nodes={nodes}", f"--ntasks-per-node={tasks}",
             "--time=20", script, *words],
            env={**self.env, **env}, cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ..."""
        text = self.command("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def finished(self, number, seconds=600) -> str:
        """Wait for the end of a job; its state."""

        def ended():
            state = self.job(number)["JobState"]
            return state if state not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED") else None

        return self.until(ended, seconds)


def _free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _reap(folder):
    """Wait for the end of standard input, then kill the daemons and all that runs in their jobs."""
    select.select([sys.stdin], [], [], LIFETIME_S)
    for process in psutil.process_iter():
        try:
            helper = process.cwd() == folder  # some hide their environment
            if helper or process.environ().get("SLURM_CONF") == f"{folder}/slurm.conf":
                process.kill()
        except psutil.Error:
            pass
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _reap(sys.argv[1])
