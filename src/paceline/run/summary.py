"""What is known of the runs in a folder, from their files alone: nothing asks a process or a host."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import CHECKPOINTS, list_checkpoints, step_of
from paceline.nouns.errors import PacelineError, ReadError, UsageError, did_you_mean
from paceline.nouns.events import decoded
from paceline.nouns.plan import Plan
from paceline.nouns.reading import parse_json, read_bytes, read_json, regular
from paceline.run.failures import format_failure_briefly

RUNNING, SILENT = "running", "silent"  # of a run whose last start has no result
QUIET_S = 120.0  # without an event for longer it is silent: killed, or in a long step, maybe on another host
_TAIL_BYTES = 2**16
_MOST_TAIL_BYTES = 2**24
_MOST_RANKS = 2**20  # more than any job has
_KIND = re.compile(rb'\{"event": ?"(\w+)"')  # as a job writes its events
_NOT_SCORES = ("event", "step", "epoch", "at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as `paceline runs` lists it.

    Args:
        folder: its run directory.
        status: what `result.json` says, such as done, failed or stopped. Without a result of its last start: "running",
            or "silent" after two minutes without an event.
        started: by the clock of its host, seconds since 1970; of the last start.
        step: the last one that is written down.
        total_steps: of the whole job; 0 if unknown.
        loss: of that step.
        evaluation: the newest one, by name; empty where none is near the end of the events, or the result's.
        ranks: of the last start.
        plan: in short.
        script: the workload file, and its arguments.
    """

    folder: Path
    status: str
    started: float
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    ranks: int = 0
    plan: str = ""
    script: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.folder.name

    @property
    def has_servers(self) -> bool:
        """Return whether its plan has parameter servers: workers then go at their own pace."""
        return "server=" in self.plan

    def to_json(self) -> dict[str, Any]:
        """Return the run for programs."""
        return {
            "job": self.name,
            "run_dir": str(self.folder),
            "status": self.status,
            "started": self.started,
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": self.loss,
            "evaluation": self.evaluation,
            "ranks": self.ranks,
            "plan": self.plan,
            "script": list(self.script),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What reading all of a run's events adds.

    Args:
        starts: how often the job was started or resumed.
        losses: of each step, in their order; steps that were taken again once.
        evaluations: step and ratios, in their order.
        logged: the newest number of each name that the loop has logged, with its step.
        seconds_per_step: the median of the last attempt's steps.
        samples_per_s: over the same steps; None where the loop makes its own batches.
        memory_bytes: the largest resident memory of rank 0.
        checkpoints: their steps, and the bytes of all.
        failure: what ended it, in a line with rank and step, if something did.
        unreadable: lines of the file that are no events.
    """

    starts: int
    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, dict[str, float]], ...]
    logged: dict[str, tuple[int, float]]
    seconds_per_step: float | None
    samples_per_s: float | None
    memory_bytes: int
    checkpoints: tuple[int, ...]
    checkpoint_bytes: int
    failure: str | None
    unreadable: int


def list_runs(runs: Path) -> list[Run]:
    """Return the runs in a folder, the one that was started last first.

    Raises:
        UsageError: there is no such folder.
    """
    if not runs.is_dir():
        raise UsageError(f"the runs in {runs}", "there is no such folder", "name the folder of your runs with --runs")
    found = [read_run(path.parent) for path in runs.glob("*/job.json")]
    return sorted(found, key=lambda run: run.started, reverse=True)


def find_folder(runs: Path, job: str) -> Path:
    """Return the run directory of a job: its name in `runs`, or its path.

    Raises:
        UsageError: there is none.
    """
    for folder in (runs / job, Path(job)):
        if (folder / "job.json").is_file():
            return folder if folder.name else folder.resolve()  # `.` has no name
    known = [path.parent.name for path in runs.glob("*/job.json")]
    found = "there is no such run" if runs.is_dir() else f"there is no folder {runs}"
    if (runs / job).is_dir() or Path(job).is_dir():
        found = "the folder is there, but it is no run: it has no job.json"
    raise UsageError(f"the run {job!r} in {runs}", found, did_you_mean(job, known, "see `paceline runs`"))


def read_run(folder: Path) -> Run:
    """Return what is known of one run without reading all of its events; parts that can't be read are left out."""
    job = _read(folder / "job.json")
    result = _read(folder / "result.json")
    started = _changed(folder / "job.json")
    newest = _newest_events(folder / "events.jsonl")
    is_newer = _changed(folder / "result.json") >= started
    # A copy of a run has other times; the event `end` comes after those of its start.
    has_ended = "status" in result and (is_newer or list(newest)[-1:] == ["end"])
    last_event = max(_changed(folder / "events.jsonl"), started)
    status = str(result["status"]) if has_ended else RUNNING
    if not has_ended and time.time_ns() / 1e9 - last_event > QUIET_S:
        status = SILENT
    evaluation = newest.get("evaluation") or (has_ended and result.get("evaluation")) or {}
    step = newest.get("step", {})
    arguments = job.get("arguments")
    words = [str(job.get("script", "")), *map(str, arguments if isinstance(arguments, list) else ())]
    return Run(
        folder=folder,
        status=status,
        started=started,
        step=int(step.get("step", 0)),
        total_steps=_total_steps(folder / "events.jsonl", newest),
        loss=step.get("loss"),
        evaluation=_scores(evaluation) if isinstance(evaluation, dict) else {},
        ranks=job["ranks"] if isinstance(job.get("ranks"), int) and 0 <= job["ranks"] <= _MOST_RANKS else 0,
        plan=_plan(folder),
        script=tuple(words),
    )


def read_details(folder: Path) -> Details:
    """Read all of a run's events."""
    from paceline.run.event_reader import EventReader, StepEvent  # here: `paceline runs` needs no msgspec

    reader = EventReader()
    losses: dict[int, float] = {}
    evaluations: dict[int, dict[str, float]] = {}
    logged: dict[str, tuple[int, float]] = {}
    last: list[tuple[float, int]] = []  # seconds and samples of the last attempt's steps
    starts, memory = 0, 0
    for event in reader.read_file(folder / "events.jsonl"):
        if isinstance(event, StepEvent):
            losses[event.step] = event.loss
            memory = max(memory, event.memory_bytes)
            if event.seconds is not None:
                last.append((event.seconds, event.samples))
            continue
        kind, step = event["event"], event.get("step") or 0
        if kind == "start":
            starts, last = starts + 1, []
        elif kind == "evaluation":
            evaluations[step] = _scores(event)
        elif kind == "logged":
            logged |= {name.removeprefix("logged_"): (step, value) for name, value in _scores(event).items()}
    seconds = [of_step for of_step, _ in last[1:] or last]
    total_s = sum(seconds)
    samples = sum(of_step for _, of_step in last[1:] or last)
    names = [each.name for each in list_checkpoints(folder / CHECKPOINTS)]
    return Details(
        starts=starts,
        losses=tuple(losses[step] for step in sorted(losses)),
        evaluations=tuple(sorted(evaluations.items())),
        logged=logged,
        seconds_per_step=statistics.median(seconds) if seconds else None,
        samples_per_s=samples / total_s if samples and total_s else None,
        memory_bytes=memory,
        checkpoints=tuple(sorted(step for step in map(step_of, names) if step is not None)),
        checkpoint_bytes=size_of(folder / CHECKPOINTS),
        failure=result_failure(folder),
        unreadable=reader.unreadable,
    )


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder, without following links."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
        except OSError:
            continue  # removed meanwhile
    return total


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path, dict)
    except (ReadError, OSError):
        return {}  # not written yet, or cut off by a crash or a full disk
    return found


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _plan(folder: Path) -> str:
    try:
        return _line_of_plan(read_bytes(folder / "plan.json"))
    except ReadError:
        return ""


