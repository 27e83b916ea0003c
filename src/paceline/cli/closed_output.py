"""End a command whose output can't be written as other commands do: `| head` quietly, a full disk with an error.

Python ignores SIGPIPE, so that a closed pipe raises an exception at the next print.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import regular

PIPE_CLOSED = 141  # 128 and the number of SIGPIPE, as shells show it for a command that ends so
FAILED = 1


def check_may_write(path: Path) -> None:
    """Raise UsageError where a JSON file can't be written: no folder, or another file, such as a program, is there."""
    if not path.parent.is_dir():
        raise UsageError(f"can't write {path}", f"there is no folder {path.parent}", "name a file in one that there is")
    if path.is_file() and path.stat().st_size:
        with open(path, "rb", opener=regular) as file:
            if file.read(1) != b"{":
                raise UsageError(f"can't write {path}", "a file is there that is no JSON", "name another file with -o")


class OutputLost(OSError):
    """Standard output or error can't be written.

    Args:
        name: the name of the stream for users.
        error: the error that the system returned.
    """

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.name = name


def guarded(command: Callable[[], int]) -> int:
    """Run `command` and flush its output. Return its exit code, or that of a command without its output."""
    streams = sys.stdout, sys.stderr
    watched = _Watched(sys.stdout, "standard output"), _Watched(sys.stderr, "standard error")
    sys.stdout, sys.stderr = watched  # type: ignore[assignment]
    try:
        try:
            return command()
        finally:  # also where argparse leaves by SystemExit
            for watched_stream in watched:
                watched_stream.flush()
    except OutputLost as lost:
        # Python flushes both streams when it ends, and would print an error of its own.
        for stream in streams:
            _discard(stream)
        if lost.errno == errno.EPIPE:
            return PIPE_CLOSED
        with contextlib.suppress(OSError, ValueError):
            print(f"paceline: {lost.name} can't be written ({lost.strerror})", file=streams[1], flush=True)
        return FAILED
    finally:
        sys.stdout, sys.stderr = streams


class _Watched:
    """A stream whose write errors are raised as OutputLost, with its name.

    Args:
        stream: the standard output or error; None where the process has none.
        name: the name of the stream for users.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        if self._stream is None:
            return len(text)
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputLost(self._name, error) from None

    def flush(self) -> None:
        """Flush as the stream does."""
        if self._stream is None or self._stream.closed:
            return
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputLost(self._name, error) from None


def _discard(stream: TextIO | None) -> None:
    """Drop the buffered output of a stream, so that Python does not try to write it when it ends."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())  # under the stream: its buffer can't be emptied otherwise
            os.close(null_device)
