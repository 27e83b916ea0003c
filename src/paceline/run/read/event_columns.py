"""Keep the events of a run in columns: each line is read once, a part at a time, also while the job writes the file.

A step takes a few microseconds, so that a file of a million can be read as a whole.
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from paceline.nouns.events import FORMS, decoded, numbers_in
from paceline.nouns.reading import COUNT, LARGEST, LONGEST_LINE, Form, LineFollower, regular

_STEP = b'{"event": "step"'  # as a job writes it
_HEAD = 256  # bytes by which a file is known: its first event has the time of the start
_MOST_NAMES = 200  # the number of names that the loop logs of which all values are kept
_MOST_KINDS = 255


def _type_of(form: Form) -> Any:
    """Return the type of a step's field as msgspec has it, which is as strict as the form."""
    kind, *alternatives = form if isinstance(form, tuple) else (form,)
    known: Any = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] if kind == COUNT else float
    for alternative in alternatives:
        known |= alternative
    return known


def _fields_of_step() -> dict[str, Any]:
    """Return the fields of the event `step` by name, each with its type; those that may be missing come last."""
    forms = {name: form for name, form in FORMS["step"].items() if name not in ("at?", "step?", "epoch?")}
    return {name: _type_of(forms[name]) for name in sorted(forms, key=lambda name: name.endswith("?"))}


STEP_FIELDS = tuple(name.removesuffix("?") for name in _fields_of_step())
_StepEvent: Any = msgspec.defstruct(
    "_StepEvent",
    [(name[:-1], kind, None) if name.endswith("?") else (name, kind) for name, kind in _fields_of_step().items()],
)
_decode_step = msgspec.json.Decoder(_StepEvent).decode


def decode_event(line: bytes) -> tuple[Sequence[float], Mapping[str, Any] | None]:
    """Return the event in a line: the values of a step, in the order of STEP_FIELDS, or another event.

    A value that a step has not is NaN. Of a line that has no event both are empty.
    """
    if line.startswith(_STEP):
        try:
            return _values(msgspec.structs.astuple(_decode_step(line))), None
        except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: not UTF-8
            pass  # damaged, or with NaN, which is no JSON for msgspec
    for event in decoded(line):
        if event["event"] == "step":
            return _values([event.get(name) for name in STEP_FIELDS]), None
        return (), event
    return (), None


def _values(values: Sequence[Any]) -> list[float]:
    return [math.nan if value is None else value for value in values]


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers of one name that evaluations or the loop have written, and their steps."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class EventIndex:
    """The events of one run, as far as they have been read.

    Args:
        path: the path of the file, which may be missing yet.

    Attributes:
        columns: the values of all steps, by the fields in STEP_FIELDS; NaN where a step has none.
        series: the numbers of evaluations and of `job.log`, by the kind of event and the name.
        newest: the newest of these numbers, with its step, by the kind of event and the name.
        attempt: the number of steps that had been read when the newest process of rank 0 began.
        is_cut: True where there are more names than are kept in `series`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.inode = 0
        self.head = b""  # how the file begins
        self.follower = LineFollower(self.path)
        self.columns = {name: array("d") for name in STEP_FIELDS}
        self.series: dict[tuple[str, str], Series] = {}
        self.newest: dict[tuple[str, str], tuple[int, float]] = {}
        self.attempt = 0
        self.is_cut = False
        self._num_unreadable = 0
        self._offsets: dict[str, array[int]] = {}  # offsets of each kind's lines; at most _MOST_KINDS kinds
        self._not_steps = array("Q")  # offsets of all lines but those of steps

    @property
    def kinds(self) -> Sequence[str]:
        """Return the kinds of events that there are."""
        return list(self._offsets)

    @property
    def is_complete(self) -> bool:
        """Return True if all events that were in the file at the last look have been read."""
        return self.follower.offset >= self.follower.size

    @property
    def share(self) -> float:
        """Return the share of the file that has been read, from 0 to 1."""
        return self.follower.offset / self.follower.size if self.follower.size else 1.0

    @property
    def unreadable(self) -> int:
        """Return the number of lines that have been read and are no events."""
        return self._num_unreadable + self.follower.num_too_long

    def read_on(self, seconds: float = math.inf) -> EventIndex:
        """Read on for about so long, or to the end of the last whole line; return this index."""
        with self.lock:
            try:
                self._look()
                for offset, line in self.follower.lines(seconds):
                    self._take(line, offset)
            except OSError:
                self._clear()
        return self

    def _look(self) -> None:
        """Begin anew where another run has the name now, or another file was copied over this one."""
        with open(self.path, "rb", opener=regular) as file:
            found = os.fstat(file.fileno())
            head = file.read(_HEAD)
        if found.st_ino != self.inode or found.st_size < self.follower.offset or not head.startswith(self.head):
            self._clear()
        self.head = head
        self.inode = found.st_ino

    def _take(self, line: bytes, offset: int) -> None:
        values, event = decode_event(line)
        if values:
            for name, value in zip(STEP_FIELDS, values, strict=True):
                self.columns[name].append(value)
            self._add_offset("step", offset)
        elif event is None:
            self._num_unreadable += bool(line.strip())
        else:
            self._take_other(event, offset)

    def _take_other(self, event: Mapping[str, Any], offset: int) -> None:
        kind = str(event["event"])
        self._add_offset(kind, offset)
        self._not_steps.append(offset)
        if kind == "start":
            self.attempt = len(self.columns["step"])
        elif kind in ("evaluation", "logged") and isinstance(event.get("step"), int):
            for name, value in numbers_in(event).items():
                known_as = name.removeprefix("logged_") if kind == "logged" else name
                self._take_number((kind, known_as), event["step"], value)

    def _take_number(self, name: tuple[str, str], step: int, value: float) -> None:
        self.newest[name] = (step, value)
        if name not in self.series and len(self.series) == _MOST_NAMES:
            self.is_cut = True
            return
        series = self.series.setdefault(name, Series())
        series.steps.append(step)
        series.values.append(_as_float(value))

    def _add_offset(self, kind: str, offset: int) -> None:
        if kind in self._offsets or len(self._offsets) < _MOST_KINDS:
            self._offsets.setdefault(kind, array("Q")).append(offset)

    def count(self, kind: str | None) -> int:
        """Return the number of events of a kind; None: of all but `step`."""
        return len(self._offsets_of(kind))

    def events(self, kind: str | None, skip: int = 0, count: int = LARGEST) -> list[dict[str, Any]]:
        """Return events, the newest first.

        Args:
            kind: the kind of the events; None: all but `step`.
            skip: the number of the newest events to leave out.
            count: the largest number of events to return.
        """
        offsets = self._offsets_of(kind)
        chosen = offsets[max(len(offsets) - skip - count, 0) : len(offsets) - skip]
        found: list[dict[str, Any]] = []
        try:
            with open(self.path, "rb", opener=regular) as file:
                for offset in reversed(chosen):
                    file.seek(offset)
                    found += decoded(file.readline(LONGEST_LINE))
        except OSError:
            return []
        return found

    def _offsets_of(self, kind: str | None) -> array[int]:
        with self.lock:
            return self._not_steps[:] if kind is None else self._offsets.get(kind, array("Q"))[:]


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of 300 digits
        return math.nan
