"""Record what a job does while it runs: one line of JSON per event in `events.jsonl`. Rank 0 writes.

docs/events.md lists the events and their fields.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.nouns.errors import UsageError, how_to_write
from paceline.nouns.events import newest_first
from paceline.nouns.reading import parse_whole, regular
from paceline.nouns.sink import MakeSink
from paceline.train.scheduler_progress import scheduler_sinks
from paceline.train.sinks import SinkThread, close_sinks, open_sinks

VERSION = 1  # of the events: in `start`. It changes when a field is removed or means something else.
TAKES_OVER = "PACELINE_TAKES_OVER"  # set where this process takes a lost one's place in a running job
FOLDER = "PACELINE_EVENTS"  # where a job without a run directory writes its events, for whoever shows its progress


def restart_fact(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the number of this restart of the job, as the event `start` has it; nothing at the first try."""
    restart = parse_whole(environment.get("PACELINE_RESTART", "")) or 0
    return {"restart": restart} if restart else {}


def open_events(rank: int, run_dir: Path | None, sinks: Sequence[MakeSink]) -> Events:
    """Return this rank's event log: only rank 0's writes, to the run directory and to the workload's sinks."""
    if rank != 0:
        return Events(None)
    shown = os.environ.get(FOLDER)
    folder = run_dir or (Path(shown) if shown else None)
    makers = [*sinks, *(scheduler_sinks() if run_dir else [])]
    return Events(folder, bool(os.environ.get(TAKES_OVER)), open_sinks(makers, run_dir))


class Events:
    """Appends events to a run directory, and hands them to sinks.

    Args:
        run_dir: the folder of the file of events; None: no file is written.
        takes_over: True if another process of this job has written before: a second `start` is marked as such.
        sinks: the sinks that get each event.

    Raises:
        UsageError: the file can't be opened.
    """

    def __init__(self, run_dir: Path | None, takes_over: bool = False, sinks: Sequence[SinkThread] = ()) -> None:
        self.takes_over = takes_over
        self.sinks = sinks
        self.lock = threading.Lock()  # the thread that writes a checkpoint reports its end here
        self.file: FileIO | None = None  # `close` may come before it is open
        if sinks:  # a file that is run without a launcher need not close its job
            atexit.register(self.close)
        # Unbuffered, a write a line: whoever follows the file sees whole lines at once, and a line that did
        # not fit on the disk is not kept to be written later, in the middle of another.
        if run_dir:
            self.file = _opened(run_dir / "events.jsonl")
        self.is_torn = self._ends_torn()
        self.has_warned = False

    @property
    def is_open(self) -> bool:
        """True where events go to a file or a sink."""
        return self.file is not None or bool(self.sinks)

    def write(self, event: dict[str, Any]) -> None:
        """Append one event, with the wall-clock time. Where that can't be, warn once and go on."""
        if not self.is_open:
            return
        if self.takes_over and event["event"] in ("start", "resumed"):
            event = {**event, "takes_over": True}
        event = {**event, "at": round(time.time_ns() / 1e9, 3)}
        with self.lock:  # sinks get the events in the order of the file
            self._append(event)
            for sink in self.sinks:
                sink.put(dict(event))

    def _append(self, event: dict[str, Any]) -> None:
        if self.file is None:
            return
        line = json.dumps(event).encode() + b"\n"
        if self.is_torn:
            line = b"\n" + line
        try:
            self.is_torn = self.file.write(line) < len(line)
        except OSError as error:
            self._warn(error.strerror)
        else:
            if self.is_torn:
                self._warn("only part of a line was taken")

    def last_step(self) -> int:
        """Return the last step of this attempt that is written down, whoever wrote it; 0 for none."""
        if self.file is None:
            return 0
        for event in newest_first(Path(self.file.name), ("start", "resumed", "step")):
            if not event.get("takes_over"):
                return 0 if event["event"] == "start" else int(event["step"])
        return 0

    def close(self) -> None:
        """Close the file and the sinks."""
        if self.file:
            self.file.close()
            self.file = None
        if self.sinks:
            atexit.unregister(self.close)
            close_sinks(self.sinks)
            self.sinks = ()

    def _ends_torn(self) -> bool:
        """True if the last line has no end, as a full disk leaves it."""
        if self.file is None or self.file.seek(0, os.SEEK_END) == 0:
            return False
        self.file.seek(-1, os.SEEK_END)
        return self.file.read(1) != b"\n"

    def _warn(self, reason: str | None) -> None:
        if not self.has_warned and self.file is not None:
            self.has_warned = True
            text = f"events can't be written to {self.file.name} ({reason}); training goes on, its record has gaps"
            print(f"paceline: {text}", file=sys.stderr, flush=True)


def _opened(path: Path) -> FileIO:
    try:
        return open(path, "ab+", buffering=0, opener=regular)
    except OSError as error:
        found = f"it can't be opened ({error.strerror})"
        raise UsageError(f"the job should write its events to {path}", found, how_to_write(error)) from None
