"""Read the state of the runs in a folder, only from their files: no process or host is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.manifest import CHECKPOINTS, list_checkpoints, step_name, step_of
from paceline.nouns.errors import PacelineError, ReadError, UsageError, did_you_mean
from paceline.nouns.events import decoded, kind_of, newest_first, numbers_in
from paceline.nouns.plan import Plan
from paceline.nouns.reading import lines_backwards, parse_json, read_bytes, read_json, regular
from paceline.nouns.step_record import elapsed_s, samples_per_s
from paceline.run.failures import format_failure_briefly

if TYPE_CHECKING:
    from paceline.run.read.event_columns import EventIndex

RUNNING, SILENT = "running", "silent"  # the status of a run whose last start has no result
QUIET_S = 120.0  # without an event for longer it is silent: killed, or in a long step, maybe on another host
_TAIL_BYTES = 2**16
_MOST_TAIL_BYTES = 2**24
_MOST_RANKS = 2**20  # more than any job has
_WINDOW = 50  # steps over which the speed is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as `paceline runs` lists it.

    Args:
        folder: the run directory.
        status: the status in `result.json`, such as done, failed or stopped; without a result of the last start:
            "running", or "silent" after two minutes without an event.
        started: the time of the last start, by the clock of its host, in seconds since 1970.
        quiet_s: the seconds since the newest event.
        step: the last step that is written down.
        total_steps: the number of steps of the whole job; 0 if unknown.
        loss: the loss of the last step.
        evaluation: the values of the newest evaluation, by name; empty where none is near the end of the events, or in
            the result.
        ranks: the number of ranks of the last start.
        plan: the line of the plan, see `Plan.line`.
        script: the path of the workload file, and its arguments.
    """

    folder: Path
    status: str
    started: float
    quiet_s: float = 3600.0
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

    @property
    def is_open(self) -> bool:
        """Return whether its last start has no result."""
        return self.status in (RUNNING, SILENT)

    def to_json(self) -> dict[str, Any]:
        """Return the run for programs."""
        facts = asdict(self)
        del facts["folder"], facts["quiet_s"]
        return {"job": self.name, "run_dir": str(self.folder), **facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The details of a run that only its whole list of events tells.

    Args:
        starts: the number of times that the job was started or resumed.
        losses: the loss of each step, in their order; of a step that was taken again, only the last.
        evaluations: the step and the values of each evaluation, in their order.
        logged: the newest number of each name that the loop has logged, with its step.
        seconds_per_step: the median time of the last attempt's steps, in seconds.
        samples_per_s: the samples per second over the same steps; None where the loop makes its own batches.
        memory_bytes: the largest resident memory of rank 0.
        checkpoints: the steps of the checkpoints.
        checkpoint_bytes: the bytes of all checkpoints.
        failure: the failure that ended the run, in a line with rank and step; None where there was none.
        unreadable: the number of lines of the file that are no events.
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

    @property
    def finite_losses(self) -> list[float]:
        """Return the losses that are numbers."""
        return [loss for loss in self.losses if math.isfinite(loss)]

    def to_json(self) -> dict[str, Any]:
        """Return the details for programs."""
        return {
            "starts": self.starts,
            "loss_first": self.losses[0] if self.losses else None,
            "loss_lowest": min(self.finite_losses, default=None),
            "evaluations": [{"step": step, **ratios} for step, ratios in self.evaluations],
            "logged": {name: {"step": step, "value": value} for name, (step, value) in self.logged.items()},
            "seconds_per_step": self.seconds_per_step,
            "samples_per_s": self.samples_per_s,
            "memory_bytes": self.memory_bytes,
            "checkpoints": list(self.checkpoints),
            "checkpoint_bytes": self.checkpoint_bytes,
            "failure": self.failure,
            "unreadable_events": self.unreadable,
        }


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a job.

    Attributes:
        samples_per_s: the mean over its newest steps; None before the second, and where the loop makes its own batches.
        left_s: the seconds until its last step, at that speed; None where nobody knows.
    """

    samples_per_s: float | None
    left_s: float | None


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
    """Return the state of a run without reading all of its events; fields that can't be read have their defaults."""
    job = _read(folder / "job.json")
    result = _read(folder / "result.json")
    started = _changed(folder / "job.json")
    newest = _newest_of_each_kind(folder / "events.jsonl")
    is_newer = _changed(folder / "result.json") >= started
    # A copy of a run has other times; the event `end` comes after those of its start.
    has_ended = "status" in result and (is_newer or list(newest)[-1:] == ["end"])
    status = str(result["status"]) if has_ended else RUNNING
    if not has_ended and time.time_ns() / 1e9 - max(_changed(folder / "events.jsonl"), started) > QUIET_S:
        status = SILENT
    evaluation = newest.get("evaluation") or (has_ended and result.get("evaluation")) or {}
    step = newest.get("step", {})
    arguments = job.get("arguments")
    words = [str(job.get("script", "")), *map(str, arguments if isinstance(arguments, list) else ())]
    return Run(
        folder=folder,
        status=status,
        started=started,
        quiet_s=seconds_since_event(folder),
        step=int(step.get("step", 0)),
        total_steps=_total_steps(folder / "events.jsonl", newest),
        loss=step.get("loss"),
        evaluation=numbers_in(evaluation) if isinstance(evaluation, dict) else {},
        ranks=job["ranks"] if isinstance(job.get("ranks"), int) and 0 <= job["ranks"] <= _MOST_RANKS else 0,
        plan=_plan(folder),
        script=tuple(words),
    )


def seconds_since_event(folder: Path) -> float:
    """Return the seconds since a run's newest event; 0 where it has none."""
    changed = _changed(folder / "events.jsonl")
    return max(0.0, time.time_ns() / 1e9 - changed) if changed else 0.0


def read_details(folder: Path, index: EventIndex | None = None) -> Details:
    """Return the details of a run from all of its events.

    Args:
        folder: the run directory.
        index: the events of the run, as far as they have been read; None: read all.
    """
    import numpy as np  # here, as the next: `paceline runs` needs neither

    from paceline.run.read.event_columns import EventIndex

    index = index or EventIndex(folder / "events.jsonl").read_on()
    with index.lock:
        columns = {name: np.array(index.columns[name]) for name in ("step", "loss", "seconds", "samples")}
        memory_bytes = max(index.columns["memory_bytes"], default=0)
    # Of a step that was taken again the last time counts.
    _, last = np.unique(columns["step"][::-1], return_index=True)
    seconds, samples = (columns[name][index.attempt :] for name in ("seconds", "samples"))
    seconds, samples = seconds[np.isfinite(seconds)], samples[np.isfinite(seconds)]
    if len(seconds) > 1:
        seconds, samples = seconds[1:], samples[1:]
    evaluations = {event.get("step") or 0: numbers_in(event) for event in reversed(index.events("evaluation"))}
    return Details(
        starts=index.count("start"),
        losses=tuple(columns["loss"][::-1][last].tolist()),
        evaluations=tuple(sorted(evaluations.items())),
        logged={name: newest for (kind, name), newest in index.newest.items() if kind == "logged"},
        seconds_per_step=float(np.median(seconds)) if len(seconds) else None,
        samples_per_s=float(samples.sum() / seconds.sum()) if samples.sum() and seconds.sum() else None,
        memory_bytes=int(memory_bytes),
        checkpoints=tuple(sorted(saved_checkpoints(folder))),
        checkpoint_bytes=size_of(folder / CHECKPOINTS),
        failure=result_failure(folder),
        unreadable=index.unreadable,
    )


def speed_of(folder: Path, run: Run) -> Speed:
    """Return the speed of the job in a run directory over its newest steps."""
    records: list[dict[str, Any]] = []
    for event in newest_first(folder / "events.jsonl", ("start", "resumed", "step"), _MOST_TAIL_BYTES):
        # Of this process: between two there is time without a step, and steps are taken again.
        if event["event"] != "step" or len(records) == _WINDOW:
            break
        records.append(event)
    records.reverse()
    seconds = elapsed_s(records)
    if seconds <= 0:
        return Speed(None, None)
    a_step_s = seconds / (len(records) - 1)
    left_s = a_step_s * (run.total_steps - run.step) if run.total_steps >= run.step else None
    return Speed(samples_per_s(records), left_s)


def saved_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a run directory by their steps, the newest first."""
    saved = {step_of(step_name(path)): path for path in list_checkpoints(folder / CHECKPOINTS)}
    return {step: path for step, path in saved.items() if step is not None}


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


def _newest_of_each_kind(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last event of each kind near the end of a file, in their order; a logged text may be long."""
    newest: dict[str, dict[str, Any]] = {}
    num_bytes = 0
    for line in lines_backwards(path, _MOST_TAIL_BYTES):
        if num_bytes > _TAIL_BYTES and "step" in newest:
            break
        num_bytes += len(line) + 1
        if kind_of(line) not in newest:  # decoding every line would take ten times as long
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
    """Return the failure that ended a run in a line, with rank and step; None: there was none."""
    return next(iter(failure_lines(folder)), None)


def failure_lines(folder: Path) -> list[str]:
    """Return the failure of a run, with rank and step, and the advice of an error of ours; [] if there was none."""
    failure = _read(folder / "result.json").get("failure")
    if not isinstance(failure, dict):
        return []
    try:
        brief = format_failure_briefly(failure, "failed first")
    except (KeyError, TypeError):  # a result of another version
        return [str(failure.get("message"))]
    fixes = str(failure["message"]).splitlines()[2:] if failure.get("is_paceline") else []
    return [brief, *(fix.strip() for fix in fixes)]


def difference(plans: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings in which plans differ, with the value of each plan."""
    names = dict.fromkeys(name for plan in plans for name in plan)
    differing = {}
    for name in names:
        values = [plan.get(name) for plan in plans]
        if any(value != values[0] for value in values):
            differing[name] = values
    return differing


def is_run(folder: Path) -> bool:
    """Return whether a folder has the files of every run: a plan, and job.json with the script."""
    return "mesh" in read_plan(folder) and "script" in _read(folder / "job.json")


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the settings of a run's plan; none where they can't be read."""
    return _read(folder / "plan.json")
