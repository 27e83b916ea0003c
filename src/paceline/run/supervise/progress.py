"""Show progress: of a job, by its events (step, loss, speed, time left, memory), and of a command's own work."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from paceline.nouns.events import decoded
from paceline.nouns.reading import lines_after
from paceline.nouns.record import elapsed_s

_WINDOW = 50  # steps over which the speed is taken
_SILENT_S = 3.0  # of a command's work, in which nothing is printed where a line can't be redrawn
_LONGEST_S = 1e12  # seconds; a damaged event may have times from which follows anything


class Progress:
    """Follows `events.jsonl`, from its present end: what is there belongs to earlier attempts of the job."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "events.jsonl"
        self.offset = self.path.stat().st_size if self.path.exists() else 0
        self.total_steps = 0
        self.samples = 0
        self.records: deque[dict[str, Any]] = deque(maxlen=_WINDOW)
        self.first: dict[str, Any] | None = None
        self.started: dict[str, Any] = {}
        self.restarts = 0  # after a rank had died
        self.loaded: dict[int, int] = {}  # the steps of the checkpoints that the job loaded, and their positions
        self.saved: str | None = None
        self.checkpoints = (run_dir / "checkpoints").resolve()
        self.saved_step: int | None = None  # of the newest one there
        self.copies: dict[str, str] = {}  # by a checkpoint's name, the URL of its copy
        self.has_stopped = False
        self.stopped_step: int | None = None
        self.asked_to_stop: list[int] = []  # ranks that were, before all stopped
        self.evaluation: dict[str, Any] | None = None
        self.left_out: dict[str, int] | None = None  # of a job with parameter servers: gradients that did not count

    def read(self) -> bool:
        """Take in what the job has written since; True if there was anything."""
        try:
            lines, self.offset = lines_after(self.path, self.offset)
        except OSError:
            return False  # it is not there yet
        for line in lines:
            for event in decoded(line):
                self._take(event)
        return bool(lines)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "start":
            self.started = event
            self.total_steps = event["total_steps"]
            self.restarts = event.get("restart", 0)
        elif kind == "own_batches":
            self.total_steps = event["total_steps"]
        elif kind == "step":
            self.first = self.first or event
            self.records.append(event)
            self.samples += event["samples"]
        elif kind == "checkpoint":
            self.saved = event["path"]
            if Path(event["path"]).parent.resolve() == self.checkpoints:
                self.saved_step = event.get("step")
                self.copies.pop(Path(event["path"]).name, None)  # of the same step before the job went back
        elif kind == "copied":
            self.copies[Path(event["path"]).name] = event["url"]
        elif kind == "resumed":
            self.loaded[event["step"]] = event["position"]
        elif kind == "stopped":
            self.has_stopped = True
            self.stopped_step = event.get("step")
            self.asked_to_stop = event.get("asked", [])
        elif kind == "evaluation":
            self.evaluation = event

    @property
    def checkpoint(self) -> str | None:
        """The run's newest checkpoint, unless somebody has removed it."""
        if self.saved and Path(self.saved).is_dir():
            return self.saved
        return None

    @property
    def last(self) -> dict[str, Any] | None:
        """The last step's record."""
        return self.records[-1] if self.records else None

    def samples_per_s(self) -> float | None:
        """Return the speed over the last steps; None before the second."""
        return speed(list(self.records))

    def line(self) -> str:
        """Return the line, or what the job is doing before its first step."""
        last = self.last
        if last is None:
            return self._before_a_step()
        total = self.total_steps if self.total_steps >= last["step"] else 0  # a loop of one's own may have no end
        of_total = f"/{total}" if total else ""
        fields = [f"step {last['step']}{of_total}", f"loss {last['loss']:.4f}"]
        rate = self.samples_per_s()
        if rate:
            fields.append(f"{rate:.1f} samples/s")
        if rate and total:
            step_s = elapsed_s(list(self.records)) / (len(self.records) - 1)
            steps_left = max(0, self.total_steps - last["step"])
            fields.append(f"{duration(step_s * steps_left)} left")
        fields.append(f"{last['memory_bytes'] / 2**20:.0f} MiB/rank")
        if self.restarts:
            fields.append(f"restart {self.restarts}")
        return "  ".join(fields)

    def _before_a_step(self) -> str:
        if not self.started:
            return "starting"
        done = max(self.loaded, default=0)
        if 0 < self.total_steps <= done:
            return f"step {done}/{self.total_steps}  all were taken before"
        return "first step"


def speed(records: list[dict[str, Any]]) -> float | None:
    """Return the samples per second between the first and the last of some step records."""
    seconds = elapsed_s(records)
    if seconds <= 0:
        return None
    samples = sum(record["samples"] for record in records[1:])  # the first record's were done before its time
    return float(samples / seconds)


def duration(seconds: float) -> str:
    """Write `73` as `1:13`; `?` where it is no time."""
    if not 0 <= seconds < _LONGEST_S:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


