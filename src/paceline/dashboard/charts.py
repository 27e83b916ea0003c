"""The data of a run's charts: curves of its events, bars of a step's time, and activities of ranks in a few steps.

A curve has as many points as a page shows. Before all events have been read it has some of the others too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.nouns.reading import regular
from paceline.run.read.event_columns import STEP_FIELDS, EventIndex, Series, decode_event
from paceline.run.read.times import KINDS, RankSplit, files_of, read_steps
from paceline.run.timeline import make_trace


@dataclass(frozen=True, slots=True)
class CurveOfSteps:
    """A curve of a field of the event `step`.

    Args:
        field: the field of the event, or a rate of it.
        name: the name that is shown.
        unit: the divisor of the values for the unit that is shown.
        may_lack: True where a step may have no value; NaN then stands for none.
    """

    field: str
    name: str
    unit: int = 1
    may_lack: bool = False


CURVES = (
    CurveOfSteps("loss", "loss"),
    CurveOfSteps("seconds", "seconds of a step"),
    CurveOfSteps("gradient_norm", "gradient norm", may_lack=True),
    CurveOfSteps("memory_bytes", "memory of rank 0, MiB", unit=2**20),
    CurveOfSteps("samples_per_s", "samples per second", may_lack=True),
    CurveOfSteps("weight_per_s", "weight per second", may_lack=True),
    CurveOfSteps("sent_bytes", "MiB sent by rank 0", unit=2**20),
    CurveOfSteps("loss_scale", "loss scale", may_lack=True),
)
_OWN_NAMES = frozenset(spec.name for spec in CURVES)
MOST_BARS = 4000  # more are slow to draw
MOST_STEPS = 50
_PREVIEW = 400  # lines that stand for those that were not read yet
_LONGEST_STEP = 2**14  # bytes of a step's line, as far as the preview reads it

Column = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """A curve of at most so many points; each stands for the values of some steps.

    Attributes:
        step: the last step of each point.
        mean, low, high: the mean and the bounds of each point's finite values; NaN where none is finite.
        not_finite: the number of all values that are NaN or infinite.
    """

    step: Column
    mean: Column
    low: Column
    high: Column
    not_finite: int


def curves_of(
    index: EventIndex, points: int, first: float | None = None, last: float | None = None
) -> dict[str, Curve]:
    """Return the curves of the steps, of evaluations and of the loop's own numbers, by the names that are shown.

    Args:
        index: the run's events, as far as they have been read.
        points: the largest number of points of each curve.
        first, last: the first and the last step that are wanted; None: from the first, up to the last.
    """
    with index.lock:
        columns = {name: np.array(column) for name, column in index.columns.items()}
        series = {_shown_name(*name): Series(of.steps[:], of.values[:]) for name, of in index.series.items()}
        begin, end = index.follower.offset, index.follower.size
    if begin < end:
        preview = np.array(list(_preview(index.path, begin, end))).reshape(-1, len(STEP_FIELDS))
        columns = {name: np.append(columns[name], preview[:, at]) for at, name in enumerate(STEP_FIELDS)}
    is_counted = counted(columns["step"], first, last)
    columns = {name: column[is_counted] for name, column in columns.items()}
    _add_rates(columns)
    found = {}
    for spec in CURVES:
        values = columns[spec.field] / spec.unit
        if (spec.field == "loss" and len(values)) or np.isfinite(values).any():
            curve = decimated(columns["step"], values, points)
            if spec.may_lack:  # null is read as NaN there: only infinities are known to be values
                curve = curve._replace(not_finite=int(np.isinf(values).sum()))
            found[spec.name] = curve
    for name, of_name in sorted(series.items()):
        steps = np.array(of_name.steps)
        is_counted = counted(steps, first, last)
        found[name] = decimated(steps[is_counted], np.array(of_name.values)[is_counted], points)
    return found


def counted(steps: Column, first: float | None = None, last: float | None = None) -> npt.NDArray[np.bool_]:
    """Return True for the steps that count: those that are wanted; of a step that was taken again only the last."""
    is_counted = np.ones(len(steps), dtype=bool)
    if len(steps) > 1:
        later = np.minimum.accumulate(steps[::-1])[::-1]
        is_counted[:-1] = steps[:-1] < later[1:]
    if first is not None:
        is_counted &= steps >= first
    if last is not None:
        is_counted &= steps <= last
    return is_counted


def decimated(steps: Column, values: Column, points: int) -> Curve:
    """Return a curve of at most so many points."""
    is_finite = np.isfinite(values)
    not_finite = len(values) - int(is_finite.sum())
    if len(steps) <= points:
        shown = np.where(is_finite, values, np.nan)
        return Curve(steps, shown, shown, shown, not_finite)
    # At even distances of steps: the preview of the end has few steps.
    starts = np.unique(np.searchsorted(steps, np.linspace(steps[0], steps[-1], points)))
    counts = np.add.reduceat(is_finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(is_finite, values, 0.0), starts) / counts
    low = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts)
    low[counts == 0] = high[counts == 0] = np.nan
    ends = np.append(starts[1:], len(steps)) - 1
    return Curve(steps[ends], mean, low, high, not_finite)


def _shown_name(kind: str, name: str) -> str:
    """Return the name under which a number is shown: one of the loop's own never under that of the job's."""
    if kind == "evaluation":
        return f"evaluation {name}"
    return f"logged {name}" if name in _OWN_NAMES or name.startswith("evaluation ") else name


def _add_rates(columns: dict[str, Column]) -> None:
    samples, weight = columns["samples"], columns["weight"]
    with np.errstate(divide="ignore", invalid="ignore"):
        columns["samples_per_s"] = samples / columns["seconds"]
        columns["weight_per_s"] = weight / columns["seconds"]
    columns["samples_per_s"][samples == 0] = np.nan  # batches of the loop's own
    columns["weight_per_s"][samples == weight] = np.nan  # the same curve


def _preview(path: Path, begin: int, end: int) -> Iterator[Sequence[float]]:
    """Yield the values of some steps from a part of a file, at even distances."""
    try:
        with open(path, "rb", opener=regular) as file:
            for offset in np.linspace(begin, end, _PREVIEW, endpoint=False).astype(np.int64):
                file.seek(int(offset))
                if not file.readline(_LONGEST_STEP).endswith(b"\n"):  # the rest of a line
                    continue
                values, _ = decode_event(file.readline(_LONGEST_STEP))
                if values:
                    yield values
    except OSError:
        return


def bars(splits: Sequence[RankSplit]) -> dict[str, Any]:
    """Return milliseconds of a step by kind of work and rank, for stacked bars."""
    kinds = [kind for kind in KINDS if any(split.by_kind[kind] > 0 for split in splits)]
    return {
        "ranks": [split.rank for split in splits],
        "kinds": [{"name": kind, "ms": _ms_of(kind, splits)} for kind in kinds],
    }


def _ms_of(kind: str, splits: Sequence[RankSplit]) -> list[float]:
    """Return the milliseconds of a step in one kind of work, for each rank."""
    return [round(1000 * split.by_kind[kind], 4) for split in splits]


def detailed_steps(run_dir: Path) -> list[int]:
    """Return the steps whose single operations were kept, by the end of the first rank's file."""
    for path in files_of(run_dir).values():
        return sorted({step.step for step in read_steps(path, tail_only=True) if step.step is not None and step.spans})
    return []


