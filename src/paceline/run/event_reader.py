"""Read a run's events fast: a step takes a few microseconds, so that a file of a million can be read as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from paceline.nouns.events import decoded
from paceline.nouns.reading import LARGEST, lines_of, regular

_STEP = b'{"event": "step"'  # as a job writes it
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class StepEvent(msgspec.Struct):
    """What is read of an event `step`; fields that are not here are passed over."""

    event: Literal["step"]
    step: _Count
    position: _Count
    samples: _Count
    loss: float
    at: float
    memory_bytes: _Count
    seconds: float | None = None
    weight: float | None = None
    sent_bytes: float | None = None
    gradient_norm: float | None = None
    loss_scale: float | None = None


class EventReader:
    """Reads events line by line, and counts the lines that are none.

    Attributes:
        unreadable: lines that are none, of those that were read.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self._decoder = msgspec.json.Decoder(StepEvent)

    def read(self, line: bytes) -> StepEvent | dict[str, Any] | None:
        """Return the event in a line; None: it has none."""
        if line.startswith(_STEP):
            try:
                return self._decoder.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: not UTF-8
                pass  # damaged, or with NaN, which is no JSON for msgspec
        event = next(decoded(line), None)
        if event is None:
            self.unreadable += bool(line.strip())
        elif event["event"] == "step":
            values: dict[str, Any] = {name: event.get(name) for name in StepEvent.__struct_fields__}
            return StepEvent(**values)
        return event

    def read_file(self, path: Path) -> Iterator[StepEvent | dict[str, Any]]:
        """Yield the events in a file; nothing where it can't be read. A last line without an end is not counted."""
        try:
            with open(path, "rb", opener=regular) as file:
                for line in lines_of(file):
                    before = self.unreadable
                    event = self.read(line)
                    if event is not None:
                        yield event
                    elif not line.endswith(b"\n"):
                        self.unreadable = before  # it is being written
        except OSError:
            return
