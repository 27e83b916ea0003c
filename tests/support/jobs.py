"""Whole jobs for tests: a tiny workload file, the command, and what is left when it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TINY = '''
import os, signal, sys, time
import torch
import paceline
from torch.nn import functional as F

SEEN = os.environ.get("TEST_SEEN")

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 37
    def __getitem__(self, index):
        noise = torch.randn(4, dtype=torch.float64) / 10  # an augmentation: of the seed and the position alone
        x = torch.arange(4, dtype=torch.float64) * (index % 5) / 10 + noise
        return x, torch.tensor(float(index % 7), dtype=torch.float64), index

def loss(model, batch):
    x, y, index = batch
    if SEEN and model.training:
        with open(SEEN, "a") as file:
            file.write("".join(f"{job.step_number + 1} {int(i)}\\n" for i in index))
    hook(job if "job" in globals() else None)
    return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)

def hook(job):
    """Faults go here."""

torch.manual_seed(0)
workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.Tanh(),
        torch.nn.Dropout(float(os.environ.get("TEST_DROPOUT", "0"))),
        torch.nn.Linear(8, 1),
    ),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    data=Numbers(),
    batch_size=8,
    epochs=4,
    precision="float64",
    clip_norm=1.0,
)
'''
LOOP = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        time.sleep(float(os.environ.get("TEST_PAUSE", "0")))
"""
STEPS = 20  # 4 epochs of 5 batches


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def write_workload(folder: Path, hook: str = "", loop: str = LOOP, name: str = "tiny.py") -> Path:
    """A workload file; `hook` is the body of what each forward pass does."""
    text = TINY.replace('    """Faults go here."""', f'    """Faults go here."""\n{hook}')
    path = folder / name
    path.write_text(text + loop)
    return path


def command(*words: str | Path) -> list[str]:
    """The command line of `paceline`."""
    return [sys.executable, "-m", "paceline.cli.main", *map(str, words)]


def paceline(folder: Path, *words: str | Path, timeout: float = 300, **environment: str) -> Ended:
    """Run `paceline` in `folder` to its end, and check that it left nothing behind."""
    began = time.monotonic()
    done = subprocess.run(
        command(*words),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=marked(folder, environment),
    )
    seconds = time.monotonic() - began
    assert wait_for(lambda: not leftovers(folder)), f"left behind: {leftovers(folder)}"
    return Ended(done.returncode, done.stdout, done.stderr, seconds)


def start(folder: Path, *words: str | Path, stderr=subprocess.PIPE, **environment: str) -> subprocess.Popen:
    """Start `paceline` in `folder`."""
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=marked(folder, environment),
    )


def start_ranks(folder: Path, file: Path, *words: str, ranks: int = 2, **environment: str) -> list[subprocess.Popen]:
    """Start the ranks of the job `a` as Open MPI's mpirun would, with nothing above them."""
    jobs = []
    for rank in range(ranks):
        own = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks}
        place = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
        variables = {"PMIX_NAMESPACE": f"test-{os.getpid()}", **place, **environment}
        jobs.append(start(folder, "run", "--job", "a", "--checkpoint-every", "0", *words, file, **variables))
    return jobs


def marked(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a job whose processes and temporary files can be told from others'."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(folder / "tmp"), "TEST_MARK": str(folder), **environment}


def leftovers(folder: Path) -> list[str]:
    """Processes, shared memory and temporary files of the jobs started in `folder`."""
    # torch's logs and the compiler's cache are torch's own; where ranks of other launchers met stays for a day.
    meeting = f"paceline-{os.getuid()}"
    names = [path for path in (folder / "tmp").iterdir() if path.name != meeting and not path.name.startswith("torch")]
    found = [str(path) for path in names]
    found += [str(path) for path in Path("/dev/shm").glob("*paceline*")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {process.cmdline()}")
        except psutil.Error:
            continue
    return found


def wait_for(true, seconds: float = 30) -> bool:
    """Wait until `true()` is; False if it does not become so, on however busy a machine."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def events(run_dir: Path, kind: str) -> list[dict]:
    """The events of one kind of a run."""
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of every step; of a step taken twice the later one."""
    return {event["step"]: event["loss"] for event in events(run_dir, "step")}


def rank_pids(process: subprocess.Popen) -> list[int]:
    """The ranks' processes of a running job, oldest first."""
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(child.pid for child in children if child.ppid() != process.pid)


def send(process: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to the supervisor alone, as a scheduler would."""
    os.kill(process.pid, number)
