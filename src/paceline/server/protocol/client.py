"""A worker's side: pull, compute, push, again; whatever is lost is said again.

`Client` is one key range's; `Session` is all of them: a step begins when every range has answered.
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
    """One range's state machine.

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
    read: int = 0  # updates in the parameters that it has
    least_epoch: int = -1  # of an answer: one of a fenced tail may be older than what was acknowledged
    gradients: Sequence[tuple[Any, Any]] = ()  # by segment: note and payload
    sent: set[int] = field(default_factory=set)  # segments that are acknowledged
    was_in: bool = False

    @property
    def is_out(self) -> bool:
        """Whether it was taken for dead: it may come back as another incarnation."""
        return self.was_in and self.configuration is not None and self.worker not in self.configuration.workers

    @property
    def is_done(self) -> bool:
        """Whether all steps are taken."""
        return self.clock >= self.steps

    def push(self, gradients: Sequence[tuple[Any, Any]], clock: int) -> Out:
        """Send the gradients of the step `clock`, a note and a payload for each segment."""
        self.gradients, self.clock, self.sent, self.is_reading = gradients, clock, set(), False
        return self.ask()

    def read_again(self, clock: int) -> Out:
        """Ask for the parameters of the step `clock`."""
        self.clock, self.is_reading = clock, True
        return self.ask()

    def on(self, message: Any) -> tuple[Out, Pulled | None]:
        """Take one message; what follows from it, and the parameters if they have come."""
        if isinstance(message, Configuration):
            if self.configuration is None or message.epoch > self.configuration.epoch:
                self.configuration = message
                if self.worker in message.workers and not self.was_in:  # one that joins begins where the others are
                    self.was_in = True
                    self.clock = min(max(self.clock, message.workers[self.worker]), self.steps)
                return self.ask(), None
        elif isinstance(message, Pulled) and self.expects(message):
            self.request += 1
            self.clock, self.read, self.is_reading = message.clock, message.number, False
            return [], message
        elif isinstance(message, Pushed) and not self.is_reading and message.clock == self.clock and self.gradients:
            self.least_epoch = max(self.least_epoch, message.epoch)
            self.sent.add(message.segment)
            if len(self.sent) == self.segments:
                self.gradients = ()
                return self.read_again(self.clock + 1), None
        return [], None

    def expects(self, message: Pulled) -> bool:
        """Whether this answer is the one that is waited for."""
        is_new = message.request == self.request and message.epoch >= self.least_epoch
        return self.is_reading and is_new

    def ask(self) -> Out:
        """Say what has not been answered."""
        now = self.configuration
        if now is None or not now.chain or self.worker not in now.workers:
            return []
        if self.is_reading:
            return [(now.chain[-1], Pull(now.epoch, self.worker, self.request, self.clock))]
        return [
            (now.chain[0], Push(now.epoch, self.worker, self.clock, segment, self.read, note, payload))
            for segment, (note, payload) in enumerate(self.gradients)
            if segment not in self.sent
        ]


@dataclass(slots=True)
class Session:
    """A worker's clients, one for each range.

    Args:
        clients: by range.
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
        """Whose it is."""
        return self.clients[0].worker

    @property
    def clock(self) -> int:
        """The step that all ranges have come to."""
        return min(client.clock for client in self.clients)

    @property
    def is_out(self) -> bool:
        """Whether it was taken for dead."""
        return any(client.is_out for client in self.clients)

    @property
    def is_done(self) -> bool:
        """Whether all steps are taken, and their parameters read."""
        return len(self.answers) == len(self.clients) and all(client.is_done for client in self.clients)

    def push(self, gradients: Sequence[Sequence[tuple[Any, Any]]]) -> Sent:
        """Send the gradients of the present step: by range and segment a note and a payload."""
        clock, self.answers = self.clock, {}
        sent: Sent = []
        for number, (client, own) in enumerate(zip(self.clients, gradients, strict=True)):
            sent += with_range(number, client.push(own, clock))
        return sent

    def on(self, number: int, message: Any, now_s: float) -> tuple[Sent, list[Pulled] | None]:
        """Take one message about range `number`; what follows, and all ranges' answers when a step may begin."""
        out, pulled = self.clients[number].on(message)
        sent = with_range(number, out)
        if pulled is None:
            return sent, None
        self.answers[number] = pulled
        if len(self.answers) < len(self.clients):
            return sent, None
        clocks = {answer.clock for answer in self.answers.values()}
        if len(clocks) > 1 and self.differ_since_s is None:
            self.differ_since_s, self.least = now_s, min(clocks)
        if len(clocks) > 1 and not self._goes_on_from_least(now_s):
            return sent + self._level(max(clocks)), None
        return sent, self._begin(min(clocks))

    def heartbeat(self, is_leaving: bool = False) -> Sent:
        """Now and then: a sign of life; or the last one."""
        return [
            (COORDINATOR, number, WorkerHeartbeat(client.worker, _epoch(client), self.clock, is_leaving))
            for number, client in enumerate(self.clients)
        ]

    def repeat(self, now_s: float) -> Sent:
        """Say again what may have been lost."""
        sent: Sent = []
        for number, client in enumerate(self.clients):
            if number in self.answers:
                continue
            if client.is_reading and self._goes_on_from_least(now_s):
                client.clock = min(client.clock, self.least)  # it may wait for this worker's gradient of that step
            sent += with_range(number, client.ask())
        return sent

    def _goes_on_from_least(self, now_s: float) -> bool:
        """Whether ranges have stood at different clocks for too long to wait."""
        since_s = self.differ_since_s
        return since_s is not None and not self.is_exact and now_s - since_s >= self.patience_s

    def _level(self, clock: int) -> Sent:
        """Read the ranges again that are behind."""
        sent: Sent = []
        for number in [number for number, answer in self.answers.items() if answer.clock < clock]:
            del self.answers[number]
            sent += with_range(number, self.clients[number].read_again(clock))
        return sent

    def _begin(self, clock: int) -> list[Pulled]:
        self.differ_since_s = None
        for client in self.clients:
            client.clock, client.is_reading = clock, False
        return [self.answers[number] for number in range(len(self.clients))]


def with_range(number: int, out: Out) -> Sent:
    """Messages about range `number`."""
    return [(addressee, number, message) for addressee, message in out]


def _epoch(client: Client) -> int:
    return client.configuration.epoch if client.configuration is not None else -1