def spans(run_dir: Path, first: int, last: int) -> dict[str, Any]:
    """Return the bars of some steps, by kind of work.

    Args:
        run_dir: the run directory.
        first, last: the first and the last step.

    Returns:
        The `rows`, the names of the tracks; the `kinds`, with each kind's rows of bars, begins and lengths in
        milliseconds, and names; `is_cut`, whether there are more than MOST_BARS.
    """
    trace = make_trace(run_dir, first, last, tail_only=True)
    tracks = {}
    for event in trace.events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
    bars = sorted((event for event in trace.events if event["ph"] == "X"), key=lambda event: event["ts"])
    steps = [event for event in bars if event["cat"] == "step"]
    begin = min((event["ts"] for event in steps), default=0.0)
    kinds: dict[str, dict[str, list[Any]]] = defaultdict(lambda: {"row": [], "begin": [], "length": [], "name": []})
    rows = set()
    shown = [event for event in bars if event["cat"] not in ("step", "job")]
    for event in [*steps, *shown[:MOST_BARS]]:
        track = tracks.get((event["pid"], event["tid"]), "")
        rows.add((event["pid"], event["tid"], f"rank {event['pid']} {track}"))
        of_kind = kinds[event["cat"]]
        of_kind["row"].append(f"rank {event['pid']} {track}")
        of_kind["begin"].append(round((event["ts"] - begin) / 1000, 4))
        of_kind["length"].append(round(event["dur"] / 1000, 4))
        of_kind["name"].append(event["name"])
    return {
        "rows": [name for _, _, name in sorted(rows)],
        "kinds": dict(sorted(kinds.items(), key=lambda item: item[0] != "step")),
        "steps": [first, last],
        "is_cut": len(shown) > MOST_BARS,
    }
