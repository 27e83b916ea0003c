"""Hand a job's events to the workload's sinks.

Each sink is made, called and closed in a thread of its own, so that none can hold up a step or the job's end.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.sink import CLOSE_S, MakeSink, Sink

QUEUE_EVENTS = 1000  # that a sink may lag behind; about 1 KiB each
OPEN_S = 1.0  # that the first step waits for all sinks together, besides what they import
IMPORT_S = 60.0  # for that: a cold file system
SLOW_S = 10.0  # of one call, until people are told
RETRY_S = 10.0  # between two tries to make a sink

Event = Mapping[str, Any]
_URL = re.compile(r"(\w+://)(?:[^/\s@]*@)?([^\s?]*)(?:\?\S*)?")  # maybe with a password, and with a query


class SinkThread:
    """Makes one sink in a thread, calls it there, and counts what it took.

    Args:
        make: from the workload.
        name: of `make`; the sink's class has a better one.
        run_dir: of the job.
    """

    def __init__(self, make: MakeSink, name: str, run_dir: Path | None) -> None:
        self.make = make
        self.name = name
        self.run_dir = run_dir
        self.sink: Sink | None = None
        self.refusal: PacelineError | None = None
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        self.has_been_tried = threading.Event()
        self.is_ending = threading.Event()
        self.has_begun = False  # the job: it can no longer be refused
        self.is_left_out = False
        self.told: set[str] = set()  # kinds of trouble
        self.offered = 0
        self.taken = 0
        self.call = "making it"
        self.called_s: float | None = time.monotonic()  # None: between two calls
        # daemon: a sink that hangs must not keep the process alive.
        self.thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self.thread.start()

    def __str__(self) -> str:
        address = getattr(self.sink, "address", "")
        return f"the sink {self.name} ({_without_secrets(str(address))})" if address else f"the sink {self.name}"

    def put(self, event: Event) -> None:
        """Hand over an event without waiting; where the sink lags too far behind, drop it and say so once."""
        self.offered += 1
        if self.is_left_out:
            return
        waiting = self.events.qsize()
        if waiting < QUEUE_EVENTS:
            self.events.put(event)
        else:
            self._tell("late", f"lags {QUEUE_EVENTS} events behind; it misses events until it catches up")
        since_s = self.called_s
        if since_s is not None and time.monotonic() - since_s > SLOW_S:
            self._tell("late", f"has not come back from {self.call} for {SLOW_S:g} s; {waiting + 1} events wait for it")

    def await_making(self, deadline_s: float) -> None:
        """Wait until the first try to make the sink has ended, or until `deadline_s` of `time.monotonic`.

        Importing its package is waited for: it says whether the package is there, and a process that is forked
        meanwhile would have half of a module.
        """
        until_s = time.monotonic() + IMPORT_S
        while not self.has_been_tried.wait(max(0.0, deadline_s - time.monotonic())):
            if not self._is_importing() or time.monotonic() > until_s:
                self._tell("late", f"has not been made within {OPEN_S:g} s; up to {QUEUE_EVENTS} events wait for it")
                return
            deadline_s = time.monotonic() + OPEN_S / 10

    def end(self) -> None:
        """Have the sink take what is left, and close; don't wait for it."""
        self.is_ending.set()
        self.events.put(None)

    def wait(self, deadline_s: float) -> None:
        """Wait for the sink's end; give up on it at `deadline_s` of `time.monotonic`. Say what did not arrive."""
        self.thread.join(max(0.0, deadline_s - time.monotonic()))
        lost = max(self.offered - self.taken, getattr(self.sink, "unsent", 0))
        counted = f"{lost} of {self.offered} events did not arrive" if lost else "its last events may be lost"
        if self.thread.is_alive():
            self.told |= {"late", "failed"}  # what comes of it in the rest of the process is no news
            notice(f"{self} did not end within {CLOSE_S:g} s, it waits in {self.call}; {counted}")
        elif lost:
            notice(f"{self} has ended; {counted}")

    def _run(self) -> None:
        try:
            self._make()
            while self.sink is not None and (event := self.events.get()) is not None:
                self._write(self.sink, event)
            if self.sink is not None:
                self._begin_call("close()")
                self.sink.close()
        except BaseException as error:  # SystemExit too: it would end this thread without a word
            self.is_left_out = True
            what = "could not be closed" if self.call == "close()" else "gets no more events"
            notice(f"{self} {what}: {self.call} raised {_said(error)}; training goes on")
            if self.sink is not None and self.call != "close()":
                with contextlib.suppress(BaseException):
                    self.sink.close()
        finally:
            self.has_been_tried.set()

    def _make(self) -> None:
        """Make the sink, and try again until the job ends where its server is away."""
        is_last = False
        while self.sink is None and not is_last:
            is_last = self.is_ending.is_set()
            self._begin_call("making it")
            try:
                sink = self.make(self.run_dir)
                _check(sink, self.name)
            except PacelineError as error:
                self.refusal = error
                self.is_left_out = is_last = True
                if self.has_begun:
                    notice(f"{self} is left out: {error.asked}: {error.found}; training goes on")
            except Exception as error:
                again = f"it is tried again every {RETRY_S:g} s"
                self._tell("failed", f"could not be made: {_said(error)}; training goes on without it, and {again}")
                self.has_been_tried.set()
                self.called_s = None
                self.is_ending.wait(0 if is_last else RETRY_S)
            else:
                self.sink, self.name = sink, type(sink).__name__
        self.called_s = None
        self.has_been_tried.set()

    def _write(self, sink: Sink, event: Event) -> None:
        self._begin_call(f"write({event['event']!r})")
        try:
            sink.write(event)
            self.taken += 1
        except Exception as error:  # its server may come back
            what = f"has lost an event: {self.call} raised {_said(error)}"
            self._tell("failed", f"{what}; training goes on, the next are tried")
        self.called_s = None

    def _begin_call(self, call: str) -> None:
        self.call = call
        self.called_s = time.monotonic()

    def _is_importing(self) -> bool:
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
            frame = frame.f_back
        return frame is not None

    def _tell(self, kind: str, what: str) -> None:
        """Say what is wrong, once for each kind; the end says how many events were lost."""
        if kind not in self.told:
            self.told.add(kind)
            notice(f"{self} {what}")


