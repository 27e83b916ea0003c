#!/usr/bin/env python3
"""Kill and stop processes of jobs with parameter servers under `mode=sync`, at random moments, and check how they end.

Each trial runs one job with a worker for each half of the batch, servers and their coordinator. At random moments one
or two of these processes are killed, stopped for a while, or stopped for good. Afterwards:

- either the job is done, and its parameters, optimizer and losses equal those of an undisturbed run bit for bit,
- or it has failed with an error that says what was asked, what was found and what to do;
- the output has no Python traceback, and names no process as ended or silent that was not;
- no process, socket, file or folder is left.

    python benchmarks/trials/server_faults.py --count 30 --seed 0 --json faults.json

Exit code 0: all trials ended as they should; 1: some did not, and the table says how.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from paceline.nouns.table import aligned

WORKERS, SERVERS, STEPS = 2, 2, 40
PAUSE_S = 0.05  # in every forward pass: a job lasts some seconds
SILENCE_S = 8.0  # after which a silent worker is replaced; 60 outside of trials
JOB_S = 240.0  # a job that takes longer hangs
WHILE_S = (0.2, 12.0)  # how long a process is stopped: shorter and longer than SILENCE_S
MARK = "PACELINE_TRIAL"
WORKLOAD = """
import os, time
import torch
import paceline
from torch.nn import functional as F

torch.manual_seed(0)
ROWS = torch.randn(64, 64)

def loss(model, batch):
    time.sleep(float(os.environ["TRIAL_PAUSE"]))
    return F.mse_loss(model(batch), batch, reduction="sum"), len(batch)

workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 7000), torch.nn.Dropout(0.1), torch.nn.Linear(7000, 64)),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.95),
    data=list(ROWS), batch_size=16, steps={steps}, clip_norm=1.0, deterministic=True,
)
"""


@dataclass
class Fault:
    """What is done to one process.

    Args:
        kind: "kill", "stop" for `for_s`, or "stop for good".
        process: its number: workers first, then servers, then the coordinator.
        at: a step, or below 0 seconds after the processes' start, in which the job may still gather.
        is_at_once: it does not wait until what the fault before it ended is there again.
    """

    kind: str
    process: int
    at: float
    for_s: float = 0.0
    is_at_once: bool = False

    def __str__(self) -> str:
        name = name_of(self.process)
        when = f"at step {self.at:.0f}" if self.at >= 0 else f"{-self.at:.1f} s after the start"
        when = "at once" if self.is_at_once else when
        return f"{self.kind} {name} {when}" + (f" for {self.for_s:.1f} s" if self.for_s else "")


@dataclass
class Trial:
    """One job and what became of it."""

    number: int
    faults: list[Fault]
    outcome: str = ""
    seconds: float = 0.0
    hit: int = 0  # faults that met a living process
    wrong: list[str] = field(default_factory=list)


def name_of(process: int) -> str:
    """What the command's output calls a process."""
    if process < WORKERS:
        return f"worker {process}"
    return f"server {process - WORKERS}" if process < WORKERS + SERVERS else "the coordinator"


def draw_faults(draws: random.Random) -> list[Fault]:
    """One fault, or two: the second comes later, or at once."""
    faults: list[Fault] = []
    for _ in range(draws.choice([1, 1, 2])):
        kind = draws.choice(["kill", "stop", "stop for good"])
        process = draws.randrange(WORKERS + SERVERS + 1)
        at = draws.uniform(-4.0, -0.1) if draws.random() < 0.2 else float(draws.randrange(1, STEPS - 2))
        faults.append(Fault(kind, process, at, draws.uniform(*WHILE_S) if kind == "stop" else 0.0))
    faults = sorted(faults, key=lambda fault: (fault.at >= 0, abs(fault.at)))
    others = [number for number in range(WORKERS + SERVERS + 1) if number != faults[0].process]
    if len(faults) == 2 and draws.random() < 0.4:
        faults[1].is_at_once, faults[1].process, faults[1].at = True, draws.choice(others), faults[0].at
    return faults


