"""Collect the facts that a run's pages show, only from its files."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.nouns.errors import MeshError, PacelineError
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.reading import COUNT, fault_of
from paceline.run.failures import first_cause, read_failures
from paceline.run.prediction import Prediction
from paceline.run.read.runs import Run, failure_lines, read_plan, result_failure, saved_checkpoints, size_of
from paceline.run.read.times import RankSplit

MOST_CELLS = 4096  # ranks of the mesh's picture
_AXIS_MEANING = {
    "pipeline": ("a stage of the model", "activations from stage to stage"),
    "replicate": ("the whole model, a part of the batch", "gradients, once per step"),
    "shard": ("rows of every parameter, a part of the batch", "parameters before they are used, gradients"),
    "expert": (
        "some experts of each layer, a part of the batch",
        "rows to their experts and back; gradients, once per step",
    ),
    "context": (
        "the whole model, some positions of every sequence",
        "keys and values or heads, in each attention; gradients, once per step",
    ),
    "tensor": ("pieces of layers", "activations, several times per block"),
}
MEMORY_KINDS = ("parameters", "buffers", "gradients", "optimizer state", "rest")
PREDICTED_KINDS = MEMORY_KINDS[:-1]  # the kinds that a prediction has too
_LEDGER = {"collective": str, "axis": str, "calls": COUNT, "bytes": COUNT}
# The kinds of events in `history`.
HISTORY_KINDS = ("start", "resumed", "stopped", "checkpoint_failed", "copy_failed", "end")


@dataclass(frozen=True, slots=True)
class Cell:
    """A rank in the mesh's picture.

    Attributes:
        rank: the number of the rank.
        lag_s: the seconds of a step by which its own work takes longer than on the others; None: unknown.
        level: the level of its colour, from 0 to 4; None: unknown.
    """

    rank: int
    lag_s: float | None
    level: int | None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event of a job beside its steps.

    Attributes:
        at: the time in seconds since 1970.
        step: the step that was done before; None where the event names none.
        kind: the kind of the event, in a word.
        text: the description, in a sentence.
        is_fault: True where something went wrong.
    """

    at: float
    step: int | None
    kind: str
    text: str
    is_fault: bool


def mesh_of(folder: Path) -> Mesh | None:
    """Return the mesh of a run's plan; None where it can't be read."""
    try:
        return Mesh.parse(str(read_plan(folder).get("mesh", "")))
    except MeshError:
        return None


def rows(mesh: Mesh, splits: Sequence[RankSplit]) -> list[tuple[str, list[Cell]]]:
    """Return the ranks of a mesh, at most MOST_CELLS: a row for each place on all axes but the innermost.

    Args:
        mesh: the mesh of the run.
        splits: the times of its ranks by kind of work.
    """
    used = mesh.used(AXES)
    lags = lags_of(splits)
    seconds = max((split.seconds for split in splits), default=0.0)
    found: dict[str, list[Cell]] = {}
    for rank in range(min(mesh.world_size, MOST_CELLS)):
        at = mesh.coordinate(rank)
        place = ", ".join(f"{axis} {at[axis]}" for axis in used[:-1])
        lag = lags.get(rank)
        found.setdefault(place, []).append(Cell(rank, lag, None if lag is None else _level(lag, seconds)))
    return list(found.items())


def lags_of(splits: Sequence[RankSplit]) -> dict[int, float]:
    """Return the seconds of a step by which each rank's own work is longer than the median of all."""
    if len(splits) < 2:
        return {split.rank: 0.0 for split in splits}
    own_seconds = [split.own_s for split in splits]
    median = min(own_seconds) if len(splits) == 2 else statistics.median(own_seconds)  # of two ranks the faster one's
    return {split.rank: split.own_s - median for split in splits}


def _level(lag_s: float, seconds: float) -> int:
    """Return the colour of a lag: its share of a step."""
    share = lag_s / seconds if seconds > 0 else 0.0
    return sum(share > bound for bound in (0.02, 0.05, 0.1, 0.25))


def plan_rows(folder: Path) -> tuple[list[tuple[str, str, str, str]], list[tuple[str, str, str]]]:
    """Return a plan's axes (name, size, a rank's part, the traffic) and settings (name, value, default)."""
    values = read_plan(folder)
    mesh = mesh_of(folder)
    axes = []
    for axis in mesh.used(AXES) if mesh is not None else ():
        axes.append((axis, str(mesh.size(axis)) if mesh else "", *_AXIS_MEANING[axis]))
    try:
        Plan.of(values, "plan.json")
        defaults = Plan()
    except (PacelineError, TypeError, ValueError):
        return axes, [(str(name), str(value), "") for name, value in values.items()]
    settings = []
    for name, value in values.items():
        if name not in ("mesh", "version"):
            settings.append((name, str(value), str(getattr(defaults, name))))
    return axes, sorted(settings, key=lambda row: (row[1] == row[2], row[0]))


