"""Handle Ctrl-C and SIGTERM where no supervisor does yet: while hosts are asked, or waited for."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """Unwinds to whoever asked to be told.

    Args:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Leave the block at SIGINT or SIGTERM, through its own clearing up; the signals come in the list."""
    signals: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) == 1:  # a second signal must not interrupt the clearing up that the first began
            raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():  # Python sets signal handlers only in the main one
        yield signals
        return
    before = {}
    for stopping in (signal.SIGINT, signal.SIGTERM):
        before[stopping] = signal.signal(stopping, leave)
    try:
        with contextlib.suppress(Interrupted):
            yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
