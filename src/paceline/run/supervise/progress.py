"""Show progress: of a job, by its events (step, loss, speed, time left, memory), and of a command's own work.

It is shown on a terminal, in a file, or in the output of a notebook's cell.
"""

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

from paceline.nouns.events import events_after
from paceline.nouns.reading import LineFollower
from paceline.nouns.step_record import elapsed_s, samples_per_s
from paceline.run.shown import duration

_WINDOW = 50  # steps over which the speed is taken
_CELL_EVERY_S = 0.25  # the time between two changes of a cell's line: each is a message to the notebook's page
_SILENT_S = 3.0  # the time of a command's work in which nothing is printed where a line can't be redrawn


class Progress:
    """The progress of a job by `events.jsonl`, from its present end: events before that are of earlier attempts."""

    def __init__(self, run_dir: Path) -> None:
        self.follower = LineFollower.at_end(run_dir / "events.jsonl")
        self.total_steps = 0
        self.samples = 0
        self.records: deque[dict[str, Any]] = deque(maxlen=_WINDOW)
        self.first: dict[str, Any] | None = None
        self.started: dict[str, Any] = {}
        self.restarts = 0  # after a rank had died
        self.loaded: dict[int, int] = {}  # the steps of the checkpoints that the job loaded, and their positions
        self.saved: str | None = None
        self.checkpoints = (run_dir / "checkpoints").resolve()
        self.saved_step: int | None = None  # the step of the newest checkpoint there
        self.copies: dict[str, str] = {}  # the URLs of checkpoints' copies, by the checkpoint's name
        self.has_stopped = False
        self.stopped_step: int | None = None
        self.asked_to_stop: list[int] = []  # the ranks that were asked, before all stopped
        self.evaluation: dict[str, Any] | None = None
        self.left_out: dict[str, int] | None = None  # the gradients that did not count, with parameter servers

    def read(self) -> bool:
        """Take in the events since the last call; return True if there were any."""
        before = self.follower.offset
        for event in events_after(self.follower):
            self._take(event)
        return self.follower.offset > before

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
        """Return the run's newest checkpoint, unless somebody has removed it."""
        if self.saved and Path(self.saved).is_dir():
            return self.saved
        return None

    @property
    def last(self) -> dict[str, Any] | None:
        """Return the last step's record."""
        return self.records[-1] if self.records else None

    def samples_per_s(self) -> float | None:
        """Return the speed over the last steps; None before the second."""
        return samples_per_s(list(self.records))

    def line(self) -> str:
        """Return the progress line, or the job's activity before its first step."""
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
        steps_done = max(self.loaded, default=0)
        if 0 < self.total_steps <= steps_done:
            return f"step {steps_done}/{self.total_steps}  all were taken before"
        return "first step"


class Screen:
    """Print ranks' output with its prefix, and on a terminal one progress line under it.

    Characters that a stream's encoding lacks are escaped. A stream that can't be written any more, such as a pipe
    whose reader has gone or a file on a full disk, is given up, and the job goes on.

    Args:
        out: the stream for the ranks' output.
        status: the stream for the progress line, which is redrawn in place if it is a terminal.
        every_s: the seconds between two lines where the line can't be redrawn.
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
        """Print a line of the supervisor itself."""
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
        """Remove the progress line."""
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
        with contextlib.suppress(OSError, ValueError):  # text in the buffer must not fail again at the end
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())
            os.close(null_device)
        name = "standard output" if stream is self.out else "standard error"
        self.say(f"paceline: {name} can't be written ({found}); the job goes on without it")


class CellScreen(Screen):
    """Show a job in a cell. The line is a display of its own, which notebooks change in place, and keep when saved."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stdout, _CELL_EVERY_S)
        self.handle: Any = None

    def show_progress(self, line: str, now_s: float) -> None:
        """Change the line."""
        if line == self.shown or now_s - self.printed_at_s < self.every_s:
            return
        self.shown = line
        self.printed_at_s = now_s
        if self.handle is None:
            import IPython.display

            display: Any = IPython.display.display
            self.handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": line}, raw=True)


class WorkProgress:
    """Show on standard error a command's current work, the part that is done, the speed, and the time left.

    Args:
        unit: the unit in which the work is counted, such as "plans".
        now_s: a function that returns the seconds of a clock.

    Attributes:
        total: the number of units of all the work; 0 while that is not known.
        is_most: True where some of the work may turn out to be needless.
    """

    def __init__(self, unit: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self.screen = Screen(sys.stdout, sys.stderr)
        self.unit = unit
        self.now_s = now_s
        self.began_s = now_s()
        self.total = 0.0
        self.is_most = False
        self.num_done = 0.0
        self.parts: dict[int, str] = {}  # the parts in work, by number

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.screen.clear()

    def begins(self, part: str, number: int = 0) -> None:
        """Show the part of the work that begins, in place of the part with the same number."""
        self.parts[number] = part
        self.shows()

    def ends(self, number: int = 0) -> None:
        """Count a part as done, as one unit."""
        self.parts.pop(number, None)
        self.adds(1)

    def begin_anew(self, part: str) -> None:
        """Begin other work, of which nothing is done yet."""
        self.began_s = self.now_s()
        self.num_done = 0.0
        self.parts = {0: part}

    def counts(self, num_done: int, total: int) -> None:
        """Set the number of units that are done, and of all units."""
        self.num_done, self.total = num_done, total
        self.shows()

    def adds(self, units: float) -> None:
        """Count units as done."""
        self.num_done += units
        self.shows()

    def shows(self) -> None:
        """Show the current line."""
        now_s = self.now_s()
        if self.parts and (self.screen.is_live or now_s - self.began_s >= _SILENT_S):
            self.screen.show_progress(self.line(), now_s)

    def line(self) -> str:
        """Return the line to show."""
        worked_s = max(self.now_s() - self.began_s, 1e-9)
        parts = ", ".join(self.parts.values())
        if not self.num_done:
            text = f"{parts}: {duration(worked_s)} so far"
        else:
            of_words = "of up to" if self.is_most else "of"
            most = "at most " if self.is_most else ""
            left_s = worked_s / self.num_done * max(0, self.total - self.num_done)
            rate = f"{60 * self.num_done / worked_s:,.1f} a minute"
            counted = f"{self.num_done:,.0f} {of_words} {self.total:,.0f} {self.unit}"
            text = f"{counted}, {rate}, {most}{duration(left_s)} left: {parts}"
        return text[: shutil.get_terminal_size().columns - 1] if self.screen.is_live else text


def encodable(text: str, encoding: str | None) -> str:
    """Return the text with characters that the encoding lacks written as escapes."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def notebook_shell() -> Any | None:
    """Return IPython's shell, if this process is the kernel of a notebook; None: it is not."""
    ipython = sys.modules.get("IPython")  # not imported: without it there is no notebook
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def label_of(shell: Any, name: str) -> str:
    """Return a notebook's label, such as `Cell In[3]`, for code that a traceback calls `name`; "" for a file."""
    compiled = getattr(shell, "compile", None)
    label = getattr(compiled, "format_code_name", lambda name: None)(name)
    return " ".join(label) if label else ""