class Running:
    """A job under way: its processes by number, as they come and go."""

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.run_dir = folder, folder / "runs" / job
        command = [sys.executable, "-m", "paceline.cli.main", "run", "-n", str(WORKERS)]
        command += ["--plan", f"server={SERVERS}", "--job", job, "job.py"]
        self.output = (folder / f"{job}.output").open("w+")
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=self.output, stderr=subprocess.STDOUT, env=environment(folder)
        )
        self.pids: dict[int, int] = {}
        self.dead: dict[int, int] = {}  # by number, processes that were killed
        self.began_s = 0.0

    def find_processes(self) -> bool:
        """Whether all processes are known: at first in the order of their start, later who came in whose place."""
        try:
            (fork_server,) = psutil.Process(self.process.pid).children()
            children = [child for child in fork_server.children() if child.status() != psutil.STATUS_ZOMBIE]
        except (psutil.Error, ValueError):
            return False
        pids = [child.pid for child in sorted(children, key=lambda child: (child.create_time(), child.pid))]
        if not self.pids:
            if len(pids) == WORKERS + SERVERS + 1:
                self.pids = dict(enumerate(pids))
                self.began_s = time.monotonic()
            return bool(self.pids)
        missing = [number for number, pid in self.pids.items() if pid not in pids]
        new = [pid for pid in pids if pid not in self.pids.values()]
        if len(missing) == 1 and len(new) == 1:
            self.pids[missing[0]] = new[0]
        return all(pid in pids for pid in self.pids.values())

    def step(self) -> int:
        """The last step that is written down."""
        steps = [event["step"] for event in events(self.run_dir / "events.jsonl") if event.get("event") == "step"]
        return int(steps[-1]) if steps else 0

    def is_due(self, fault: Fault) -> bool:
        """Whether the moment of a fault has come."""
        if not self.pids:
            return False
        return time.monotonic() - self.began_s >= -fault.at if fault.at < 0 else self.step() >= fault.at

    def is_over(self, deadline_s: float) -> bool:
        """Whether the job has ended, or takes too long."""
        return self.process.poll() is not None or time.monotonic() > deadline_s

    def end(self) -> str:
        """Kill what is left of a job that hangs; its output."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.kill()
        self.process.wait()
        self.output.seek(0)
        with self.output:
            return self.output.read()


def environment(folder: Path) -> dict[str, str]:
    """Marks a job's processes, and keeps its temporary files in a folder of their own."""
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"TMPDIR": str(folder / "tmp"), MARK: str(folder), "PACELINE_SILENCE_S": str(SILENCE_S)}
    return {**os.environ, **own, "TRIAL_PAUSE": str(PAUSE_S), "OMP_NUM_THREADS": "1"}


def events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines() if line]


def run_trial(folder: Path, trial: Trial, calm: Path) -> None:
    """Run one job, do its faults, and note what is wrong."""
    began_s = time.monotonic()
    running = Running(folder, f"trial{trial.number}")
    inflict(running, trial, began_s + JOB_S)
    while not running.is_over(began_s + JOB_S):
        time.sleep(0.05)
    has_ended = running.process.poll() is not None
    output = running.end()
    trial.seconds = time.monotonic() - began_s
    if not has_ended:
        trial.outcome = "hangs"
        trial.wrong.append(f"it has not ended in {JOB_S:g} s")
    else:
        check(running, trial, output, calm)
    trial.wrong += [f"left behind: {one}" for one in leftovers(folder)]
    if trial.wrong:
        trial.wrong.append(f"output: {output[-1500:]}")


