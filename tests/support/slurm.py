"""A Slurm of one node for tests: slurmctld, slurmd and munge, on loopback, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
WHY_NOT = "needs root, slurmctld, slurmd and munged"


def can_start() -> bool:
    """Whether this machine has what it takes."""
    return os.geteuid() == 0 and all(
        shutil.which(name, path=_PATH) for name in ("slurmctld", "slurmd", "munged", "srun")
    )


@dataclass
class Slurm:
    """The running one."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For its commands."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{_PATH}"}

    def call(self, *words: str) -> str:
        """One of its commands; what it printed."""
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **self.environment})
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def state(self, job: str) -> str:
        """Of a job, such as RUNNING; "" once it is forgotten."""
        try:
            told = self.call("scontrol", "show", "job", job)
        except RuntimeError:
            return ""
        return next(word.partition("=")[2] for word in told.split() if word.startswith("JobState="))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm for the time of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen] = []
    try:
        _write(folder)
        started.append(_start_munge(folder))
        made = Slurm(folder)
        for program in (("slurmctld", "-D"), ("slurmd", "-D")):
            environment = {**os.environ, **made.environment}
            path = shutil.which(program[0], path=_PATH)
            with (folder / f"{program[0]}.out").open("w") as log:
                started.append(subprocess.Popen([str(path), *program[1:]], env=environment, stdout=log, stderr=log))
        _wait(made, folder)
        yield made
    finally:
        for process in reversed(started):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _write(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir(exist_ok=True)
    host, ports = socket.gethostname().split(".")[0], _free_ports(2)
    cores = os.cpu_count() or 1
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "CredType": "cred/munge",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "SchedulerType": "sched/backfill",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "JobRequeue": 1,
        "ReturnToService": 2,
        "KillWait": 30,
        "MinJobAge": 300,
        "MpiDefault": "none",
        "SlurmdParameters": "config_overrides",  # the number of CPUs is the one given below
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    # Eight CPUs, whatever the machine has: two jobs of four tasks run there at once.
    lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs={max(8, cores)} State=UNKNOWN")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _start_munge(folder: Path) -> subprocess.Popen:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munged = str(shutil.which("munged", path=_PATH))
    names = ("pid-file", "log-file", "seed-file")
    words = [f"--{name}={folder}/munge.{name}" for name in names]
    line = [munged, "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *words]
    with (folder / "munge.out").open("w") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)
    deadline = time.monotonic() + 10
    while not (folder / "munge.socket").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "munge.out").read_text())
        time.sleep(0.05)
    return process


def _wait(made: Slurm, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(RuntimeError):
            if made.call("sinfo", "-h", "-o", "%t").strip() == "idle":
                return
        if time.monotonic() > deadline:
            raise RuntimeError("".join(path.read_text()[-2000:] for path in folder.glob("*.out")))
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
