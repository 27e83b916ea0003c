"""Send random signals to random processes of a job at random moments, then resume it to its end.

    python benchmarks/trials/random_signals.py --count 60 --seed 0 --json signals.json

Each trial starts a job of two ranks with data loaders, sends one signal (TERM, INT, KILL, STOP and later CONT, HUP,
QUIT, USR1, USR2) to the supervisor, the fork server, a rank or a data loader's process, waits for the job's end, and
resumes it until it is done. What must hold:

- the last checkpoint is, bit for bit, that of a run that nobody disturbed;
- the output has no Python traceback;
- what is said is true: result.json has the exit code and a status that goes with it, checkpoints that are named exist,
  and a process that is named as the cause is the one that got the signal;
- no process, socket, shared memory or temporary file is left.

The exit code is 1 where anything of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.nouns.table import aligned

SIGNALS = ("TERM", "INT", "KILL", "STOP", "HUP", "QUIT", "USR1", "USR2")
KINDS = ("supervisor", "fork server", "rank", "data loader")
STEPS, EVERY = 24, 3
MARK = "PACELINE_TRIAL"
END_S = 240.0  # for a job to end after its signal; under load the slowest took 20
CLEAR_S = 15.0  # for what is left to go
RESUMES = 4
TRACES = ("Traceback (most recent call last)", "Exception ignored", "Exception in thread", "Fatal Python error")

WORKLOAD = f"""
import os, time
import torch
import paceline
from torch.nn import functional as F


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.arange(4, dtype=torch.float64) * (index % 5) / 10 + torch.randn(4, dtype=torch.float64) / 10
        return x, torch.tensor(float(index % 7), dtype=torch.float64)


def loss(model, batch):
    x, y = batch
    time.sleep(0.05)
    return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)


def model():
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    return torch.nn.Sequential(*layers)


workload = paceline.Workload(
    model=model,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
    data=Numbers(),
    batch_size=8,
    steps={STEPS},
    loader_workers=1,
    precision="float64",
    clip_norm=1.0,
)
"""


@dataclass
class Trial:
    """One job, its signal, and what came of it."""

    number: int
    signal: str
    kind: str
    after_s: float
    target: str = ""  # who got the signal
    code: int | None = None
    status: str = ""
    resumes: int = 0
    problems: list[str] = field(default_factory=list)
    output: str = ""


class Bench:
    """A folder with the workload, the temporary files of its jobs, and the run that nobody disturbed."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        (folder / "train.py").write_text(WORKLOAD)
        own = {"TMPDIR": str(self.temporary), MARK: str(folder), "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **own}
        self.seconds = min(self.run_undisturbed("undisturbed"), self.run_undisturbed("again"))  # the first is cold
        self.expected = self.last_checkpoint("undisturbed")
        if self.expected is None or self.last_checkpoint("again") != self.expected:
            raise SystemExit("random_signals: two runs that nobody disturbs differ: there is nothing to compare with")

    def run_undisturbed(self, job: str) -> float:
        """A run to its end; how long it took, in seconds."""
        began = time.monotonic()
        process = self.start(job)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"random_signals: a run that nobody disturbs ended with {process.returncode}:\n{output}")
        return time.monotonic() - began

    def start(self, job: str) -> subprocess.Popen[str]:
        """Start the job, or go on with it."""
        words = ["run", "-n", str(self.ranks), "--job", job, "--resume-or-start", "--checkpoint-every", str(EVERY)]
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", *words, "train.py"],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self.environment,
        )

    def last_checkpoint(self, job: str) -> dict[str, Any] | None:
        """The files' hashes and the tensors of the checkpoint after the last step; None: there is none."""
        path = self.folder / "runs" / job / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"
        if not path.exists():
            return None
        manifest = json.loads(path.read_text())
        return {name: manifest[name] for name in ("files", "tensors", "step", "position", "optimizer", "scheduler")}

    def leftovers(self) -> list[str]:
        """Processes and temporary files of jobs that have ended."""
        found = [f"temporary file {path}" for path in self.temporary.iterdir() if not path.name.startswith("torch")]
        return found + [f"process {process.pid} ({process.name()})" for process in self.processes()]

    def processes(self) -> list[psutil.Process]:
        """Processes of this folder's jobs."""
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_all(self) -> None:
        """End all of them."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait_until_clear(self) -> list[str]:
        """What is left after some time."""
        deadline = time.monotonic() + CLEAR_S
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def processes_of(root: int) -> dict[str, list[psutil.Process]]:
    """The processes of a job by kind, ranks in the order of their numbers as far as process numbers say it."""
    found: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    try:
        level = [psutil.Process(root)]
    except psutil.NoSuchProcess:
        return found
    for kind in KINDS:
        found[kind] = sorted(level, key=lambda process: process.pid)
        level = []
        for process in found[kind]:
            try:
                level += process.children()
            except psutil.Error:
                continue
    return found


def send(trial: Trial, job: subprocess.Popen[str], seen: set[int], chance: random.Random) -> None:
    """Send the trial's signal to a process of its kind, as soon as there is one."""
    processes = processes_of(job.pid)
    while not processes[trial.kind]:
        if job.poll() is not None:
            trial.target = "nobody (it had ended)"
            return
        time.sleep(0.02)
        processes = processes_of(job.pid)
    seen |= {process.pid for those in processes.values() for process in those}
    target = chance.choice(processes[trial.kind])
    index = processes[trial.kind].index(target)
    trial.target = f"rank {index}" if trial.kind == "rank" else trial.kind
    try:
        target.send_signal(getattr(signal, f"SIG{trial.signal}"))
        if trial.signal == "STOP":
            time.sleep(chance.uniform(0.1, 3.0))
            target.send_signal(signal.SIGCONT)
    except psutil.NoSuchProcess:
        trial.target += " (ended before)"


