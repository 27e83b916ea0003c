"""What a run's pages show, from its files alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import CHECKPOINTS, list_checkpoints, step_name, step_of
from paceline.nouns.errors import MeshError, PacelineError
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.reading import COUNT, fault_of
from paceline.run import summary
from paceline.run.failures import first_cause, read_failures
from paceline.run.prediction import Prediction
from paceline.run.summary import Run, read_plan, result_failure, size_of
from paceline.run.times import KINDS, RankSplit

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
PREDICTED_KINDS = MEMORY_KINDS[:-1]  # that a prediction has too
_LEDGER = {"collective": str, "axis": str, "calls": COUNT, "bytes": COUNT}
HISTORY_KINDS = (
    "start",
    "resumed",
    "stopped",
    "checkpoint_failed",
    "copy_failed",
    "end",
)  # events that `history` tells of


@dataclass(frozen=True, slots=True)
class Cell:
    """A rank in the mesh's picture.

    Attributes:
        rank: which.
        lag_s: seconds of a step by which its own work takes longer than on the others; None: unknown.
        level: of its colour, from 0 to 4; None: unknown.
    """

    rank: int
    lag_s: float | None
    level: int | None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a job beside its steps.

    Attributes:
        at: seconds since 1970.
        step: done before; None where none is said.
        what: in a word.
        text: in a sentence.
        is_fault: something went wrong.
    """

    at: float
    step: int | None
    what: str
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
        mesh: of the run.
        splits: where the time of its ranks goes.
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
    """Return by how many seconds of a step each rank's own work is longer than the median of all."""
    if len(splits) < 2:
        return {split.rank: 0.0 for split in splits}
    own = sorted(split.own_s for split in splits)
    median = (own[(len(own) - 1) // 2] + own[len(own) // 2]) / 2
    if len(splits) == 2:
        median = own[0]  # of two ranks the faster one
    return {split.rank: split.own_s - median for split in splits}


def _level(lag_s: float, seconds: float) -> int:
    """Return the colour of a lag: its share of a step."""
    share = lag_s / seconds if seconds > 0 else 0.0
    return sum(share > bound for bound in (0.02, 0.05, 0.1, 0.25))


def plan_rows(folder: Path) -> tuple[list[tuple[str, str, str, str]], list[tuple[str, str, str]]]:
    """Return a plan's axes (name, size, what a rank has, what is sent) and settings (name, value, default)."""
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
        kind, text = str(event["event"]), _said(event)
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


def _said(event: Mapping[str, Any]) -> str | None:
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
    """Return the run's checkpoints that there are, the newest first: step, bytes, seconds that writing took."""
    seconds = {event.get("step"): event.get("seconds") for event in events if event["event"] == "checkpoint"}
    found = []
    for path in list_checkpoints(folder / CHECKPOINTS):
        step = step_of(path.name)
        if step is not None:
            found.append({"step": step, "bytes": size_of(path), "seconds": seconds.get(step)})
    return sorted(found, key=lambda each: each["step"], reverse=True)


def failures(folder: Path) -> list[Mapping[str, Any]]:
    """Return how ranks have failed since the last start, the first cause of the others first."""
    found = list(read_failures(folder).values())
    if not found:
        return []
    cause = first_cause(found)
    return [cause, *(each for each in found if each is not cause)]


@dataclass(frozen=True, slots=True)
class EndOfRun:
    """How a run ended that others can go on with, and how to do so.

    Attributes:
        lines: what ended it, and the fix if it has one; empty where it was asked to stop.
        step: of the newest checkpoint; None: it has none.
        command: that goes on from there, under the same plan.
        has_file: the file that was started is on this host. A notebook's cell is not.
    """

    lines: Sequence[str]
    step: int | None
    command: str
    has_file: bool


def end_of(run: Run) -> EndOfRun | None:
    """Return how a run ended that failed or was stopped; None: it did not."""
    if run.status not in ("failed", "stopped"):
        return None
    lines: list[str] = []
    if run.status == "failed":
        lines = summary.failure_lines(run.folder) or ["The ranks had to be killed: they did not end by themselves."]
    folder = run.folder.absolute()
    plan = ["--plan", str(folder / "plan.json")] if run.plan else []
    script = run.script if any(run.script[:1]) else ("FILE",)
    words = [*plan, "--runs", str(folder.parent), "--job", run.name, "--resume", *script]
    newest = list_checkpoints(folder / CHECKPOINTS)[:1]
    step = step_of(step_name(newest[0])) if newest else None
    return EndOfRun(lines, step, shlex.join(["paceline", "run", *words]), os.path.isfile(script[0]))


def ledger(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what rank 0 gave to collectives, as the newest event `end` has it."""
    for event in events:
        if event["event"] == "end" and "ledger" in event:
            return [row for row in event["ledger"] if fault_of(row, _LEDGER) is None]
    return []


def layout(predictions: Sequence[Prediction]) -> Sequence[Mapping[str, Any]]:
    """Return how each weight is split under `tensor` and why, as the first prediction that knows says."""
    return next((each.layout for each in predictions if each.layout), ())


def predicted_traffic(predictions: Sequence[Prediction]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return what rank 0 is predicted to send in a step, by collective and axis."""
    rows = next((each.traffic for each in predictions if each.rank == 0), ())
    return {(row["collective"], row["axis"]): row for row in rows}


def bars(splits: Sequence[RankSplit]) -> dict[str, Any]:
    """Return milliseconds of a step by kind of work and rank, for stacked bars."""
    kinds = [kind for kind in KINDS if any(split.by_kind[kind] > 0 for split in splits)]
    return {
        "ranks": [split.rank for split in splits],
        "kinds": [{"name": kind, "ms": [round(1000 * split.by_kind[kind], 4) for split in splits]} for kind in kinds],
    }


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
