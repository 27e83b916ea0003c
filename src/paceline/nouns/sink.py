"""The interface of an event sink: it receives every event of a job as it is written to `events.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Receives a job's events on rank 0, in a thread of its own: one call at a time, in the order of the file.

    An error in it ends neither the job nor other sinks: it is reported once, and the sink gets no more events.
    """

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event. docs/events.md lists them; later versions may add events and fields."""

    def close(self) -> None:
        """Write what is left. Called once, after the last event."""


# Called on rank 0 when its job starts, with the run directory; None where a file runs without `paceline run`.
MakeSink = Callable[[Path | None], Sink]
