"""Write what this rank's steps spent their time on to `times/RANK.jsonl` in the run directory; docs/times.md has it.

Every rank writes its own file, without asking another. Lines are kept in memory, so that a step costs no call of the
system, and written when half a second has passed, by the next step or the rank's watchdog.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.comm.step_times import TIMES
from paceline.nouns.reading import regular

VERSION = 1
FOLDER = "times"
_FLUSH_NS = 500_000_000
_FIRST_STEPS = 20  # whose spans are kept
_EVERY = 100  # and those of every such step
_MOST_BYTES = 2**26  # of a rank's file: larger ones get no more spans


class TimesFile:
    """The times of one rank's steps.

    Args:
        run_dir: the run directory; None: nothing is written.
        rank: the rank of this process.
    """

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self.file: FileIO | None = None
        self.lines: list[str] = []
        self.lock = threading.Lock()
        self.flushed_ns = time.perf_counter_ns()
        self.bytes = 0
        self.steps = 0  # that this process has taken
        TIMES.restart()
        self.begin_ns = TIMES.since_ns
        TIMES.spans = None
        if run_dir is None:
            return
        with contextlib.suppress(OSError):  # a full disk: events say so, and training goes on
            (run_dir / FOLDER).mkdir(exist_ok=True)
            path = run_dir / FOLDER / f"{rank}.jsonl"
            self.file = open(path, "ab", buffering=0, opener=regular)  # noqa: SIM115
            weakref.finalize(self, self.file.close)  # a job need not be closed
            self.bytes = self.file.tell()
            if self.bytes:
                self._write(b"\n")  # after a line that a killed process has begun
            TIMES.spans = []
        process = {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot()}
        self._put({"version": VERSION, "rank": rank, **process, **_clocks()})
        self.flush()  # whoever looks for the process finds it before its first step

    def end_step(self, step: int) -> dict[str, float]:
        """Return the seconds that have passed since the last step's end by kind, and write them down as this step's."""
        times = TIMES.take()
        if self.file is not None:
            spans = TIMES.spans
            line: dict[str, Any] = {"step": step, "begin_ns": self.begin_ns, "ns": times}
            if spans:
                line["spans"] = spans
            self._put(line)
            self.steps += 1
            keeps = self.steps < _FIRST_STEPS or (step + 1) % _EVERY == 0
            TIMES.spans = [] if keeps and self.bytes < _MOST_BYTES else None
        self.begin_ns = TIMES.since_ns
        return {kind: round(ns / 1e9, 6) for kind, ns in times.items()}

    def close(self) -> None:
        """Write what is left: also what came after the last step, which has the number null."""
        if self.file is None:
            return
        self._put({"step": None, "begin_ns": self.begin_ns, "ns": TIMES.take(), "spans": TIMES.spans or []})
        self.flush()
        TIMES.spans = None
        with self.lock, contextlib.suppress(OSError):  # of a file system that tells late that it is full
            file, self.file = self.file, None
            file.close()

    def flush(self) -> None:
        """Write the lines that are in memory."""
        with self.lock:  # the watchdog's thread asks for it where the training thread stands still
            self.flushed_ns = time.perf_counter_ns()
            content = "".join(self.lines).encode()
            self.lines.clear()
            self._write(content)

    def _put(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")) + "\n"
        with self.lock:
            self.lines.append(text)
        if time.perf_counter_ns() - self.flushed_ns > _FLUSH_NS:
            self.flush()

    def _write(self, content: bytes) -> None:
        if self.file is None:
            return
        try:
            self.bytes += self.file.write(content)
        except OSError:
            return  # the disk is full: the record has gaps


def _clocks() -> dict[str, int]:
    """Return the times of both clocks at one moment."""
    return {"monotonic_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()}


def _boot() -> str:
    """Return a text that processes share that have the same monotonic clock; "" where nobody knows."""
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + _time_namespace()
    return ""


def _time_namespace() -> str:
    """Return the name of the time namespace: a container may have a clock of its own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/time")
    return ""
