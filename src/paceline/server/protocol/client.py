"""Implement a worker's side of the protocol: pull, compute, push; messages that may be lost are sent again.

`Client` speaks for one key range; `Session` for all of them: a step begins when every range has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.protocol.messages import (
    COORDINATOR,
    Configuration,
    Out,
    Pull,
    Pulled,
    Push,
    Pushed,
    Sent,
    Worker,
    WorkerHeartbeat,
)

PATIENCE_S = 5.0  # for ranges to come to the same clock


@dataclass(slots=True)
class Client:
    """The state machine of a worker for one range.

    Args:
        worker: its name and incarnation.
        segments: how many the range has.
        clock: its first step.
        steps: the step before which it ends.
    """

    worker: Worker
    segments: int
    clock: int
    steps: int
    configuration: Configuration | None = None
    is_reading: bool = True
    request: int = 0
    updates_read: int = 0  # updates in the parameters that it has
    least_config_version: int = -1  # of an answer: one of a fenced tail may be older than what was acknowledged
    gradients: Sequence[tuple[Any, Any]] = ()  # by segment: note and payload
    acknowledged: set[int] = field(default_factory=set)  # segments
    was_in: bool = False  # it has been one of the active workers

    @property
    def is_out(self) -> bool:
        """True if it was taken for dead: it may come back as another incarnation."""
        return self.was_in and self.configuration is not None and self.worker not in self.configuration.workers

    @property
    def is_done(self) -> bool:
        """True if all steps are taken."""
        return self.clock >= self.steps

    @property
    def config_version(self) -> int:
        """The version of the configuration that it has; -1 before the first."""
        return self.configuration.config_version if self.configuration is not None else -1

    def push(self, gradients: Sequence[tuple[Any, Any]], clock: int) -> Out:
        """Send the gradients of the step `clock`, a note and a payload for each segment."""
        self.gradients = gradients
        self.clock = clock
        self.acknowledged = set()
        self.is_reading = False
        return self.ask()

    def read_again(self, clock: int) -> Out:
        """Ask for the parameters of the step `clock`."""
        self.clock = clock
        self.is_reading = True
        return self.ask()

    def on(self, message: Any) -> tuple[Out, Pulled | None]:
        """Handle one message; return the messages that follow from it, and the parameters if they have come."""
        if isinstance(message, Configuration):
            return self._on_configuration(message), None
        if isinstance(message, Pulled):
            if not self.expects(message):
                return [], None
            self._on_pulled(message)
            return [], message
        if isinstance(message, Pushed):
            return self._on_pushed(message), None
        return [], None

    def _on_configuration(self, new: Configuration) -> Out:
        if self.configuration is not None and new.config_version <= self.configuration.config_version:
            return []
        self.configuration = new
        if self.worker in new.workers and not self.was_in:  # one that joins begins where the others are
            self.was_in = True
            self.clock = min(max(self.clock, new.workers[self.worker]), self.steps)
        # To the new head or tail, in the new version: what was sent in the old one is refused.
        return self.ask()

    def _on_pulled(self, message: Pulled) -> None:
        # Doubled or late answers to this pull have the old number, and are dropped: see `expects`.
        self.request += 1
        self.clock = message.clock
        self.updates_read = message.number
        self.is_reading = False

    def _on_pushed(self, message: Pushed) -> Out:
        if self.is_reading or message.clock != self.clock or not self.gradients:
            return []
        # The acknowledged push is in every replica of that version. The tail of an older one may lack it.
        self.least_config_version = max(self.least_config_version, message.config_version)
        self.acknowledged.add(message.segment)
        if len(self.acknowledged) < self.segments:
            return []
        # Nothing of this step is sent again: the worker may write the next gradients over these.
        self.gradients = ()
        return self.read_again(self.clock + 1)

    def expects(self, message: Pulled) -> bool:
        """Return True if this answer is the one that is waited for."""
        is_new = message.request == self.request and message.config_version >= self.least_config_version
        return self.is_reading and is_new

    def ask(self) -> Out:
        """Send whatever has not been answered: the pull, or the gradients that are not acknowledged."""
        now = self.configuration
        if now is None or not now.chain or self.worker not in now.workers:
            return []
        head, tail = now.chain[0], now.chain[-1]
        if self.is_reading:
            return [(tail, Pull(now.config_version, self.worker, self.request, self.clock))]
        out: Out = []
        for segment, (note, payload) in enumerate(self.gradients):
            if segment not in self.acknowledged:
                push = Push(now.config_version, self.worker, self.clock, segment, self.updates_read, note, payload)
                out.append((head, push))
        return out


@dataclass(slots=True)
class Session:
    """A worker's clients, one for each range.

    Args:
        clients: the worker's client of each range.
        patience_s: how long ranges may stand at different clocks before the worker goes on from the least.
        is_exact: whether it never does: parameters of different steps give another gradient than one process has.
    """

    clients: Sequence[Client]
    patience_s: float = PATIENCE_S
    is_exact: bool = False
    answers: dict[int, Pulled] = field(default_factory=dict)  # of the step that begins, by range
    differ_since_s: float | None = None
    least: int = 0  # the clock of the range that was behind then

    @property
    def worker(self) -> Worker:
        """The worker's name and incarnation."""
        return self.clients[0].worker

    @property
    def clock(self) -> int:
        """The step that all ranges have come to."""
        return min(client.clock for client in self.clients)

    @property
    def is_out(self) -> bool:
        """True if it was taken for dead."""
        return any(client.is_out for client in self.clients)

    @property
    def is_done(self) -> bool:
        """True if all steps are taken, and their parameters read."""
        return len(self.answers) == len(self.clients) and all(client.is_done for client in self.clients)

    def push(self, gradients: Sequence[Sequence[tuple[Any, Any]]]) -> Sent:
        """Send the gradients of the present step: by range and segment a note and a payload."""
        clock = self.clock
        self.answers = {}
        sent: Sent = []
        for number, (client, of_range) in enumerate(zip(self.clients, gradients, strict=True)):
            sent += with_range(number, client.push(of_range, clock))
        return sent

    def on(self, number: int, message: Any, now_s: float) -> tuple[Sent, list[Pulled] | None]:
        """Handle one message about range `number`.

        Returns:
            The messages that follow from it, and the answers of all ranges if a step may begin.
        """
        out, pulled = self.clients[number].on(message)
        sent = with_range(number, out)
        if pulled is None:
            return sent, None
        self.answers[number] = pulled
        if len(self.answers) < len(self.clients):
            return sent, None
        # Rounds that went on without this worker, or a worker and a server lost in one step, leave ranges at different
        # clocks.
        clocks = {answer.clock for answer in self.answers.values()}
        if len(clocks) == 1:
            return sent, self._begin_step(min(clocks))
        if self.differ_since_s is None:
            self.differ_since_s = now_s
            self.least = min(clocks)
        if self._goes_on_from_least(now_s):
            return sent, self._begin_step(min(clocks))
        return sent + self._read_ranges_behind(max(clocks)), None

    def heartbeat(self, is_leaving: bool = False) -> Sent:
        """Return the messages that say that this worker is alive; or that it leaves."""
        sent: Sent = []
        for number, client in enumerate(self.clients):
            message = WorkerHeartbeat(client.worker, client.config_version, self.clock, is_leaving)
            sent.append((COORDINATOR, number, message))
        return sent

    def repeat(self, now_s: float) -> Sent:
        """Return again the messages that may have been lost."""
        sent: Sent = []
        for number, client in enumerate(self.clients):
            if number in self.answers:
                continue
            if client.is_reading and self._goes_on_from_least(now_s):
                client.clock = min(client.clock, self.least)  # it may wait for this worker's gradient of that step
            sent += with_range(number, client.ask())
        return sent

    def _goes_on_from_least(self, now_s: float) -> bool:
        """Return True if ranges have stood at different clocks for too long to wait."""
        since_s = self.differ_since_s
        return since_s is not None and not self.is_exact and now_s - since_s >= self.patience_s

    def _read_ranges_behind(self, clock: int) -> Sent:
        """Ask the ranges that are behind for the parameters of the step `clock`."""
        behind = [number for number, answer in self.answers.items() if answer.clock < clock]
        sent: Sent = []
        for number in behind:
            # Its answer is of an older step; the new one comes when the range has caught up.
            del self.answers[number]
            sent += with_range(number, self.clients[number].read_again(clock))
        return sent

    def _begin_step(self, clock: int) -> list[Pulled]:
        self.differ_since_s = None
        for client in self.clients:
            client.clock = clock
            client.is_reading = False
        return [self.answers[number] for number in range(len(self.clients))]


def with_range(number: int, out: Out) -> Sent:
    """Return the messages as messages about range `number`."""
    return [(addressee, number, message) for addressee, message in out]
