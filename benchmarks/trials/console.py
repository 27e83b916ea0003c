"""What a trial shows: a progress line with its rate and the time left, and an aligned table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from paceline.nouns.table import aligned

EVERY_S = 5.0


class Progress:
    """A line on standard error every few seconds.

    Args:
        what: what is counted.
        total: how many there will be.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.began_s = self.shown_s = time.monotonic()

    def show(self, done: int, wrong: int) -> None:
        """Print the line if it is time, or at the end."""
        now_s = time.monotonic()
        if now_s - self.shown_s < EVERY_S and done < self.total:
            return
        self.shown_s = now_s
        rate = done / max(now_s - self.began_s, 1e-9)
        left_s = round((self.total - done) / max(rate, 1e-9))
        text = f"{done}/{self.total} {self.what}, {wrong} wrong, {rate:.1f}/s, {left_s // 60}:{left_s % 60:02d} left"
        print(text, file=sys.stderr, flush=True)


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = aligned([titles, *rows], "{:<}" + "  {:>}" * (len(titles) - 1))
    return "\n".join(line.rstrip() for line in lines)
