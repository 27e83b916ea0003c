"""Ctrl-C and SIGTERM where no supervisor has taken them yet: hosts that are being asked, a wait for hosts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """Unwinds to whoever asked to be told.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """The block is left at SIGINT or SIGTERM, through its own clearing up; the signals come in the list."""
    seen: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(Interrupted):
            yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
