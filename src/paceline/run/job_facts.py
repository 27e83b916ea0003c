"""Collect the facts about a job that may stand still, or be slow: from its run directory, its ranks and this host.

`run/causes.py` judges it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.nouns.events import newest_first
from paceline.run.read.runs import Run, read_run, result_failure, seconds_since_event
from paceline.run.read.standing import ask, line_of
from paceline.run.read.times import RankSplit, files_of, newest_process, recent_splits

ANSWER_S = 4.0  # a rank looks for a question twice a second; its thread may wait for a busy core
_CLOCKS_S = 5.0  # the largest difference between hosts' clocks
_CPU_S = 0.3  # the time over which the use of a core is measured
BUSY = 0.3  # cores: a rank that uses more computes
_JUMP_S = 5.0  # a clock jumped where two events differ by so much more or less than the step between them took
_TAIL_BYTES = 2**18
ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts about one rank.

    Args:
        rank: the number of the rank.
        answer: the report of the rank about itself; None: it did not answer.
        pid, host: the process and its host; 0 and "" where the rank never wrote them.
        is_here: True where the process runs, or ran, on this host, so that it can be inspected.
        state: the state of the process, as psutil names it, such as "running" or "stopped"; "gone" where there is none,
            ENDED where the rank has ended its job.
        cpu: the number of cores that the process uses, where it did not answer.
    """

    rank: int
    answer: Mapping[str, Any] | None = None
    pid: int = 0
    host: str = ""
    is_here: bool = False
    state: str = ""
    cpu: float = 0.0

    @property
    def waits_in(self) -> str | None:
        """Return the collective in which it waits."""
        return None if self.answer is None else self.answer.get("waits_in")

    @property
    def target(self) -> int:
        """Return the step in which it is, or the number of those that it has taken."""
        if self.answer is None:
            return 0
        return int(self.answer["step"] or self.answer["steps_done"])

    @property
    def stalled_s(self) -> float:
        """Return the seconds without progress of a rank that answered."""
        return 0.0 if self.answer is None else float(self.answer["stalled_s"])

    @property
    def line(self) -> str:
        """Return the innermost line of the user's code, or of any code."""
        return "an unknown line" if self.answer is None else line_of(self.answer)

    @property
    def computes(self) -> bool:
        """Return whether it uses a core, or waits for one: beside busy processes it may get little of it."""
        if self.answer is None:
            return False
        states = str(self.answer.get("states") or "")
        if states:
            return states.count("R") > len(states) / 2
        return bool(self.answer["cpu_s"] > BUSY * max(self.answer["stalled_s"], 0.1))

    @property
    def stack(self) -> Sequence[Sequence[Any]]:
        """Return the main thread's frames, innermost first."""
        return [] if self.answer is None else self.answer["stack"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a job.

    Args:
        run: the summary of the run.
        ranks: the facts about each rank.
        splits: the times of recent steps, split by kind of work.
        stands_s: the seconds since the last step, or another sign of progress; 0 where steps come.
        failure: the failure that ended the job, as users read it.
        free_bytes: the free bytes on the disk of the run directory.
        checkpoint_fault: the reason why the newest checkpoint could not be written.
        clock_jumps: the seconds by which the wall clock of rank 0's host jumped, and the step, of each jump.
        not_asked: the reason why the ranks could not be asked; None: they were asked.
        age_s: the seconds since the job was started.
        is_first_step: True where this start of the job has not ended a step.
        answer_s: the seconds in which a rank had to answer.
    """

    run: Run
    ranks: Sequence[RankFacts]
    splits: Sequence[RankSplit] = ()
    stands_s: float = 0.0
    failure: str | None = None
    free_bytes: int = 2**40
    checkpoint_fault: str | None = None
    clock_jumps: Sequence[tuple[float, int]] = field(default=())
    not_asked: str | None = None
    age_s: float = 3600.0
    is_first_step: bool = False
    answer_s: float = ANSWER_S


def collect(folder: Path, answer_s: float | None = None) -> Facts:
    """Collect the facts about a job from its run directory, its ranks and this host.

    Args:
        folder: the run directory.
        answer_s: the seconds in which a rank has to answer; None: ANSWER_S.
    """
    answer_s = ANSWER_S if answer_s is None else answer_s
    run = read_run(folder)
    answers: dict[int, dict[str, Any]] = {}
    not_asked = None
    if run.is_open and run.ranks:
        try:
            answers = ask(folder, run.ranks, answer_s)
        except OSError as error:  # such as of a full disk
            not_asked = f"{folder} can't be written ({error.strerror})"
        run = replace(run, quiet_s=seconds_since_event(folder))  # events have come since they were asked
    ranks = _ranks(folder, run, answers) if run.is_open else []
    events = list(newest_first(folder / "events.jsonl", most_bytes=_TAIL_BYTES))
    return Facts(
        run=run,
        ranks=ranks,
        splits=recent_splits(folder, run.ranks),
        stands_s=_standing_s(ranks, run) if run.is_open else 0.0,
        failure=None if run.is_open else result_failure(folder),
        free_bytes=_free_bytes(folder),
        checkpoint_fault=_checkpoint_fault(events),
        clock_jumps=tuple(_clock_jumps(events)),
        not_asked=not_asked,
        age_s=max(0.0, time.time_ns() / 1e9 - run.started),
        is_first_step=_is_first_step(events),
        answer_s=answer_s,
    )


def _ranks(folder: Path, run: Run, answers: Mapping[int, Mapping[str, Any]]) -> list[RankFacts]:
    """Return the facts about each rank; of one that did not answer, what can be seen of its process on this host."""
    files = files_of(folder)
    found: dict[int, RankFacts] = {}
    processes: dict[int, psutil.Process] = {}
    for rank in range(run.ranks):
        answer = answers.get(rank)
        if answer is not None:
            found[rank] = RankFacts(rank, answer, int(answer.get("pid", 0)), str(answer.get("host", "")))
            continue
        process, has_ended = newest_process(files[rank]) if rank in files else (None, False)
        if process is None or process.wall_ns / 1e9 < run.started - _CLOCKS_S:
            found[rank] = RankFacts(rank)  # its newest process is of an earlier start
            continue
        is_here = process.host == socket.gethostname()
        state = ENDED if has_ended else ""
        if is_here and not has_ended:
            try:
                processes[rank] = psutil.Process(process.pid)
            except psutil.NoSuchProcess:
                state = "gone"
        found[rank] = RankFacts(rank, None, process.pid, process.host, is_here, state)
    for rank, (state, cpu) in _looked_at(processes).items():
        found[rank] = replace(found[rank], state=state, cpu=cpu)
    return list(found.values())


def _looked_at(processes: Mapping[int, psutil.Process]) -> dict[int, tuple[str, float]]:
    """Return the state of each process, and the cores that it uses, seen for a moment."""
    before = {rank: _seen(process) for rank, process in processes.items()}
    if processes:
        time.sleep(_CPU_S)
    found = {}
    for rank, process in processes.items():
        state, cpu_s = _seen(process)
        found[rank] = (state, max(0.0, cpu_s - before[rank][1]) / _CPU_S)
    return found


def _seen(process: psutil.Process) -> tuple[str, float]:
    try:
        return process.status(), sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return "gone", 0.0
    except psutil.Error:  # another user's
        return "", 0.0


def _is_first_step(events: Sequence[Mapping[str, Any]]) -> bool:
    kinds = (event["event"] for event in events)
    return next((kind != "step" for kind in kinds if kind in ("start", "resumed", "step")), True)


def _standing_s(ranks: Sequence[RankFacts], run: Run) -> float:
    """Return for how long nobody has made progress: of those that answer the one that has waited least."""
    answered = [float(rank.answer["stalled_s"]) for rank in ranks if rank.answer is not None]
    if answered:
        return min(answered) if len(answered) == len(ranks) else max(answered)
    return run.quiet_s


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 2**40
    return found.f_bavail * found.f_frsize


def _checkpoint_fault(events: Sequence[Mapping[str, Any]]) -> str | None:
    for event in events:
        if event["event"] in ("checkpoint", "start"):
            return None
        if event["event"] == "checkpoint_failed":
            return str(event.get("found"))
    return None


def _clock_jumps(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, int]]:
    """Yield each jump of the wall clock, back or forth by more than the step took: its seconds, and the step."""
    before: Mapping[str, Any] | None = None
    for event in reversed(events):
        if event["event"] != "step":
            before = before if event["event"] not in ("start", "resumed") else None
            continue
        times = event.get("times")
        passed_s = None
        if isinstance(times, dict) and all(isinstance(seconds, int | float) for seconds in times.values()):
            passed_s = sum(times.values())
        if before is not None and passed_s is not None and event["step"] == before["step"] + 1:
            jump_s = event["at"] - before["at"] - passed_s
            if abs(jump_s) > _JUMP_S:
                yield jump_s, event["step"]
        before = event
