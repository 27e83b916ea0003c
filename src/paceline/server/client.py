"""A worker's side of one key range: pull, compute, push, again; whatever is lost is said again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.messages import (
    COORDINATOR,
    Configuration,
    Out,
    Pull,
    Pulled,
    Push,
    Pushed,
    Worker,
    WorkerBeat,
)


@dataclass(slots=True)
class Client:
    """The state machine of one worker.

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
    least_epoch: int = -1  # of an answer: one of a fenced tail may be older than what was acknowledged
    gradients: Sequence[Any] = ()
    weight: float = 0.0
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

    def push(self, gradients: Sequence[Any], weight: float) -> Out:
        """Send the gradients of the present step, one for each segment."""
        self.gradients, self.weight, self.sent, self.is_reading = gradients, weight, set(), False
        return self._ask()

    def tick(self) -> Out:
        """Now and then: say again what has not been answered."""
        epoch = self.configuration.epoch if self.configuration is not None else -1
        return [(COORDINATOR, WorkerBeat(self.worker, epoch, self.clock, self.is_done)), *self._ask()]

    def on(self, message: Any) -> tuple[Out, Any]:
        """Take one message; what follows from it, and the parameters if they have come."""
        if isinstance(message, Configuration):
            if self.configuration is None or message.epoch > self.configuration.epoch:
                self.configuration = message
                if self.worker in message.workers and not self.was_in:  # one that joins begins where the others are
                    self.was_in = True
                    self.clock = max(self.clock, message.workers[self.worker])
                return self._ask(), None
        elif isinstance(message, Pulled) and self.is_reading and message.request == self.request:
            if message.epoch >= self.least_epoch:
                self.request += 1
                self.clock = message.clock
                return [], message.values
        elif isinstance(message, Pushed) and not self.is_reading and message.clock == self.clock:
            self.least_epoch = max(self.least_epoch, message.epoch)
            self.sent.add(message.segment)
            if len(self.sent) == self.segments:
                self.clock += 1
                self.is_reading = True
                return self._ask(), None
        return [], None

    def _ask(self) -> Out:
        now = self.configuration
        if now is None or self.is_done or not now.chain or self.worker not in now.workers:
            return []
        if self.is_reading:
            return [(now.chain[-1], Pull(now.epoch, self.worker, self.request, self.clock))]
        return [
            (now.chain[0], Push(now.epoch, self.worker, self.clock, segment, gradient, self.weight))
            for segment, gradient in enumerate(self.gradients)
            if segment not in self.sent
        ]