@lru_cache(maxsize=1024)
def _line_of_plan(content: bytes) -> str:
    """Return a plan in short; "" for one that can't be read. Many runs of a folder have the same."""
    try:
        return Plan.of(parse_json(content, "plan.json", dict), "plan.json").line()
    except (PacelineError, TypeError, ValueError):
        return ""


def _scores(event: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in event.items()
        if name not in _NOT_SCORES and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _newest_events(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last event of each kind near the end of a file, in their order."""
    newest: dict[str, dict[str, Any]] = {}
    for content in ends_of(path):
        newest = _newest_in(content)
        if "step" in newest:
            break
    return newest


def ends_of(path: Path) -> Iterator[bytes]:
    """Yield the end of a file, ever more of it up to 16 MiB: a text that the loop has logged may be long."""
    size = _TAIL_BYTES
    while size <= _MOST_TAIL_BYTES:
        try:
            with open(path, "rb", opener=regular) as file:
                begin = max(os.fstat(file.fileno()).st_size - size, 0)
                file.seek(begin)
                yield file.read(size)
        except OSError:
            return
        if begin == 0:
            return
        size *= 16


def _newest_in(content: bytes) -> dict[str, dict[str, Any]]:
    newest: dict[str, dict[str, Any]] = {}
    for line in reversed(content.splitlines()):
        kind = _KIND.match(line)
        if kind is not None and kind[1].decode() in newest:
            continue  # decoding every line would take ten times as long
        for event in decoded(line):
            newest.setdefault(event["event"], event)
    return dict(reversed(newest.items()))


def _total_steps(path: Path, newest: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the steps of the whole job, by the newest event that says so; else by the file's beginning."""
    for kind in ("own_batches", "start"):
        if kind in newest:
            return int(newest[kind]["total_steps"])
    try:
        with open(path, "rb", opener=regular) as file:
            head = file.read(_TAIL_BYTES)
    except OSError:
        return 0
    first = {event["event"]: event for event in decoded(head)}
    return int(first.get("own_batches", first.get("start", {})).get("total_steps", 0))


def result_failure(folder: Path) -> str | None:
    """Return in a line what ended a run, with rank and step; None: nothing did."""
    return next(iter(failure_lines(folder)), None)


def failure_lines(folder: Path) -> list[str]:
    """Return what ended a run, with rank and step, and if it is an error of ours, how to mend it; [] if nothing did."""
    failure = _read(folder / "result.json").get("failure")
    if not isinstance(failure, dict):
        return []
    try:
        brief = format_failure_briefly(failure, "failed first")
    except (KeyError, TypeError):  # of another version
        return [str(failure.get("message"))]
    fixes = str(failure["message"]).splitlines()[2:] if failure.get("is_paceline") else []
    return [brief, *(fix.strip() for fix in fixes)]


def difference(plans: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings in which plans differ, with the value of each plan."""
    names = dict.fromkeys(name for plan in plans for name in plan)
    values = {name: [plan.get(name) for plan in plans] for name in names}
    return {name: each for name, each in values.items() if any(one != each[0] for one in each)}


def is_run(folder: Path) -> bool:
    """Return whether a folder has what every run has: a plan, and the file that was started."""
    return "mesh" in read_plan(folder) and "script" in _read(folder / "job.json")


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the settings of a run's plan; none where they can't be read."""
    return _read(folder / "plan.json")
