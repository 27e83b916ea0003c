"""One thing that the doctor found on a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "not checked", "ok"]
LEVELS: tuple[Level, ...] = ("error", "warning", "not checked", "ok")  # worst first
MIB, GIB = 2**20, 2**30
FLEET = "fleet"  # the host of what is found between hosts


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Args:
        level: "error" stops a job or makes it wrong; "warning" slows it down or may stop it.
        host: where; "fleet" is between hosts.
        check: what was looked at, in a word or two.
        found: what is so, and why it matters to training.
        fix: what to do, as an imperative; "" when there is nothing to do.
    """

    level: Level
    host: str
    check: str
    found: str
    fix: str = ""


def size(num_bytes: float) -> str:
    """A number of bytes for people."""
    if num_bytes >= 1024 * GIB:
        return f"{num_bytes / 1024 / GIB:.1f} TiB"
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes >= MIB else f"{num_bytes:.0f} bytes"


def count(number: int, thing: str) -> str:
    """ "1 host", "2 hosts"."""
    return f"{number} {thing}{'s' * (number != 1)}"


Row = tuple[Level, str, str, str]  # of a check on one host: level, check, found, fix
