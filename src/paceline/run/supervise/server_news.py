"""Follow what the coordinator of a job's parameter servers tells the supervisor, in `servers.jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.nouns.events import decoded
from paceline.nouns.reading import lines_after

End = Callable[[int | None, int, float], None]  # a rank, its process, the seconds for which it has not answered


class ServerNews:
    """Follows `servers.jsonl` of a run, from its present end.

    Args:
        run_dir: the run's folder.
        say: prints a line for the user.
        end: ends a process that has not answered; the rank of a server that never answered is None.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None], end: End) -> None:
        self.path = run_dir / "servers.jsonl"
        self.offset = self.path.stat().st_size if self.path.exists() else 0
        self.say = say
        self.end = end
        self.mode = ""
        self.left_out: dict[str, int] | None = None

    def read(self) -> None:
        """Take in what has been written since."""
        try:
            lines, self.offset = lines_after(self.path, self.offset)
        except OSError:
            return  # it is not there yet
        for line in lines:
            for event in decoded(line):
                self._take(event)

    def tell_end(self) -> None:
        """Say how much was left out, once all workers have ended."""
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
