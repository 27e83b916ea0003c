"""Define a finding of the doctor, and how its numbers are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "not checked", "ok"]
LEVELS: tuple[Level, ...] = ("error", "warning", "not checked", "ok")  # worst first
MIB, GIB = 2**20, 2**30
FLEET = "fleet"  # stands for the host in a finding between hosts


@dataclass(frozen=True, slots=True)
class Finding:
    """A statement of a check on a host: a fault, or what is right.

    Args:
        level: "error" stops a job or makes it wrong; "warning" slows it down or may stop it.
        host: the name of the host; "fleet" is between hosts.
        check: the name of the check, in a word or two.
        found: the state, and why it matters to training.
        fix: what to do, as an imperative; "" when there is nothing to do.
    """

    level: Level
    host: str
    check: str
    found: str
    fix: str = ""


def size(num_bytes: float) -> str:
    """Return a number of bytes with a unit, for people."""
    if num_bytes >= 1024 * GIB:
        return f"{num_bytes / 1024 / GIB:.1f} TiB"
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes:.0f} bytes"


def count(number: int, thing: str) -> str:
    """Return a number with its noun: "1 host", "2 hosts"."""
    plural = "" if number == 1 else "s"
    return f"{number} {thing}{plural}"


Row = tuple[Level, str, str, str]  # of a check on one host: level, check, found, fix
