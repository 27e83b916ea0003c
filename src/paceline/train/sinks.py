"""Hand a job's events to the workload's sinks, each in a thread, so that none can hold up a step or end the job."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.sink import MakeSink, Sink

QUEUE_EVENTS = 1000  # that a sink may lag behind; about 1 KiB each
CLOSE_S = 5.0  # that all sinks together may take after the last event

Event = Mapping[str, Any]


class SinkThread:
    """Calls one sink in a thread.

    Args:
        sink: from the workload.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.name = type(sink).__name__
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        self.is_left_out = False
        self.has_warned = False
        # daemon: a sink that hangs must not keep the process alive.
        self.thread = threading.Thread(target=self._run, name=f"sink {self.name}", daemon=True)
        self.thread.start()

    def put(self, event: Event) -> None:
        """Hand over an event without waiting; where the sink lags too far behind, drop it and say so once."""
        if self.is_left_out:
            return
        if self.events.qsize() < QUEUE_EVENTS:
            self.events.put(event)
        elif not self.has_warned:
            self.has_warned = True
            notice(f"the sink {self.name} lags {QUEUE_EVENTS} events behind; it misses events until it catches up")

    def end(self) -> None:
        """Have the sink take what is left, and close; don't wait for it."""
        self.events.put(None)

    def wait(self, deadline_s: float) -> None:
        """Wait for the sink's end; give up on it at `deadline_s` of `time.monotonic`."""
        self.thread.join(max(0.0, deadline_s - time.monotonic()))
        if self.thread.is_alive():
            notice(f"the sink {self.name} did not end within {CLOSE_S:g} s; its last events may be lost")

    def _run(self) -> None:
        call = ""
        try:
            while (event := self.events.get()) is not None:
                call = f"write({event['event']!r})"
                self.sink.write(event)
            call = "close()"
            self.sink.close()
        except BaseException as error:  # SystemExit too: it would end this thread without a word
            self.is_left_out = True
            notice(f"the sink {self.name} gets no more events: {call} raised {_said(error)}; training goes on")
            if call != "close()":
                with contextlib.suppress(BaseException):
                    self.sink.close()


def open_sinks(makers: Sequence[MakeSink], run_dir: Path | None) -> list[SinkThread]:
    """Make the workload's sinks. One that can't be made is reported and left out.

    Raises:
        PacelineError: a sink refuses its settings with an error of three parts, or is no sink.
    """
    sinks = []
    for index, make in enumerate(makers):
        name = f"{getattr(make, '__name__', type(make).__name__)} (sinks[{index}])"
        try:
            sink = make(run_dir)
        except PacelineError:
            raise
        except Exception as error:  # such as a server that is away when a job goes on after a failure
            notice(f"the sink {name} could not be made: {_said(error)}; training goes on without it")
            continue
        for method in ("write", "close"):
            if not callable(getattr(sink, method, None)):
                raise WorkloadError(
                    "the workload's sinks should return objects with write(event) and close()",
                    f"{name} returned {shown(sink)}, which has no {method}",
                    "return an object with both methods; docs/extending.md has an example",
                )
        sinks.append(sink)
    return [SinkThread(sink) for sink in sinks]


def close_sinks(sinks: Sequence[SinkThread]) -> None:
    """Close all sinks, within `CLOSE_S` together."""
    deadline_s = time.monotonic() + CLOSE_S
    for sink in sinks:  # all of them at once
        sink.end()
    for sink in sinks:
        sink.wait(deadline_s)


def notice(text: str) -> None:
    """Print a line on standard error."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