def inflict(running: Running, trial: Trial, deadline_s: float) -> None:
    """Do the faults, each at its moment; one that is stopped for a while goes on before a fault that is not at once."""
    stopped: list[tuple[float, int]] = []
    for fault, following in zip(trial.faults, [*trial.faults[1:], None], strict=True):
        while not fault.is_at_once and not (running.find_processes() and running.is_due(fault)):
            if running.is_over(deadline_s):
                return
            time.sleep(0.01)
        pid = running.pids[fault.process]
        if signalled(running, pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP):
            trial.hit += 1
            stopped += [(time.monotonic() + fault.for_s, pid)] * (fault.kind == "stop")
        if following is None or not following.is_at_once:
            go_on(running, stopped, deadline_s)
            stopped = []


def go_on(running: Running, stopped: list[tuple[float, int]], deadline_s: float) -> None:
    """Let stopped processes go on, each at its time."""
    for until_s, pid in sorted(stopped):
        while time.monotonic() < until_s and not running.is_over(deadline_s):
            time.sleep(0.05)
        signalled(running, pid, signal.SIGCONT)


def signalled(running: Running, pid: int, number: int) -> bool:
    """Whether a process of this job was there to be signalled: its number may be another's by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.environ().get(MARK) == str(running.folder) and process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(number)
            return True
    return False


def check(running: Running, trial: Trial, output: str, calm: Path) -> None:
    """Whether the end is one of the two that are promised, and what is said of it is true."""
    code = running.process.returncode
    result = json.loads((running.run_dir / "result.json").read_text())
    trial.outcome = f"{result['status']} ({code})"
    if "Traceback (most recent call last)" in output:
        trial.wrong.append("the output has a Python traceback")
    check_words(trial, output)
    if code == 0:
        check_done(running.run_dir, trial, result, calm)
        if "done" not in output:
            trial.wrong.append("exit code 0, and the output does not say that the job is done")
        return
    failure = result["failure"]
    if result["status"] != "failed" or not failure or not failure["is_paceline"] or "\n" not in failure["message"]:
        trial.wrong.append(f"a failure without a clear error: {failure}")
    if re.search(r"paceline run: done", output):
        trial.wrong.append(f"exit code {code}, and the output says that the job is done")


def check_words(trial: Trial, output: str) -> None:
    """Processes that the output says were ended by a signal: those that were, or that were given up."""
    given_up = re.findall(r"paceline: (.+) has been silent for \d+ s: killing it", output)
    allowed = [name_of(fault.process) for fault in trial.faults if fault.kind == "kill"] + given_up
    for name in re.findall(r"paceline: (.+?) was ended by SIG\w+; another takes its place", output):
        if name not in allowed:
            trial.wrong.append(f"the output says that {name} was ended by a signal")
            continue
        allowed.remove(name)
    stopped = {name_of(fault.process) for fault in trial.faults if fault.kind != "kill"}
    for name in set(given_up) - stopped:
        trial.wrong.append(f"{name} was given up, and was not stopped")
    if "left out" in output or "go on without" in output:
        trial.wrong.append("something was left out under sync")


def check_done(run_dir: Path, trial: Trial, result: dict[str, Any], calm: Path) -> None:
    """Whether a job that says that it is done has trained what the undisturbed one has."""
    if (result["status"], result["steps"]) != ("done", STEPS):
        trial.wrong.append(f"exit code 0 with status {result['status']} after {result['steps']} steps")
        return
    left_out = result.get("left_out")
    if left_out is not None and left_out != {"gradients": 0, "of": WORKERS * STEPS}:
        trial.wrong.append(f"left out: {left_out}")
    ours, theirs = last_checkpoint(run_dir), last_checkpoint(calm)
    if ours.keys() != theirs.keys():
        trial.wrong.append("the last checkpoint has other tensors")
    different = [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    if different:
        trial.wrong.append(f"{len(different)} of {len(ours)} tensors differ from the undisturbed run's")
    lines, expected = steps_of(run_dir), steps_of(calm)
    if lines != expected:
        missing = sorted({step for step, _ in expected} - {step for step, _ in lines})
        trial.wrong.append(f"events.jsonl differs from the undisturbed run's; missing steps: {missing}")


def steps_of(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of every step's line, in the order of the file."""
    return [
        (event["step"], event["loss"]) for event in events(run_dir / "events.jsonl") if event.get("event") == "step"
    ]


