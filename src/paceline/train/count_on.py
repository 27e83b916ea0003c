"""Have the numbers of `enumerate(loader)` go on where a resumed pass does.

A resumed job leaves out the batches of a pass that were taken before. `enumerate` counts what it is given, from 0: the
loop would accumulate in other groups, or set another learning rate, than without the interruption. So `enumerate` is
handed as many empty items before the first batch, which nobody else sees. In CPython it asks for the item first, and
takes its number then: it may be asked for others meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Counted:
    """An iterator that is handed to the loop; `left_out` returns, after the first item, how many it goes without.

    Args:
        items: what it yields.
        left_out: returns how many there were before the first.
        tell: is called where there were some, with what counts them from 0: `enumerate` if that can't be reached, as
            behind a progress bar; else "" if nothing does that is known.
    """

    def __init__(self, items: Iterator[Any], left_out: Callable[[], int], tell: Callable[[str], None]) -> None:
        self.items = items
        self.left_out: Callable[[], int] | None = left_out
        self.tell = tell
        self.empty = 0  # items to come

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        """Return the next item; before the first let `enumerate` count those that were left out."""
        if self.empty:
            self.empty -= 1
            return None
        item = next(self.items)
        if self.left_out is not None:
            count, self.left_out = self.left_out(), None
            if count:
                self._count(count, _caller())
        return item

    def _count(self, count: int, caller: FrameType | None) -> None:
        for counter in gc.get_referrers(self):
            if type(counter) is enumerate:
                start = counter.__reduce__()[1][1]  # type: ignore[index]
                self.empty = 0 if start == count > 1 else count  # the loop has begun there itself
                while self.empty:
                    next(counter)
                return
        self.tell("enumerate" if _is_enumerated(caller) else "")


def _caller() -> FrameType | None:
    """Return the frame that asks for an item."""
    return sys._getframe(2)


def _is_enumerated(frame: FrameType | None) -> bool:
    """Return whether `enumerate` counts what the generator of this frame yields."""
    for each in gc.get_objects():
        if type(each) is enumerate and any(getattr(item, "gi_frame", None) is frame for item in gc.get_referents(each)):
            return True
    return False