class Screen:
    """Shows rank output with its prefix, and on a terminal one progress line under it.

    What a stream's encoding lacks is escaped. A stream that takes nothing any more, such as a pipe whose reader has
    gone or a file on a full disk, is given up, and the job goes on.

    Args:
        out: where ranks' output goes.
        status: where the progress line goes; redrawn in place if it is a terminal.
        every_s: seconds between two lines where the line can't be redrawn.
    """

    def __init__(self, out: TextIO, status: TextIO, every_s: float = 10.0) -> None:
        self.out = out
        self.status = status
        self.every_s = every_s
        self.is_live = status.isatty()
        self.shown = ""
        self.printed_at_s = float("-inf")
        self.given_up: set[TextIO] = set()

    def show_output(self, rank: int | str, text: str) -> None:
        """Print one line that a rank, or a server by its name, wrote."""
        self._clear()
        self._print(f"[{rank}] {text}\n", self.out)
        self._draw()

    def say(self, text: str) -> None:
        """Print a line of the supervisor's own."""
        self._clear()
        self._print(text + "\n", self.status)
        self._draw()

    def show_progress(self, line: str, now_s: float) -> None:
        """Redraw the progress line, or print it now and then."""
        if self.is_live:
            if line != self.shown:
                self._clear()
                self.shown = line
                self._draw()
        elif now_s - self.printed_at_s >= self.every_s and line != self.shown:
            self.shown = line
            self.printed_at_s = now_s
            self._print(line + "\n", self.status)

    def end(self) -> None:
        """Leave the last progress line standing."""
        if self.is_live and self.shown:
            self._print("\n", self.status)
        self.shown = ""
        self.printed_at_s = float("-inf")

    def clear(self) -> None:
        """Take the progress line away."""
        self._clear()
        self.shown = ""

    def _clear(self) -> None:
        if self.is_live and self.shown:
            self._print("\r\x1b[K", self.status)

    def _draw(self) -> None:
        if self.is_live and self.shown:
            self._print(self.shown, self.status)

    def _print(self, text: str, stream: TextIO) -> None:
        if stream in self.given_up:
            return
        try:
            stream.write(encodable(text, stream.encoding))
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._give_up(stream, getattr(error, "strerror", None) or str(error))

    def _give_up(self, stream: TextIO, found: str) -> None:
        self.given_up.add(stream)
        with contextlib.suppress(OSError, ValueError):  # what is still buffered must not fail again at the end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        name = "standard output" if stream is self.out else "standard error"
        self.say(f"paceline: {name} can't be written ({found}); the job goes on without it")


class WorkProgress:
    """Shows on standard error what a command works at, how much of it is done, how fast, and how long the rest takes.

    Args:
        unit: what the work is counted in, such as "plans".
        now_s: a clock.

    Attributes:
        total: units of all the work; 0 while that is not known.
        is_most: some of it may turn out to be needless.
    """

    def __init__(self, unit: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self.screen = Screen(sys.stdout, sys.stderr)
        self.unit = unit
        self.now_s = now_s
        self.began_s = now_s()
        self.total = 0.0
        self.is_most = False
        self.num_done = 0.0
        self.parts: dict[int, str] = {}  # that are worked at, by number

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.screen.clear()

    def begins(self, part: str, number: int = 0) -> None:
        """Say what is worked at from now on, in place of the part with the same number."""
        self.parts[number] = part
        self.shows()

    def ends(self, number: int = 0) -> None:
        """Count a part as done, as one unit."""
        self.parts.pop(number, None)
        self.adds(1)

    def begin_anew(self, part: str) -> None:
        """Begin other work, of which nothing is done."""
        self.began_s = self.now_s()
        self.num_done = 0.0
        self.parts = {0: part}

    def counts(self, done: int, total: int) -> None:
        """Say how many units are done, and of how many."""
        self.num_done, self.total = done, total
        self.shows()

    def adds(self, units: float) -> None:
        """Count units as done."""
        self.num_done += units
        self.shows()

    def shows(self) -> None:
        """Bring the line up to date."""
        now_s = self.now_s()
        if self.parts and (self.screen.is_live or now_s - self.began_s >= _SILENT_S):
            self.screen.show_progress(self.line(), now_s)

    def line(self) -> str:
        """Return the line."""
        worked_s = max(self.now_s() - self.began_s, 1e-9)
        what = ", ".join(self.parts.values())
        if not self.num_done:
            text = f"{what}: {duration(worked_s)} so far"
        else:
            of = "of up to" if self.is_most else "of"
            most = "at most " if self.is_most else ""
            left_s = worked_s / self.num_done * max(0, self.total - self.num_done)
            rate = f"{60 * self.num_done / worked_s:,.1f} a minute"
            done = f"{self.num_done:,.0f} {of} {self.total:,.0f} {self.unit}"
            text = f"{done}, {rate}, {most}{duration(left_s)} left: {what}"
        return text[: shutil.get_terminal_size().columns - 1] if self.screen.is_live else text


def encodable(text: str, encoding: str | None) -> str:
    """Return the text with what the encoding lacks written as escapes."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