def history(events: Sequence[Mapping[str, Any]], folder: Path, run: Run) -> list[HistoryEntry]:
    """Return the starts, failures and recoveries of a run, the newest first."""
    found = []
    before = None
    for event in sorted(events, key=lambda event: _float(event.get("at"))):
        kind, text = str(event["event"]), _describe(event)
        is_fault = kind.endswith("_failed")
        if kind == "start" and before not in (None, "end"):
            text = f"{text}; the process before it wrote no end"  # it failed, was killed, or was replaced
            is_fault = True
        before = kind
        if text is not None:
            found.append(HistoryEntry(_float(event.get("at")), event.get("step"), kind, text, is_fault))
    failure = result_failure(folder)
    if failure is not None:
        try:
            at = (folder / "result.json").stat().st_mtime
        except OSError:
            at = 0.0
        found.append(HistoryEntry(at, run.step, run.status, failure, True))
    return sorted(found, key=lambda entry: entry.at, reverse=True)


def _describe(event: Mapping[str, Any]) -> str | None:
    kind = event["event"]
    if kind == "start":
        ranks = f"{event.get('world_size', '?')} ranks"
        if event.get("takes_over"):
            return f"takes the place of a lost worker 0, {ranks}"
        return f"started again, restart {event['restart']}, {ranks}" if event.get("restart") else f"started, {ranks}"
    if kind == "resumed":
        return f"went on from {event.get('path')}"
    if kind == "stopped":
        asked = event.get("asked") or []
        return f"stopped: rank {', '.join(map(str, asked))} was asked to" if asked else "stopped"
    if kind.endswith("_failed"):
        return f"{event.get('path')}: {event.get('found')}"
    return "ended" if kind == "end" else None


def checkpoints(folder: Path, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the run's present checkpoints, the newest first: step, bytes, seconds of writing."""
    seconds = {event.get("step"): event.get("seconds") for event in events if event["event"] == "checkpoint"}
    saved = saved_checkpoints(folder)
    return [{"step": step, "bytes": size_of(path), "seconds": seconds.get(step)} for step, path in saved.items()]


def failures(folder: Path) -> list[Mapping[str, Any]]:
    """Return the failures of ranks since the last start, the one that caused the others first."""
    found = list(read_failures(folder).values())
    if not found:
        return []
    cause = first_cause(found)
    return [cause, *(failure for failure in found if failure is not cause)]


@dataclass(frozen=True, slots=True)
class EndOfRun:
    """The end of a run from which a job can go on, and the command for that.

    Attributes:
        lines: the failure that ended it, and the fix if it has one; empty where it was asked to stop.
        step: the step of the newest checkpoint; None: it has none.
        command: the command that goes on from there, under the same plan.
        has_file: True where the file that was started is on this host. A notebook's cell is not.
    """

    lines: Sequence[str]
    step: int | None
    command: str
    has_file: bool


def end_of(run: Run) -> EndOfRun | None:
    """Return the end of a run that failed or was stopped; None: it did not."""
    if run.status not in ("failed", "stopped"):
        return None
    lines: list[str] = []
    if run.status == "failed":
        lines = failure_lines(run.folder) or ["The ranks had to be killed: they did not end by themselves."]
    folder = run.folder.absolute()
    plan = ["--plan", str(folder / "plan.json")] if run.plan else []
    script = run.script if any(run.script[:1]) else ("FILE",)
    words = [*plan, "--runs", str(folder.parent), "--job", run.name, "--resume", *script]
    step = next(iter(saved_checkpoints(folder)), None)
    return EndOfRun(lines, step, shlex.join(["paceline", "run", *words]), os.path.isfile(script[0]))


def ledger(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the traffic that rank 0 gave to collectives, as the newest event `end` has it."""
    for event in events:
        if event["event"] == "end" and "ledger" in event:
            return [row for row in event["ledger"] if fault_of(row, _LEDGER) is None]
    return []


def layout(predictions: Sequence[Prediction]) -> Sequence[Mapping[str, Any]]:
    """Return the split of each weight under `tensor`, with the reason, by the first prediction that has it."""
    return next((prediction.layout for prediction in predictions if prediction.layout), ())


def predicted_traffic(predictions: Sequence[Prediction]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the predicted traffic of rank 0 in a step, by collective and axis."""
    rows = next((prediction.traffic for prediction in predictions if prediction.rank == 0), ())
    return {(row["collective"], row["axis"]): row for row in rows}


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
