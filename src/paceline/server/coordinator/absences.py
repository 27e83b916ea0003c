"""Who is waited for, what is told of it, and when the wait ends: under `sync` every round needs every worker.

A worker that says nothing may be stopped, or under a debugger, and may go on. After `patience_s` it is given up: where
somebody starts another in its place, that is asked for; otherwise the job ends with an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.nouns.errors import PeerLostError, UsageError
from paceline.server.protocol.messages import Worker

SILENCE = "PACELINE_SILENCE_S"  # the variable that says how long a worker may be silent
SILENCE_S = 60.0
BY_HAND_S = 600.0  # for a person, or Kubernetes, to start another worker
_RESUME = "start the job again; --resume goes on from its last checkpoint, where it has one"


def silence_s(environment: Mapping[str, str]) -> float:
    """How long a worker may be silent before another takes its place.

    Raises:
        UsageError: the variable holds no number of seconds.
    """
    text = environment.get(SILENCE, "")
    try:
        seconds = float(text) if text else SILENCE_S
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 1e9:
        raise UsageError(f"the environment variable {SILENCE}", f"it is {text!r}", "write seconds, 1 or more: 60")
    return seconds


@dataclass(slots=True)
class Absences:
    """What was told of whom.

    Args:
        patience_s: silence after which a worker is given up.
        is_replaced: whether somebody starts another in the place of a worker whose process has ended.
    """

    patience_s: float
    is_replaced: bool
    told: dict[Worker, float] = field(default_factory=dict)  # who is waited for, and since when
    given_up: set[Any] = field(default_factory=set)
    given_up_at: dict[int, int] = field(default_factory=dict)  # by worker's number, the step of the last time
    waits: dict[Worker, tuple[int, float]] = field(default_factory=dict)  # at which step somebody waits, since when

    def look(
        self, missing: Mapping[Worker, tuple[float, int, bool]], pids: Mapping[Worker, int], tell_s: float, now_s: float
    ) -> list[dict[str, Any]]:
        """What is to be told now.

        Args:
            missing: workers that are waited for: seconds of silence, the step that waits, whether they are connected.
            pids: of workers' processes, as far as they are known.
            tell_s: silence that is worth telling.
            now_s: the time.

        Raises:
            PeerLostError: nobody can take a worker's place.
        """
        events: list[dict[str, Any]] = []
        names = {worker[0] for worker in missing}
        for worker in [worker for worker in self.told if worker not in missing]:
            since_s = self.told.pop(worker)
            if worker[0] not in names:
                events.append({"event": "back", "worker": worker[0], "waited_s": round(now_s - since_s, 1)})
        for worker, (quiet_s, step, is_connected) in missing.items():
            facts = {"worker": worker[0], "step": step, "silent_s": round(quiet_s, 1), "is_connected": is_connected}
            if quiet_s > tell_s and worker not in self.told:
                self.told[worker] = now_s - quiet_s
                events.append({"event": "waiting", **facts})
            if quiet_s > self.patience_s and worker not in self.given_up:
                events += self._give_up(worker, facts, pids.get(worker))
        return events

    def _give_up(self, worker: Worker, facts: dict[str, Any], pid: int | None) -> list[dict[str, Any]]:
        name, step = worker[0], facts["step"]
        if not self.is_replaced:
            found = "it has been silent" if facts["is_connected"] else "it is lost, and none has taken its place"
            raise PeerLostError(f"worker {name} at step {step}", f"{found} for {self.patience_s:g} s", _RESUME)
        if not facts["is_connected"] or pid is None:
            return []  # whoever starts another knows that its process has ended
        if self.given_up_at.get(name) == step:
            raise PeerLostError(
                f"worker {name} at step {step}",
                f"it was silent for {self.patience_s:g} s, and so was the one that took its place",
                f"look for what blocks all of its threads in this step; {SILENCE} sets a longer time",
            )
        self.given_up.add(worker)
        self.given_up_at[name] = step
        return [{"event": "given_up", "worker": name, "pid": pid, "silent_s": facts["silent_s"]}]

    def look_at_others(
        self, silent: Mapping[Any, tuple[str, float]], pids: Mapping[Any, int], has_begun: bool
    ) -> list[dict[str, Any]]:
        """The same for whoever else is connected: a server, or before the start anybody.

        Args:
            silent: by who it is, its name for people and seconds of silence.
            pids: of their processes, as far as they are known.
            has_begun: whether the job goes on without them.

        Raises:
            PeerLostError: nobody can take its place.
        """
        events: list[dict[str, Any]] = []
        for who, (name, quiet_s) in silent.items():
            if quiet_s <= self.patience_s or who in self.given_up:
                continue
            can_be_replaced = self.is_replaced and who in pids
            if has_begun and not can_be_replaced:
                continue
            if not can_be_replaced:
                raise PeerLostError(name, f"it has been silent for {self.patience_s:g} s", _RESUME)
            self.given_up.add(who)
            own = {"worker": who[0]} if isinstance(who, tuple) else {"node": who}
            events.append({"event": "given_up", **own, "pid": pids[who], "silent_s": round(quiet_s, 1)})
        return events

    def note_waiting(self, worker: Worker, clock: int, is_waiting: bool, now_s: float) -> None:
        """A worker says whether it waits for the others, at its step `clock`."""
        if not is_waiting:
            self.waits.pop(worker, None)
        elif self.waits.get(worker, (-1, 0.0))[0] != clock:
            self.waits[worker] = clock, now_s

    def check_left(self, left: Mapping[Worker, int], others: list[Worker], tell_s: float, now_s: float) -> None:
        """Raise PeerLostError when the others wait for workers that have left.

        Args:
            left: workers that left before the last step, and the steps that they took.
            others: the other active workers.
            tell_s: a wait that is none of the moment between two workers' ends.
            now_s: the time.
        """
        if not left or not others:
            return
        # A worker's last word may be of an earlier step's wait, which those that left have not caused.
        known = {other: self.waits[other] for other in others if other in self.waits}
        waits_s = [now_s - known[o][1] if o in known and known[o][0] >= min(left.values()) else 0.0 for o in others]
        if min(waits_s) <= tell_s:
            return
        worker, steps = min(left.items())
        raise PeerLostError(
            f"worker {worker[0]} should take step {steps + 1}",
            "it has left, and the others wait for its samples",
            "let the loops of all workers take the same number of steps",
        )
