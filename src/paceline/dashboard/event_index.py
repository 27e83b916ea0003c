"""Read a run's `events.jsonl` into columns, piece by piece, so that a file of a million events can be shown at once.

A page is answered from what has been read so far; each request reads on for a moment.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.nouns.events import decoded
from paceline.nouns.reading import LONGEST_LINE, regular
from paceline.run.event_reader import EventReader, StepEvent

CURVES = {  # of the event `step`: its field, and the name that is shown
    "loss": "loss",
    "seconds": "seconds of a step",
    "gradient_norm": "gradient norm",
    "memory_bytes": "memory of rank 0, MiB",
    "samples_per_s": "samples per second",
    "weight_per_s": "weight per second",
    "sent_bytes": "MiB sent by rank 0",
    "loss_scale": "loss scale",
}
_FIELDS = (
    *("step", "at", "loss", "seconds", "gradient_norm"),
    *("memory_bytes", "samples", "weight", "sent_bytes", "loss_scale"),
)
_IN_MIB = ("memory_bytes", "sent_bytes")
_MAY_LACK = ("gradient_norm", "loss_scale", "samples_per_s", "weight_per_s")  # in a step: they say nothing then
_CHUNK = LONGEST_LINE
_HEAD = 256  # bytes by which a file is known: its first event has the time of the start
_PREVIEW = 400  # lines that stand for those that were not read yet
_LONGEST_STEP = 2**14  # bytes of a step's line, as far as the preview reads it
_MOST_NAMES = 200  # numbers of the loop's own that have a curve
_OTHER_KIND = 255  # stands for all kinds after so many
_NOT_NUMBERS = ("event", "step", "epoch", "at")

Column = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """A curve of at most so many points; each stands for the values of some steps.

    Attributes:
        step: of each point, the last of its steps.
        mean, low, high: of its values that are finite; NaN where none is.
        not_finite: how many values of all are NaN or infinite.
    """

    step: Column
    mean: Column
    low: Column
    high: Column
    not_finite: int


@dataclass(slots=True)
class _Named:
    """The numbers of one name that evaluations or the loop have written."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class EventIndex:
    """The events of one run.

    Args:
        path: of the file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.inode = 0
        self.head = b""  # how the file begins
        self.size = 0  # of the file, when it was last looked at
        self.offset = 0  # up to here it has been read
        self.columns = {name: array("d") for name in _FIELDS}
        self.named: dict[str, _Named] = {}
        self.reader = EventReader()
        self.is_in_long_line = False  # which is no event
        self.attempt = 0  # how many steps had been read when the newest process of rank 0 began
        self.is_cut = False  # the loop has logged more names than have a curve
        self.kinds: dict[str, int] = {}
        self.line_kinds = array("B")
        self.line_offsets = array("Q")
        self._curves: tuple[object, dict[str, Curve]] | None = None  # the newest that were asked for

    @property
    def is_complete(self) -> bool:
        """True if all that was in the file at the last look has been read."""
        return self.offset >= self.size

    @property
    def share(self) -> float:
        """Return the share of the file that has been read, from 0 to 1."""
        return self.offset / self.size if self.size else 1.0

    @property
    def unreadable(self) -> int:
        """Return how many lines of those that have been read are no events."""
        return self.reader.unreadable

    def read_on(self, seconds: float) -> None:
        """Read on for about so long, or to the end of the last whole line."""
        with self.lock:
            until = time.perf_counter() + seconds
            try:
                with open(self.path, "rb", opener=regular) as file:
                    self._look(file.fileno())
                    file.seek(self.offset)
                    while time.perf_counter() < until and self._read_chunk(file.read(_CHUNK)):
                        file.seek(self.offset)
            except OSError:
                self._clear()

    def _look(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        head = os.pread(descriptor, _HEAD, 0)
        # Another run has the name now, or another file was copied over this one.
        if found.st_ino != self.inode or found.st_size < self.offset or not head.startswith(self.head):
            self._clear()
        self.head = head
        self.inode = found.st_ino
        self.size = found.st_size

    def _read_chunk(self, content: bytes) -> bool:
        """Take the whole lines of a piece; False: there is none."""
        end = content.rfind(b"\n") + 1
        if not end:
            if len(content) < _CHUNK:
                self.size = self.offset  # the last line is being written
                return False
            # A line that is longer than a piece is none of ours.
            self.reader.unreadable += not self.is_in_long_line
            self.is_in_long_line = True
            self.offset += len(content)
            return True
        at = self.offset
        for line in content[:end].splitlines(keepends=True):
            if not self.is_in_long_line:
                self._take(line, at)
            self.is_in_long_line = self.is_in_long_line and not line.endswith(b"\n")
            at += len(line)
        self.offset += end
        return True

    def _take(self, line: bytes, at: int) -> None:
        event = self.reader.read(line)
        if isinstance(event, StepEvent):
            self._note("step", at)
            for name in _FIELDS:
                value = getattr(event, name)
                self.columns[name].append(float("nan") if value is None else value)
        elif event is not None:
            self._take_other(event, at)

    def _take_other(self, event: Mapping[str, Any], at: int) -> None:
        kind = str(event["event"])
        self._note(kind, at)
        if kind == "start":
            self.attempt = len(self.columns["step"])
        elif kind in ("evaluation", "logged") and isinstance(event.get("step"), int):
            for name, value in event.items():
                if name in _NOT_NUMBERS or isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                shown = f"evaluation {name}" if kind == "evaluation" else _name_of_logged(name.removeprefix("logged_"))
                if shown not in self.named and len(self.named) == _MOST_NAMES:
                    self.is_cut = True
                else:
                    of_name = self.named.setdefault(shown, _Named())
                    of_name.steps.append(_number(event.get("step")))
                    of_name.values.append(_number(value))

    def _note(self, kind: str, at: int) -> None:
        if len(self.kinds) < _OTHER_KIND:
            self.kinds.setdefault(kind, len(self.kinds))
        self.line_kinds.append(self.kinds.get(kind, _OTHER_KIND))
        self.line_offsets.append(at)

    def curves(self, points: int, first: float | None = None, last: float | None = None) -> dict[str, Curve]:
        """Return the curves of the steps, of evaluations and of the loop's own numbers, by the names that are shown.

        Args:
            points: at most so many of each.
            first, last: the steps that are wanted; None: from the first, up to the last.
        """
        key = (self.inode, self.offset, self.size, points, first, last)
        if self._curves is not None and self._curves[0] == key:
            return self._curves[1]
        with self.lock:
            columns = {name: np.array(column) for name, column in self.columns.items()}
            named = {name: (np.array(of.steps), np.array(of.values)) for name, of in self.named.items()}
            preview = [] if self.is_complete else list(_preview(self.path, self.offset, self.size))
        if preview:
            for name in _FIELDS:
                more = np.array([_number(event.get(name)) for event in preview])
                columns[name] = np.concatenate([columns[name], more])
        kept = counted(columns["step"], first, last)
        if not kept.all():
            columns = {name: column[kept] for name, column in columns.items()}
        _add_rates(columns)
        found = {}
        for name, shown in CURVES.items():
            values = columns[name] / 2**20 if name in _IN_MIB else columns[name]
            if (name == "loss" and len(values)) or np.isfinite(values).any():
                curve = decimated(columns["step"], values, points)
                # null is read as NaN there: only infinities are known to be values.
                found[shown] = curve._replace(not_finite=int(np.isinf(values).sum())) if name in _MAY_LACK else curve
        for name, (steps, values) in sorted(named.items()):
            kept = counted(steps, first, last)
            found[name] = decimated(steps[kept], values[kept], points)
        self._curves = (key, found)
        return found

    def pace(self) -> tuple[float, float] | None:
        """Return the median seconds of the last attempt's steps, without the first, and their samples per second.

        `paceline runs` has the same numbers. None: there is no such step; 0 samples where the loop makes its batches.
        """
        with self.lock:
            seconds, samples = (np.array(self.columns[name][self.attempt :]) for name in ("seconds", "samples"))
        is_known = np.isfinite(seconds)
        seconds, samples = seconds[is_known], samples[is_known]
        if len(seconds) > 1:
            seconds, samples = seconds[1:], samples[1:]
        if not seconds.sum() > 0:
            return None
        return float(np.median(seconds)), float(np.nansum(samples) / seconds.sum())

    def count(self, kind: str | None) -> int:
        """Return the number of events of a kind; None: of all but `step`."""
        return len(self._lines_of(kind))

    def events(self, kind: str | None, skip: int, count: int) -> list[dict[str, Any]]:
        """Return events, the newest first.

        Args:
            kind: of events; None: all but `step`.
            skip: so many of the newest are left out.
            count: at most so many.
        """
        lines = self._lines_of(kind)
        chosen = lines[max(len(lines) - skip - count, 0) : len(lines) - skip][::-1]
        found = []
        try:
            with open(self.path, "rb", opener=regular) as file:
                for offset in chosen:
                    file.seek(int(offset))
                    found += list(decoded(file.readline(LONGEST_LINE)))
        except OSError:
            return []
        return found

    def _lines_of(self, kind: str | None) -> npt.NDArray[np.uint64]:
        with self.lock:
            kinds = np.array(self.line_kinds)
            offsets = np.array(self.line_offsets)
            wanted = "step" if kind is None else kind
            number = self.kinds.get(wanted, -1)
        is_wanted = kinds != number if kind is None else kinds == number
        found: npt.NDArray[np.uint64] = offsets[is_wanted]
        return found


def counted(steps: Column, first: float | None = None, last: float | None = None) -> npt.NDArray[np.bool_]:
    """Return which steps count: those that are wanted, and of a step that was taken again the last."""
    kept = np.ones(len(steps), dtype=bool)
    if len(steps) > 1:
        later = np.minimum.accumulate(steps[::-1])[::-1]
        kept[:-1] = steps[:-1] < later[1:]
    if first is not None:
        kept &= steps >= first
    if last is not None:
        kept &= steps <= last
    return kept


def decimated(steps: Column, values: Column, points: int) -> Curve:
    """Return a curve of at most so many points."""
    is_finite = np.isfinite(values)
    not_finite = len(values) - int(is_finite.sum())
    if len(steps) <= points:
        shown = np.where(is_finite, values, np.nan)
        return Curve(steps, shown, shown, shown, not_finite)
    # At even distances of steps: what is read of the end before it has been read in full is thin.
    starts = np.unique(np.searchsorted(steps, np.linspace(steps[0], steps[-1], points)))
    counts = np.add.reduceat(is_finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(is_finite, values, 0.0), starts) / counts
    low = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts)
    low[counts == 0] = high[counts == 0] = np.nan
    ends = np.append(starts[1:], len(steps)) - 1
    return Curve(steps[ends], mean, low, high, not_finite)


def _name_of_logged(name: str) -> str:
    """Return the name under which a number of the loop's own is shown: never that of a curve of the job's."""
    return f"logged {name}" if name in CURVES.values() or name.startswith("evaluation ") else name


def _add_rates(columns: dict[str, Column]) -> None:
    samples, weight = columns["samples"], columns["weight"]
    with np.errstate(divide="ignore", invalid="ignore"):
        columns["samples_per_s"] = samples / columns["seconds"]
        columns["weight_per_s"] = weight / columns["seconds"]
    columns["samples_per_s"][samples == 0] = np.nan  # batches of the loop's own
    columns["weight_per_s"][samples == weight] = np.nan  # the same curve


def _preview(path: Path, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield some events `step` from a part of a file, at even distances."""
    try:
        with open(path, "rb", opener=regular) as file:
            for offset in np.linspace(begin, end, _PREVIEW, endpoint=False).astype(np.int64):
                file.seek(int(offset))
                if not file.readline(_LONGEST_STEP).endswith(b"\n"):  # the rest of a line
                    continue
                for event in decoded(file.readline(_LONGEST_STEP)):
                    if event["event"] == "step":
                        yield event
    except OSError:
        return


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
