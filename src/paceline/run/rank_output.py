"""Keep the output of a job's ranks, in `output.log` of the run directory, and read it.

A line of the file is the time it came, who wrote it and its text. Supervisors of several hosts append to one file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from paceline.nouns.reading import LineFollower, lines_backwards, parse_number, regular

FILE = "output.log"  # the file's name in the run directory
_MOST_BYTES = 2**28  # the largest size of the file; later output is shown, and not kept
_TAIL_BYTES = 2**22
_LATEST_S = 1e11  # seconds since 1970; the calendar has an end
_CUT = "paceline: the file is full; what the ranks print from here on is not kept"


class Line(NamedTuple):
    """A line that a rank has printed.

    Attributes:
        at: the time when it came to the supervisor, in seconds since 1970.
        source: the rank's number, or the name of a server.
        text: the line without its end.
    """

    at: float
    source: str
    text: str


class OutputLog:
    """The file of one job, to which this process appends.

    Args:
        run_dir: the run directory of the job.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self.file: FileIO | None = None
        self.is_over = False  # it is full, or can't be written

    def add(self, source: int | str, text: str) -> str | None:
        """Append a line. If that fails, return the reason, once; nothing more is kept then, and the job goes on."""
        if self.is_over:
            return None
        try:
            if self.file is None:
                # With the first line: a job may end before it begins.
                self.file = open(self.path, "ab", buffering=0, opener=regular)  # noqa: SIM115
            if os.fstat(self.file.fileno()).st_size > _MOST_BYTES:
                text = _CUT
                self.is_over = True
            self.file.write(_encoded(source, text))
        except OSError as error:
            self.is_over = True
            return error.strerror or str(error)
        return None

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _encoded(source: int | str, text: str) -> bytes:
    return f"{time.time_ns() / 1e9:.3f} {source}\t{text}\n".encode("utf-8", "backslashreplace")


def parse_line(content: bytes) -> Line | None:
    """Return a line of the file; None for one that is torn."""
    head, tab, text = content.decode("utf-8", "replace").rstrip("\n").partition("\t")
    at, _, source = head.partition(" ")
    at_s = parse_number(at)
    return Line(at_s, source, text) if tab and source and at_s is not None and 0 <= at_s < _LATEST_S else None


def read_lines(file: Path | LineFollower, source: str | None = None) -> Iterator[Line]:
    """Yield the lines of a file, all or those of one source; nothing where there is no file.

    Args:
        file: the path of the file, or a follower that has read a part of it: then only later lines are yielded.
        source: the rank or server whose lines are wanted; None: those of all.
    """
    follower = file if isinstance(file, LineFollower) else LineFollower(file)
    with contextlib.suppress(OSError):
        for _, content in follower.lines():
            line = parse_line(content)
            if line is not None and source in (None, line.source):
                yield line


def last_lines(path: Path, count: int, source: str | None = None) -> list[Line]:
    """Return the last lines of a file, all or those of one source, from its last 4 MiB.

    Args:
        path: the path of the file, which may be missing.
        count: the largest number of lines.
        source: the rank or server whose lines are wanted; None: those of all.
    """
    lines: list[Line] = []
    for text in lines_backwards(path, _TAIL_BYTES):
        line = parse_line(text)
        if line is not None and source in (None, line.source):
            lines.append(line)
            if len(lines) == count:
                break
    return lines[::-1]