def run_trial(bench: Bench, trial: Trial, chance: random.Random) -> None:
    """One job: the signal, its end, its resumption, and the comparison."""
    name, seen = f"trial-{trial.number}", set[int]()
    job = bench.start(name)
    time.sleep(trial.after_s)
    if job.poll() is None:
        send(trial, job, seen, chance)
    else:
        trial.target = "nobody (it had ended)"
    finished(bench, trial, job, name)
    while bench.last_checkpoint(name) is None and trial.resumes < RESUMES and not trial.problems:
        trial.resumes += 1
        finished(bench, trial, bench.start(name), name)
    if not trial.problems and bench.last_checkpoint(name) is None:
        trial.problems.append(f"it did not come to its last step in {RESUMES} resumptions")
    elif bench.last_checkpoint(name) not in (None, bench.expected):
        trial.problems.append("the last checkpoint differs from that of the undisturbed run")
    trial.problems += shared_memory_of(seen)
    if not trial.problems:
        shutil.rmtree(bench.folder / "runs" / name, ignore_errors=True)


def finished(bench: Bench, trial: Trial, job: subprocess.Popen[str], name: str) -> None:
    """Wait for a job's end and judge what it said."""
    try:
        output, _ = job.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        bench.kill_all()
        output, _ = job.communicate()
        trial.problems.append(f"it did not end within {END_S:g} s")
    trial.output += output
    run_dir = bench.folder / "runs" / name
    problems = judged(output, job.returncode, run_dir, trial)
    if trial.resumes and job.returncode != 0:
        problems.append(f"a resumption that nobody disturbed ended with {job.returncode}")
    trial.problems += problems + [f"left: {one}" for one in bench.wait_until_clear()]
    if not trial.resumes:
        trial.code = job.returncode
        result = read_result(run_dir)
        trial.status = str(result["status"]) if result else "no result"


def judged(output: str, code: int, run_dir: Path, trial: Trial) -> list[str]:
    """What of a job's words is not true."""
    problems = [f"the output has {trace!r}" for trace in TRACES if trace in output]
    result = read_result(run_dir)
    if code >= 0 and result is not None:
        problems += untrue_result(result, code, run_dir)
    elif code >= 0 and (run_dir / "events.jsonl").exists():
        problems.append(f"it ended with {code} and wrote no result.json")
    for path in re.findall(r"(?:saved as|newest checkpoint is|Last checkpoint:) (\S+);", output):
        if not (run_dir.parent.parent / path / "manifest.json").exists():
            problems.append(f"it names the checkpoint {path}, which is not there")
    if "nothing was saved" in output and list((run_dir / "checkpoints").glob("step-*")):
        problems.append("it says that nothing was saved, and there are checkpoints")
    if "paceline run: done" in output and code != 0:
        problems.append(f"it says done and ends with {code}")
    for who, number in re.findall(r"(rank \d+)'s process was ended by SIG(\w+)", output):
        if trial.resumes or number != trial.signal or not trial.target.startswith("rank"):
            problems.append(f"it says that {who} was ended by SIG{number}, and the signal went to {trial.target}")
    if "SIGTERM; saved" in output and ", since rank" in output and trial.signal != "TERM":
        problems.append("it says that a rank was sent SIGTERM, and none was")
    return problems


