"""Follow the parameter servers of a job for its supervisor.

The coordinator writes their events to `servers.jsonl`. Only in such a job another process replaces one that died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.events import events_after
from paceline.nouns.reading import LineFollower

LIVED_S = 5.0  # seconds; one that ends sooner had no chance, or a fault that the next one will have too
TRIES = 8  # short lives in a row; a longer life sets the count back

End = Callable[[int | None, int, float], None]  # a rank, its process, the seconds for which it has not answered


class ServerNews:
    """The news from `servers.jsonl` of a run, from its present end.

    Args:
        run_dir: the run directory.
        say: a function that prints a line for the user.
        end: a function that ends a process that has not answered; the rank of a server that never answered is None.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None], end: End) -> None:
        self.follower = LineFollower.at_end(run_dir / "servers.jsonl")
        self.say = say
        self.end = end
        self.mode = ""
        self.left_out: dict[str, int] | None = None

    def read(self) -> None:
        """Take in the events since the last call."""
        for event in events_after(self.follower):
            self._take(event)

    def say_end(self) -> None:
        """Print the number of gradients that were left out, once all workers have ended."""
        if self.left_out is None and self.mode not in ("", "sync"):
            self.say(f"paceline: it is not known how many gradients mode={self.mode} left out: no server reported it")
        elif self.left_out is not None and (self.left_out["gradients"] or self.mode != "sync"):
            missing = self.left_out["gradients"]
            of = self.left_out["of"]
            self.say(f"paceline: mode={self.mode} left out {missing} of {of} gradients")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind in ("servers_started", "coordinator_back"):
            self.mode = event["mode"]
        elif kind == "waiting":
            self.say(_waiting(event))
        elif kind == "back":
            self.say(f"paceline: worker {event['worker']} is back after {event['waited_s']:.0f} s")
        elif kind == "left_out":
            self.say(f"paceline: worker {event['worker']} is silent or lost; the others go on without it")
        elif kind == "joined_again":
            self.say(f"paceline: worker {event['worker']} takes part again")
        elif kind == "given_up":
            self.end(event.get("worker", event.get("rank")), event["pid"], event["silent_s"])
        elif kind == "notice":
            self.say(f"paceline: {event['text']}")
        elif kind == "servers_ended" and event["counted"] is not None:
            missing = max(0, event["gradients"] - event["counted"])
            self.left_out = {"gradients": missing, "of": event["gradients"]}


def _waiting(event: dict[str, Any]) -> str:
    worker = event["worker"]
    step = event["step"]
    silent_s = event["silent_s"]
    if event["is_connected"]:
        return f"paceline: step {step} waits for worker {worker}, which has been silent for {silent_s:.0f} s"
    return f"paceline: step {step} waits for another process to take the place of worker {worker}"


@dataclass(slots=True)
class Replaced:
    """The times at which processes were started, and the rule whether one that died is started again.

    Args:
        ranks: the number of workers, numbered from 0.
        servers: the number of servers, numbered after them; the coordinator comes last. 0: nobody is replaced.
    """

    ranks: int
    servers: int
    since_s: dict[int, float] = field(default_factory=dict)
    short_lives: dict[int, int] = field(default_factory=dict)

    def name(self, rank: int) -> str:
        """Return the name of a process for users."""
        if rank < self.ranks:
            return f"worker {rank}"
        if rank < self.ranks + self.servers:
            return f"server {rank - self.ranks}"
        return "the coordinator"

    def started(self, ranks: Iterable[int], now_s: float) -> None:
        """Take in that these processes have been started."""
        self.since_s.update(dict.fromkeys(ranks, now_s))

    def should(self, rank: int, status: int, now_s: float) -> bool:
        """Return True if a process that ended is to be started again: a signal ended it, and it has tries left.

        Args:
            rank: the number of the process.
            status: the exit code; below 0 the signal.
            now_s: the seconds of the supervisor's clock.
        """
        # An exit code is an error of the process itself, which another in its place would meet too.
        if not self.servers or status >= 0:
            return False
        lived_s = now_s - self.since_s.get(rank, now_s)
        self.short_lives[rank] = self.short_lives.get(rank, 0) + 1 if lived_s < LIVED_S else 0
        return self.short_lives[rank] <= TRIES
