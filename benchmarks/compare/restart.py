"""`scripts/bench restart`: from `kill -9` of a rank to the next step that is finished, against torchrun.

Three jobs take turns: Paceline's file under `paceline run --max-restarts`; the same file with the same checkpoints
under `torchrun --max-restarts`; and DDP in plain torch, with torch's own checkpoints, under torchrun. All train the
same small GPT on two ranks and save every ten steps. Rank 1 is killed in the middle, and each job must end by itself
with all of its steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.startup import alone, median_ratio, progress
from compare.step import machine, version
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned

_FILE = Path(__file__).with_name("restart_job.py")
CONTESTANTS = ("paceline", "torchrun", "torchrun_ddp")
RANKS = 2
STEPS = 150
KILL_AT = 35  # the step after which rank 1 is killed: three checkpoints are there by then
_RESTARTS = ["--max-restarts", "3"]
_LIMIT_S = 120.0  # for a job
_POLL_S = 0.002

Note = tuple[int, int, int]  # nanoseconds since the epoch, step, process number


def run_restarts(folder: Path, rounds: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the comparison in `folder`.

    Args:
        folder: an empty folder.
        rounds: jobs of each contestant.
        tell: called with progress lines.

    Returns:
        `rows` (name, seconds by round and median, steps that were taken again), `ratios`, the machine and versions.

    Raises:
        UsageError: a number is too small, or a job did not go on to its end.
    """
    if rounds < 1:
        raise UsageError("can't measure restarts", f"--rounds is {rounds}", "write --rounds 1 or more")
    load_before = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    repeated: dict[str, list[int]] = {name: [] for name in CONTESTANTS}
    began_s = time.monotonic()
    num_done = 0
    for number in range(rounds):
        # Forwards and backwards, so that nobody always follows the same neighbour.
        for name in CONTESTANTS if number % 2 == 0 else CONTESTANTS[::-1]:
            tell(progress("restart", num_done, rounds * len(CONTESTANTS), time.monotonic() - began_s))
            num_done += 1
            place = folder / f"{name}-{number}"
            place.mkdir()
            taken_s, again = _interrupt(name, place)
            seconds[name].append(taken_s)
            repeated[name].append(again)
    return {
        "rows": [_row(name, seconds[name], repeated[name]) for name in CONTESTANTS],
        "ratios": ratios(seconds),
        "rounds": rounds,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch")},
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return Paceline's time over each other's: below 1 it goes on sooner."""
    result = {}
    for name in CONTESTANTS[1:]:
        result[f"paceline_over_{name}"] = round(median_ratio(seconds["paceline"], seconds[name]), 4)
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as aligned lines."""
    rows = [("", "seconds", "min", "max", "steps again")]
    for row in result["rows"]:
        rows.append((row["name"], *(f"{row[key]:.2f}" for key in ("seconds", "min", "max")), row["repeated"]))
    ratios = [(name, f"{value:.3f}") for name, value in result["ratios"].items()]
    where = result["machine"]
    return "\n".join(
        [
            *aligned(rows, "{:<16}{:>10}{:>10}{:>10}{:>14}"),
            "",
            *aligned(ratios, "{:<32}{:>8}"),
            "",
            "seconds from kill -9 of a rank to the end of the next step; ratios below 1: Paceline goes on sooner",
            f"{where['cores']} cores, load {where['load_before']:.1f} before, {where['load_after']:.1f} after",
        ]
    )


def command_of(name: str, folder: Path) -> list[str]:
    """Return the command by which a user starts the job."""
    library = "ddp" if name == "torchrun_ddp" else "paceline"
    job = [str(_FILE), library, str(STEPS), str(folder)]
    run = [module_names.COMMAND, "run", "--runs", str(folder / "runs"), "--job", "a", "--checkpoint-every", "10"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    if name == "paceline":
        return [sys.executable, "-m", *run, "-n", str(RANKS), *_RESTARTS, *job]
    if name == "torchrun":
        return [*torchrun, *_RESTARTS, "-m", *run, "--resume-or-start", *job]
    return [*torchrun, *_RESTARTS, *job]


def _interrupt(name: str, folder: Path) -> tuple[float, int]:
    """Run a job and kill its rank 1. Return the seconds to the next step, and how many steps were taken again."""
    # A benchmark that a launcher started must not make its jobs ranks of that launcher.
    launchers = ("PACELINE_", "TORCHELASTIC")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    if name == "torchrun_ddp":
        # torchrun keeps its store over restarts (torch 2.13), and in plain torch a new rank may wait for a dead one.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment["OMP_NUM_THREADS"] = "1"  # as torchrun and Paceline set it for several ranks of a host
    output = folder / "output"
    until_s = time.monotonic() + _LIMIT_S
    with output.open("w") as file:
        process = subprocess.Popen(
            command_of(name, folder), stdout=file, stderr=file, env=environment, cwd=folder, start_new_session=True
        )
    try:
        while not _has_come(folder, KILL_AT) and process.poll() is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        killed_ns = time.time_ns()
        with contextlib.suppress(OSError, ValueError):  # it has failed; the check below says so
            os.kill(int((folder / "rank-1").read_text()), signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until_s - time.monotonic()))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    notes = _notes(folder)
    if process.returncode or not notes or notes[-1][1] != STEPS:
        lines = output.read_text().strip().splitlines() or ["it printed nothing"]
        raise UsageError(
            f"{name} should go on after a rank was killed, and take {STEPS} steps",
            f"it did not: {lines[-1]}",
            alone(command_of(name, folder)),
        )
    return went_on(notes, killed_ns)


def went_on(notes: list[Note], killed_ns: int) -> tuple[float, int]:
    """Return the seconds from the kill to the first step of another process, and how many steps it took again."""
    first = notes[0][2]
    before = [note for note in notes if note[2] == first]
    after = [note for note in notes if note[2] != first]
    return (after[0][0] - killed_ns) / 1e9, before[-1][1] - after[0][1] + 1


def _has_come(folder: Path, step: int) -> bool:
    notes = _notes(folder)
    return bool(notes) and notes[-1][1] >= step


def _notes(folder: Path) -> list[Note]:
    """Return what rank 0 has noted by now, in whole lines."""
    notes = []
    with contextlib.suppress(OSError):
        text = (folder / "steps").read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            at, step, pid = map(int, line.split())
            notes.append((at, step, pid))
    return notes


def _row(name: str, seconds: list[float], repeated: list[int]) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": RANKS,
        "seconds": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
        "rounds": [round(value, 3) for value in seconds],
        "repeated": round(statistics.median(repeated)),
    }