def untrue_result(result: dict[str, Any], code: int, run_dir: Path) -> list[str]:
    """What of result.json is not true."""
    problems = []
    if result["exit_code"] != code:
        problems.append(f"result.json has exit code {result['exit_code']}, it was {code}")
    if (result["status"] == "done") != (code == 0 and result["stop_sent_to"] is None):
        problems.append(f"result.json has {result['status']} with exit code {code}")
    last = run_dir / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json"
    if result["status"] == "done" and not last.exists():
        problems.append("it is done, and its last step is not saved")
    if result["checkpoint"] and not Path(result["checkpoint"], "manifest.json").exists():
        problems.append(f"result.json names {result['checkpoint']}, which is not there")
    if result["status"] == "failed" and result["failure"] is None:
        problems.append("it failed, and no cause is named")
    return problems


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """What the job's result.json has."""
    path = run_dir / "result.json"
    content: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return content


def shared_memory_of(pids: set[int]) -> list[str]:
    """Shared memory with the number of one of these processes in its name."""
    names = [path.name for path in Path("/dev/shm").glob("*")] if Path("/dev/shm").is_dir() else []
    return [f"left: shared memory {name}" for name in names if any(f"_{pid}_" in name for pid in pids)]


def drawn(count: int, seconds: float, seed: int) -> list[Trial]:
    """Trials with every kind of process and every signal about equally often, at moments over the whole job."""
    chance = random.Random(seed)
    pairs = [(kind, name) for kind in KINDS for name in SIGNALS]
    trials = []
    for number in range(count):
        if number % len(pairs) == 0:
            chance.shuffle(pairs)
        kind, name = pairs[number % len(pairs)]
        trials.append(Trial(number, name, kind, round(chance.uniform(0.0, 0.95 * seconds), 3)))
    return trials


def table(trials: list[Trial]) -> str:
    """What became of the jobs, by who got the signal."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(re.sub(r"^rank \d+", "rank", trial.target), []).append(trial)
    rows = [["process", "signals", "done", "stopped", "failed", "no result", "resumed", "problems"]]
    for name, those in [*sorted(groups.items()), ("all", trials)]:
        ends = Counter(trial.status for trial in those)
        counts = [len(those), *(ends[status] for status in ("done", "stopped", "failed", "no result"))]
        counts += [sum(trial.resumes > 0 for trial in those), sum(bool(trial.problems) for trial in those)]
        rows.append([name, *map(str, counts)])
    return "\n".join(aligned(rows, "{:<}" + "  {:>}" * (len(rows[0]) - 1)))


def show_progress(trial: Trial, count: int, began: float) -> None:
    """A line for each trial, with the rate and the time left."""
    rate = (trial.number + 1) / (time.monotonic() - began)
    left = round((count - trial.number - 1) / rate)
    what = f"SIG{trial.signal} -> {trial.target} at {trial.after_s:.1f} s: {trial.status} ({trial.code})"
    verdict = (
        "; ".join(trial.problems) if trial.problems else "equal" + f", resumed {trial.resumes}x" * bool(trial.resumes)
    )
    line = f"[{trial.number + 1}/{count}] {60 * rate:.1f}/min, {left // 60}:{left % 60:02d} left  {what}, {verdict}"
    print(line, flush=True)


def main() -> int:
    """Run the trials; 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="signals, each to a job of its own (default 60)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of signals, processes and moments (default 0)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of each job (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial there")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    folder = Path(tempfile.mkdtemp(prefix="signals-"))
    bench = Bench(folder, arguments.ranks)
    print(f"undisturbed: {STEPS} steps in {bench.seconds:.1f} s", flush=True)
    trials, began = drawn(arguments.count, bench.seconds, arguments.seed), time.monotonic()
    chance = random.Random(arguments.seed + 1)
    try:
        for trial in trials:
            run_trial(bench, trial, chance)
            show_progress(trial, len(trials), began)
    except KeyboardInterrupt:
        bench.kill_all()
        shutil.rmtree(folder)
        return 130
    print(table(trials))
    bad = [trial for trial in trials if trial.problems]
    for trial in bad:
        print(f"\n--- trial {trial.number}: SIG{trial.signal} -> {trial.target}: {'; '.join(trial.problems)}")
        print(trial.output)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    if bad:
        print(f"{len(bad)} of {len(trials)} signals found something; runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    print(f"{len(trials)} signals: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
