"""Time as something handed in, so that a test can set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only go forward; their zero means nothing."""

    def now_s(self) -> float:
        """The time, in seconds."""


class WallClock:
    """The host's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment, never going back."""
        return time.monotonic()
