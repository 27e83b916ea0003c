"""The interface of an event sink: it receives every event of a job as it is written to `events.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

CLOSE_S = 2.0  # the seconds that all sinks together may take after the last event


class Sink(Protocol):
    """Receives a job's events on rank 0, in a thread of its own: one call at a time, in the order of the file.

    It is made and closed in that thread, too. An error in it ends neither the job nor other sinks: it is reported once,
    and the next event is tried; at the end one notice counts what did not arrive. Needs no base class: any object with
    these methods is a sink. Notices name its `address` where it has one. Where `write` only collects, `unsent` may be
    the number of events that have not been sent.

    Examples:
        >>> from dataclasses import replace
        >>> class Losses:
        ...     def __init__(self, run_dir):
        ...         self.losses = []
        ...
        ...     def write(self, event):
        ...         if event["event"] == "step":
        ...             self.losses.append(event["loss"])
        ...
        ...     def close(self):
        ...         print(len(self.losses), "losses")
        >>> job = paceline.distribute(replace(workload, sinks=[Losses]))
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> job.close()
        8 losses
    """

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event.

        Args:
            event: the event, as docs/events.md describes it; later versions may add events and fields.

        Examples:
            >>> class Printed:
            ...     def write(self, event):
            ...         print(event["event"], sorted(event))
            >>> Printed().write({"event": "own_batches", "total_steps": 3, "at": 1.5})
            own_batches ['at', 'event', 'total_steps']
        """

    def close(self) -> None:
        """Write the rest. Called once, after the last event; waited for two seconds, or five while it computes.

        Examples:
            >>> class Files:
            ...     def __init__(self, run_dir):
            ...         self.file = open("steps", "w")
            ...
            ...     def close(self):
            ...         self.file.close()
            >>> sink = Files(None)
            >>> sink.close()
            >>> sink.file.closed
            True
        """


# Called on rank 0 when its job starts, with the run directory; None where a file runs without `paceline run`.
MakeSink = Callable[[Path | None], Sink]
