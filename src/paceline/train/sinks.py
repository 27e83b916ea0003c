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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.sink import CLOSE_S, MakeSink, Sink

QUEUE_EVENTS = 1000  # that a sink may lag behind; about 1 KiB each
OPEN_S = 1.0  # that the first step waits while a sink waits
OPEN_MOST_S = 30.0  # in all, while one imports or computes: a cold file system, a busy machine
CLOSE_MOST_S = 5.0  # the same at the end; CLOSE_S while it waits
SLOW_S = 10.0  # of one call, until the user is told
_LOOK_S = 0.05  # between two looks at what a sink does
RETRY_S = 10.0  # between two tries to make a sink

Event = Mapping[str, Any]
_URL = re.compile(r"(\w+://)(?:[^/\s@]*@)?([^\s?]*)(?:\?\S*)?")  # maybe with a password, and with a query


class SinkThread:
    """Makes one sink in a thread, calls it there, and counts what it took.

    Args:
        make: the function that makes the sink, from the workload.
        name: the name of `make`, until the sink's class gives a better one.
        run_dir: the run directory of the job.
    """

    def __init__(self, make: MakeSink, name: str, run_dir: Path | None) -> None:
        self.make = make
        self.name = name
        self.run_dir = run_dir
        self.sink: Sink | None = None
        self.refusal: PacelineError | None = None
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: the end
        self.has_been_tried = threading.Event()  # to make it
        self.has_ended = threading.Event()
        self.is_ending = threading.Event()
        self.has_begun = False  # the job: it can no longer be refused
        self.is_left_out = False
        self.reported: set[str] = set()  # kinds of trouble
        self.offered = 0
        self.written = 0
        self.computed_before_s = 0.0
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
            self._report_once("late", f"lags {QUEUE_EVENTS} events behind; it misses events until it catches up")
        since_s = self.called_s
        if since_s is not None and time.monotonic() - since_s > SLOW_S:
            self._report_once(
                "late", f"has not come back from {self.call} for {SLOW_S:g} s; {waiting + 1} events wait for it"
            )

    def end(self) -> None:
        """Have the sink take what is left, and close; don't wait for it."""
        self.is_ending.set()
        self.events.put(None)

    def report_end(self) -> None:
        """Report the events that did not arrive. Nothing waits for the sink any more."""
        lost = max(self.offered - self.written, getattr(self.sink, "unsent", 0))
        counted = f"{lost} of {self.offered} events did not arrive" if lost else "its last events may be lost"
        if not self.has_ended.is_set():
            self.reported |= {"late", "failed"}  # what comes of it in the rest of the process is no news
            notice(f"{self} did not end within {CLOSE_S:g} s, it waits in {self.call}; {counted}")
        elif lost:
            notice(f"{self} has ended; {counted}")

    def report_late(self) -> None:
        """Report that the first step does not wait for the sink."""
        self._report_once("late", f"has not been made within {OPEN_S:g} s; up to {QUEUE_EVENTS} events wait for it")

    def worked_s(self, span_s: float) -> float:
        """Return the seconds that the thread worked since the last call, `span_s` ago; else it waited for an answer.

        To import is to work: it says whether a package is there, and no process may be forked meanwhile.
        """
        before_s, self.computed_before_s = self.computed_before_s, self._computed_s()
        return span_s if self._is_importing() else self.computed_before_s - before_s

    def _computed_s(self) -> float:
        """Return the seconds that the thread was on a processor or waited for one; 0 where the system does not say."""
        try:
            nanoseconds = Path(f"/proc/self/task/{self.thread.native_id}/schedstat").read_text().split()[:2]
            return sum(map(int, nanoseconds)) / 1e9
        except (OSError, ValueError):
            return 0.0

    def _is_importing(self) -> bool:
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
            frame = frame.f_back
        return frame is not None

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
            problem = "could not be closed" if self.call == "close()" else "gets no more events"
            notice(f"{self} {problem}: {self.call} raised {_text_of(error)}; training goes on")
            if self.sink is not None and self.call != "close()":
                with contextlib.suppress(BaseException):
                    self.sink.close()
        finally:
            self.has_been_tried.set()
            self.has_ended.set()

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
                self._report_once(
                    "failed", f"could not be made: {_text_of(error)}; training goes on without it, and {again}"
                )
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
            self.written += 1
        except Exception as error:  # its server may come back
            problem = f"has lost an event: {self.call} raised {_text_of(error)}"
            self._report_once("failed", f"{problem}; training goes on, the next are tried")
        self.called_s = None

    def _begin_call(self, call: str) -> None:
        self.call = call
        self.called_s = time.monotonic()

    def _report_once(self, kind: str, problem: str) -> None:
        """Report a problem, once for each kind; the end says how many events were lost."""
        if kind not in self.reported:
            self.reported.add(kind)
            notice(f"{self} {problem}")


def open_sinks(makers: Sequence[MakeSink], run_dir: Path | None) -> list[SinkThread]:
    """Make the workload's sinks. One that can't be made is reported, and tried again while the job goes on.

    Raises:
        PacelineError: a sink refuses its settings with an error of three parts, or is no sink.
    """
    sinks = []
    for index, make in enumerate(makers):
        name = f"{getattr(make, '__name__', type(make).__name__)} (sinks[{index}])"
        sinks.append(SinkThread(make, name, run_dir))
    for late in _await(sinks, lambda sink: sink.has_been_tried, OPEN_S, OPEN_MOST_S):
        late.report_late()
    for sink in sinks:
        sink.has_begun = True
    refusal = next((sink.refusal for sink in sinks if sink.refusal is not None), None)
    if refusal is not None:
        for sink in sinks:
            sink.end()
        raise refusal
    return sinks


def close_sinks(sinks: Sequence[SinkThread]) -> None:
    """Close all sinks, within `CLOSE_S` together; those that still compute then have until `CLOSE_MOST_S`."""
    for sink in sinks:  # all of them at once
        sink.end()
    _await(sinks, lambda sink: sink.has_ended, CLOSE_S, CLOSE_MOST_S)
    for sink in sinks:
        sink.report_end()


def _await(
    sinks: Sequence[SinkThread], done_of: Callable[[SinkThread], threading.Event], idle_s: float, most_s: float
) -> list[SinkThread]:
    """Wait for sinks: for each until it has been idle for `idle_s`, and for `most_s` at most. Return those not done."""
    looked_s = time.monotonic()
    until_s = looked_s + most_s
    waiting = dict.fromkeys(sinks, 0.0)  # and for how long it has been idle
    late = []
    for sink in sinks:
        sink.worked_s(0.0)  # from here on
    while waiting:
        done_of(next(iter(waiting))).wait(_LOOK_S)
        now_s = time.monotonic()
        span_s, looked_s = now_s - looked_s, now_s
        for sink in [*waiting]:
            waiting[sink] += span_s - sink.worked_s(span_s)
            if done_of(sink).is_set():
                del waiting[sink]
            elif waiting[sink] >= idle_s or now_s >= until_s:
                del waiting[sink]
                late.append(sink)
    return late


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


def _text_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _without_secrets(" ".join(text.split()))[:300]


def _without_secrets(text: str) -> str:
    """Return a text with its URLs' passwords and queries left out."""
    return _URL.sub(r"\1\2", text)
