"""Write when ranks negotiated and executed each collective, as Horovod's timeline: a trace for chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from paceline.horovod.negotiation import Answer, Request

VARIABLE = "HOROVOD_TIMELINE"  # a file, or DYNAMIC: `start_timeline` names it
MARKS_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"


class Timeline:
    """The trace of rank 0; of other ranks, and without a file, nothing is written."""

    def __init__(self) -> None:
        self.file: IO[str] | None = None
        self.lock = threading.Lock()
        self.rows: dict[str, int] = {}  # by tensor
        self.negotiating: set[str] = set()  # tensors that some ranks have submitted
        self.began_ns = 0
        self.marks_cycles = False

    def start(self, path: str, marks_cycles: bool) -> None:
        """Begin a trace in a file.

        Args:
            path: the name of the file, in a folder that exists.
            marks_cycles: note the begin of each batch of collectives.

        Raises:
            OSError: the file can't be written.
        """
        self.stop()
        with self.lock:
            self.file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  `stop` closes it
            self.file.write("[\n")
            self.rows = {}
            self.began_ns = time.monotonic_ns()
            self.marks_cycles = marks_cycles
            epoch = time.time_ns() // 1000
            self._write({"name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0, "args": {"start": epoch}})

    def start_from_environment(self) -> None:
        """Begin the trace that HOROVOD_TIMELINE names, if it names one."""
        path = os.environ.get(VARIABLE, "")
        if path and path.upper() != "DYNAMIC":
            self.start(path, os.environ.get(MARKS_CYCLES, "0") not in ("", "0"))

    def stop(self) -> None:
        """End the trace; the file is valid JSON then."""
        with self.lock:
            if self.file is not None:
                self.file.write("{}]\n")
                self.file.close()
                self.file = None

    def submitted(self, rank: int, request: Request) -> None:
        """Note that a rank waits for the others."""
        if self.file is None:
            return
        with self.lock:
            if request.name not in self.negotiating:
                self.negotiating.add(request.name)
                self._event("B", request.name, f"NEGOTIATE_{request.kind.upper()}")
            self._event("X", request.name, str(rank), dur=0)

    def negotiated(self, answer: Answer) -> None:
        """Note that all ranks have submitted."""
        if self.file is None:
            return
        with self.lock:
            if self.marks_cycles:
                self._write({"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": self._now(), "s": "g"})
            for entry in answer.entries:
                if entry.request.name in self.negotiating:
                    self.negotiating.remove(entry.request.name)
                    self._event("E", entry.request.name, "")

    @contextmanager
    def executing(self, answer: Answer) -> Iterator[None]:
        """Note how long the collectives of an answer take."""
        if self.file is None:
            yield
            return
        with self.lock:
            for entry in answer.entries:
                self._event("B", entry.request.name, entry.request.kind.upper())
        try:
            yield
        finally:
            with self.lock:
                for entry in answer.entries:
                    self._event("E", entry.request.name, "")

    def _event(self, phase: str, tensor: str, name: str, dur: int | None = None) -> None:
        row = self.rows.get(tensor)
        if row is None:
            row = self.rows[tensor] = len(self.rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": tensor}})
        event: dict[str, object] = {"ph": phase, "pid": row, "ts": self._now()}
        if name:
            event["name"] = name
        if dur is not None:
            event["dur"] = dur
        self._write(event)

    def _write(self, event: dict[str, object]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(event) + ",\n")

    def _now(self) -> float:
        return (time.monotonic_ns() - self.began_ns) / 1000
