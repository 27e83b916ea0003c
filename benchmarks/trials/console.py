"""What a trial shows: a progress line with its rate and the time left, and an aligned table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

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
    texts = [list(titles), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[at]) for row in texts) for at in range(len(titles))]
    lines = []
    for row in texts:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
