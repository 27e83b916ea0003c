"""Decide whether another process takes the place of one that died: only in a job with parameter servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

LIVED_S = 5.0  # seconds; one that ends sooner had no chance, or a fault that the next one will have too
TRIES = 8  # short lives in a row; a longer life sets the count back


@dataclass(slots=True)
class Replaced:
    """Counts who was started when.

    Args:
        ranks: workers, numbered from 0.
        servers: numbered after them; the coordinator comes last. 0: nobody is replaced.
    """

    ranks: int
    servers: int
    since_s: dict[int, float] = field(default_factory=dict)
    short_lives: dict[int, int] = field(default_factory=dict)

    def name(self, rank: int) -> str:
        """Return what people call a process."""
        if rank < self.ranks:
            return f"worker {rank}"
        if rank < self.ranks + self.servers:
            return f"server {rank - self.ranks}"
        return "the coordinator"

    def started(self, ranks: Iterable[int], now_s: float) -> None:
        """Take in that these have been started."""
        self.since_s.update(dict.fromkeys(ranks, now_s))

    def should(self, rank: int, status: int, now_s: float) -> bool:
        """True if one that ended is to be started again: a signal ended it, and it had lived, or has tries left.

        Args:
            rank: which.
            status: its exit code; below 0 the signal.
            now_s: the time.
        """
        # An exit code is an error of the process itself, which another in its place would meet too.
        if not self.servers or status >= 0:
            return False
        lived_s = now_s - self.since_s.get(rank, now_s)
        self.short_lives[rank] = self.short_lives.get(rank, 0) + 1 if lived_s < LIVED_S else 0
        return self.short_lives[rank] <= TRIES
