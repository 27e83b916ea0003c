"""No process outlives the one that needs it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens (Linux).

    The request is not inherited by a fork: each child asks for itself. See prctl(2).
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill what is left of a process group, also after its leader's end: child processes of a rank that has failed.

    They may hold the rank's output and its connections: whoever waits for their end would wait for these processes.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def adopt_orphans(is_on: bool) -> None:
    """Let descendants whose parent ends become children of this process, or no longer (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