def open_sinks(makers: Sequence[MakeSink], run_dir: Path | None) -> list[SinkThread]:
    """Make the workload's sinks. One that can't be made is reported, and tried again while the job goes on.

    Raises:
        PacelineError: a sink refuses its settings with an error of three parts, or is no sink.
    """
    sinks = []
    for index, make in enumerate(makers):
        name = f"{getattr(make, '__name__', type(make).__name__)} (sinks[{index}])"
        sinks.append(SinkThread(make, name, run_dir))
    deadline_s = time.monotonic() + OPEN_S
    for sink in sinks:
        sink.await_making(deadline_s)
        sink.has_begun = True
    refusal = next((sink.refusal for sink in sinks if sink.refusal is not None), None)
    if refusal is not None:
        for sink in sinks:
            sink.end()
        raise refusal
    return sinks


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


def _check(sink: object, name: str) -> None:
    """Raise WorkloadError unless an object is a sink."""
    for method in ("write", "close"):
        if not callable(getattr(sink, method, None)):
            raise WorkloadError(
                "the workload's sinks should return objects with write(event) and close()",
                f"{name} returned {shown(sink)}, which has no {method}",
                "return an object with both methods; docs/extending.md has an example",
            )


def _said(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _without_secrets(" ".join(text.split()))[:300]


def _without_secrets(text: str) -> str:
    """Return a text with its URLs' passwords and queries left out."""
    return _URL.sub(r"\1\2", text)
