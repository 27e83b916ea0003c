"""Wait for silent and lost processes, tell of it by events, and end the wait. `sync` needs every worker.

A silent worker may be stopped, or under a debugger, and may go on. After `patience_s` it is given up: where somebody
starts another in its place, an event asks for that; otherwise the job ends with an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.nouns.errors import PeerLostError, UsageError

if TYPE_CHECKING:  # every command that starts a job imports this file
    from paceline.server.protocol.messages import Worker

SILENCE = "PACELINE_SILENCE_S"  # the variable that says how long a worker may be silent
SILENCE_S = 60.0
BY_HAND_S = 600.0  # for someone, or Kubernetes, to start another worker
_RESUME = "start the job again; --resume goes on from its last checkpoint, where it has one"


def silence_s(environment: Mapping[str, str]) -> float:
    """Return the silence, in seconds, after which another takes a worker's place.

    Raises:
        UsageError: the variable holds no number of seconds.
    """
    text = environment.get(SILENCE, "")
    if not text:
        return SILENCE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0  # refused below
    if not 1.0 <= seconds <= 1e9:
        raise UsageError(f"the environment variable {SILENCE}", f"it is {text!r}", "write seconds, 1 or more: 60")
    return seconds


@dataclass(slots=True)
class Absences:
    """Keep which silent and lost processes were reported by events, and which were given up.

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
        """Return the events about workers that rounds wait for: "waiting", "back" and "given_up".

        Args:
            missing: the workers that are waited for: seconds of silence, the step that waits, whether they are
                connected.
            pids: the process ids of workers, as far as they are known.
            tell_s: silence that is worth telling.
            now_s: the current time, in seconds.

        Raises:
            PeerLostError: nobody can take a worker's place.
        """
        events: list[dict[str, Any]] = []
        names = {worker[0] for worker in missing}
        returned = [worker for worker in self.told if worker not in missing]
        for worker in returned:
            since_s = self.told.pop(worker)
            if worker[0] not in names:  # otherwise another incarnation of it is missing now
                events.append({"event": "back", "worker": worker[0], "waited_s": round(now_s - since_s, 1)})
        for worker, (silent_s, step, is_connected) in missing.items():
            wait = {"worker": worker[0], "step": step, "silent_s": round(silent_s, 1), "is_connected": is_connected}
            if silent_s > tell_s and worker not in self.told:
                # Since when it is silent, not since now: `waited_s` of the event "back" counts from there.
                self.told[worker] = now_s - silent_s
                events.append({"event": "waiting", **wait})
            if silent_s > self.patience_s and worker not in self.given_up:
                events += self._give_up(worker, wait, pids.get(worker))
        return events

    def _give_up(self, worker: Worker, wait: dict[str, Any], pid: int | None) -> list[dict[str, Any]]:
        """Return the event that asks for another worker in this one's place.

        Raises:
            PeerLostError: nobody starts one, or the one that took the place is silent at the same step.
        """
        name, step = worker[0], wait["step"]
        if not self.is_replaced:
            found = "it has been silent" if wait["is_connected"] else "it is lost, and none has taken its place"
            raise PeerLostError(
                f"worker {name} should go on at step {step}", f"{found} for {self.patience_s:g} s", _RESUME
            )
        if not wait["is_connected"] or pid is None:
            return []  # whoever starts another knows that its process has ended
        # Another process that stops at the same step shows that the step is at fault, not the process.
        if self.given_up_at.get(name) == step:
            raise PeerLostError(
                f"worker {name} should go on at step {step}",
                f"it was silent for {self.patience_s:g} s, and so was the one that took its place",
                f"look for what blocks all of its threads in this step; {SILENCE} sets a longer time",
            )
        self.given_up.add(worker)
        self.given_up_at[name] = step
        return [{"event": "given_up", "worker": name, "pid": pid, "silent_s": wait["silent_s"]}]

    def look_at_others(
        self, silent: Mapping[object, tuple[str, float]], pids: Mapping[object, int], has_begun: bool
    ) -> list[dict[str, Any]]:
        """Return "given_up" events about other silent processes: servers, and before the start workers too.

        Args:
            silent: by who it is, its name for people and seconds of silence.
            pids: of their processes, as far as they are known.
            has_begun: whether the job goes on without them.

        Raises:
            PeerLostError: nobody can take its place.
        """
        events: list[dict[str, Any]] = []
        for peer, (name, silent_s) in silent.items():
            if silent_s <= self.patience_s or peer in self.given_up:
                continue
            can_be_replaced = self.is_replaced and peer in pids
            if has_begun and not can_be_replaced:
                continue
            if not can_be_replaced:
                raise PeerLostError(name, f"it has been silent for {self.patience_s:g} s", _RESUME)
            self.given_up.add(peer)
            name_in_event = {"worker": peer[0]} if isinstance(peer, tuple) else {"node": peer}
            events.append({"event": "given_up", **name_in_event, "pid": pids[peer], "silent_s": round(silent_s, 1)})
        return events

    def note_waiting(self, worker: Worker, clock: int, is_waiting: bool, now_s: float) -> None:
        """Keep since when a worker has waited for the others at its step `clock`, by what it says itself."""
        if not is_waiting:
            self.waits.pop(worker, None)
        elif self.waits.get(worker, (-1, 0.0))[0] != clock:
            self.waits[worker] = clock, now_s

    def check_left(self, departed: Mapping[Worker, int], active: list[Worker], tell_s: float, now_s: float) -> None:
        """Raise PeerLostError when the others wait for workers that have left.

        Args:
            departed: the workers that left before the last step, and the steps that they took.
            active: the other active workers.
            tell_s: seconds after which a wait counts; workers do not end at the same moment.
            now_s: the current time, in seconds.
        """
        if not departed or not active:
            return
        # A worker's last word may be of an earlier step's wait, which those that left have not caused.
        first_step_missed = min(departed.values())
        for waiting in active:
            clock, since_s = self.waits.get(waiting, (-1, now_s))
            if clock < first_step_missed or now_s - since_s <= tell_s:
                return
        worker, steps = min(departed.items())
        raise PeerLostError(
            f"worker {worker[0]} should take step {steps + 1}",
            "it has left, and the others wait for its samples",
            "let the loops of all workers take the same number of steps",
        )
