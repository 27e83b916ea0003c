"""Record every collective that a rank begins, in order, with the line that asked for it.

A line is written to a file as a collective begins, so that the file of a rank that hangs or dies says where.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

import paceline
from paceline.comm.ledger import Ledger

_PACELINE = str(Path(paceline.__file__).parent) + os.sep  # a user's folder may have that name too
_COMM = f"{_PACELINE}comm{os.sep}"


@dataclass(slots=True)
class Trace(Ledger):
    """A ledger that also writes a line per collective: [collective, axis, bytes, line]."""

    file: TextIO | None = None

    def add(self, collective: str, axis: str, payload_bytes: int) -> None:
        """Enter one call."""
        Ledger.add(self, collective, axis, payload_bytes)  # super() does not find a class that got its slots later
        if self.file is not None:
            self.file.write(json.dumps([collective, axis, payload_bytes, asked_at(sys._getframe(1))]) + "\n")
            self.file.flush()  # now: a rank that is killed in this collective writes nothing more


def asked_at(frame: FrameType | None) -> str:
    """Return the nearest line of the user's code above `frame`; else the nearest of Paceline's outside `comm/`."""
    # Without a line of the user's (a collective of the job's own, such as a bucket's sum) the caller in Paceline says
    # which strategy asked.
    ours = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_persons(name):
            return f"{name}:{frame.f_lineno}"
        if not ours and name.startswith(_PACELINE) and not name.startswith(_COMM):
            ours = f"paceline{os.sep}{name.removeprefix(_PACELINE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ours


def is_persons(file: str) -> bool:
    """True if a source file is the user's own."""
    return not ("site-packages" in file or file.startswith((_PACELINE, "<")) or f"{os.sep}lib{os.sep}python" in file)