def last_checkpoint(run_dir: Path) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state."""
    last = max((run_dir / "checkpoints").iterdir())
    tensors = {name: tensor for path in last.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model/", "optimizer/"))}


def leftovers(folder: Path, patience_s: float = 10.0) -> list[str]:
    """Processes, sockets and files of ended jobs that are still there after a while."""
    until_s = time.monotonic() + patience_s
    while (found := _leftovers(folder)) and time.monotonic() < until_s:
        time.sleep(0.1)
    for pid in _marked(folder):
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()  # the next trial begins with none
    return found


def _leftovers(folder: Path) -> list[str]:
    files = [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("torch")]
    return files + [f"process {pid}" for pid in _marked(folder)]


def _marked(folder: Path) -> list[int]:
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def progress(done: int, count: int, began_s: float, bad: int) -> str:
    """The progress line: how many, how fast, how long still."""
    rate = done / max(1e-9, time.monotonic() - began_s)
    left_s = (count - done) / rate if rate else 0.0
    return f"{done}/{count} trials  {60 * rate:.1f}/min  {left_s / 60:.0f} min left  {bad} wrong"


def table(trials: list[Trial]) -> str:
    """All trials, aligned."""
    rows = [("trial", "faults", "hit", "end", "seconds", "wrong")]
    for one in trials:
        what = "; ".join(map(str, one.faults))
        wrong = str(len(one.wrong) - 1) if one.wrong else "-"
        rows.append((str(one.number), what, str(one.hit), one.outcome, f"{one.seconds:.0f}", wrong))
    lines = aligned(rows, "  ".join(["{:<}"] * len(rows[0])))
    return "\n".join(line.rstrip() for line in lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, metavar="N", help="trials (30)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the faults (0)")
    parser.add_argument("--only", type=int, metavar="N", help="run the trial of this number alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the trials; the exit code."""
    asked = parse(arguments)
    draws = random.Random(asked.seed)
    trials = [Trial(number, draw_faults(draws)) for number in range(asked.count)]
    if asked.only is not None:
        trials = [trial for trial in trials if trial.number == asked.only]
    folder = Path(tempfile.mkdtemp(prefix="pl-trial-", dir="/tmp"))  # a short path: sockets are in it
    try:
        (folder / "job.py").write_text(WORKLOAD.format(steps=STEPS))
        calm = Running(folder, "calm")
        calm.process.wait(JOB_S)
        output = calm.end()
        if calm.process.returncode:
            print(output, file=sys.stderr)
            return 1
        began_s = time.monotonic()
        for done, trial in enumerate(trials, 1):
            run_trial(folder, trial, calm.run_dir)
            for wrong in trial.wrong:
                print(f"trial {trial.number}: {wrong}", file=sys.stderr)
            print(progress(done, len(trials), began_s, sum(bool(one.wrong) for one in trials)), flush=True)
            shutil.rmtree(folder / "runs" / f"trial{trial.number}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(trials))
    bad = sum(bool(trial.wrong) for trial in trials)
    print(f"{len(trials)} trials, {bad} wrong")
    if asked.json:
        asked.json.write_text(json.dumps([_as_json(trial) for trial in trials], indent=1) + "\n")
    return 1 if bad or not trials else 0


def _as_json(trial: Trial) -> dict[str, Any]:
    facts = {"number": trial.number, "outcome": trial.outcome, "seconds": round(trial.seconds, 1), "hit": trial.hit}
    return {**facts, "faults": [vars(fault) for fault in trial.faults], "wrong": trial.wrong}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
