"""Clocks that are passed as arguments, so that a test can set the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock whose seconds only go forward, from an arbitrary zero."""

    def now_s(self) -> float:
        """Return the time, in seconds."""


class WallClock:
    """The host's monotonic clock."""

    now_s = staticmethod(time.monotonic)
