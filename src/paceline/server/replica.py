"""One replica of one key range: gradients in, updates down the chain, parameters out.

The head gathers gradients and makes updates of them; only the update travels down the chain (chain replication, van
Renesse and Schneider 2004, after aggregation as Li et al. 2014 have it). The tail answers reads, so nobody ever sees
what a failure could take back. A push is acknowledged once the tail has it.

Promises: a push counts at most once; an acknowledged one is never lost while one synced replica of the chain lives; all
replicas apply the same updates in the same order; a reader at clock c sees what its mode promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.server.admission import Mode
from paceline.server.messages import (
    COORDINATOR,
    Beat,
    Configuration,
    Forward,
    Forwarded,
    Missing,
    Node,
    Out,
    Pull,
    Pulled,
    Push,
    Pushed,
    Stale,
    State,
    Update,
    Worker,
)


class Store(Protocol):
    """The range's parameters and their optimizer."""

    def summed(self, payloads: Sequence[Any]) -> Any:
        """The sum of gradients, in the order given."""

    def apply(self, update: Update) -> None:
        """Change the parameters of one segment."""

    def read(self) -> Any:
        """The parameters."""

    def content(self) -> Any:
        """Everything, for a replica that joins."""

    def restore(self, content: Any) -> None:
        """Take over what `content` gave."""

    def clear(self) -> None:
        """Hold nothing."""


@dataclass(slots=True)
class Replica:
    """The state machine.

    Args:
        node: this process.
        segments: how many the range has.
        mode: when gradients become an update, and who may read.
        store: parameters and optimizer.
    """

    node: Node
    segments: int
    mode: Mode
    store: Store
    configuration: Configuration = field(default_factory=lambda: Configuration(-1, (), {}))
    is_synced: bool = False
    applied: dict[int, dict[Worker, int]] = field(init=False)  # by segment: each worker's last clock
    rounds: dict[int, int] = field(init=False)  # by segment: rounds closed
    settled: dict[int, int] = field(init=False)  # by segment: rounds closed that can't be lost any more
    number: int = 0  # updates applied
    kept: dict[int, Update] = field(default_factory=dict)  # those that the tail has not said to have, by number
    committed: int = 0  # updates that every replica has
    made_by: dict[tuple[Worker, int, int], int] = field(default_factory=dict)  # push to the number of its update
    open: dict[int, dict[Worker, Push]] = field(init=False)  # by segment: gradients of the round under way
    waiting: list[Pull] = field(default_factory=list)
    joined: int = -1  # the epoch at which this process last joined the chain
    state_epoch: int = -1  # the last in which it was in the chain, with everything

    def __post_init__(self) -> None:
        self._clear()

    def on(self, message: Any) -> Out:
        """Take one message; the messages that follow from it."""
        if isinstance(message, Configuration):
            return self._configure(message)
        if message.epoch != self.configuration.epoch:
            is_workers = isinstance(message, Push | Pull)
            return [(message.worker, Stale(self.configuration.epoch))] if is_workers else []
        if self.node not in self.configuration.chain:
            return []
        if isinstance(message, State):
            return self._take_over(message)
        if not self.is_synced:
            return []
        act: dict[type, Any] = {
            Push: self._pushed,
            Pull: self._pulled,
            Forward: self._forwarded,
            Forwarded: self._acknowledged,
            Missing: self._resend,
        }
        out: Out = act[type(message)](message)
        return out

    def tick(self) -> Out:
        """Now and then: say again what may have been lost."""
        state_epoch = self.state_epoch if self.is_synced else -1
        out: Out = [(COORDINATOR, Beat(self.node, self.configuration.epoch, state_epoch))]
        following = self.successor
        if self.is_synced and following is not None:
            if self._is_joining(following):
                out.append((following, self._state()))
            out += [
                (following, Forward(self.configuration.epoch, n, self.kept[n]))
                for n in range(self.committed, self.number)
            ]
        return out

    @property
    def is_head(self) -> bool:
        """Whether workers push here."""
        return bool(self.configuration.chain) and self.configuration.chain[0] == self.node

    @property
    def is_tail(self) -> bool:
        """Whether workers pull here."""
        return bool(self.configuration.chain) and self.configuration.chain[-1] == self.node

    @property
    def successor(self) -> Node | None:
        """The next of the chain."""
        return self._neighbour(1)

    @property
    def predecessor(self) -> Node | None:
        """The one before in the chain."""
        return self._neighbour(-1)

    def _neighbour(self, step: int) -> Node | None:
        chain = self.configuration.chain
        if self.node not in chain:
            return None
        at = chain.index(self.node) + step
        return chain[at] if 0 <= at < len(chain) else None

    def _is_joining(self, node: Node | None) -> bool:
        joining = self.configuration.joining
        return joining is not None and joining[0] == node

    def _clear(self) -> None:
        self.store.clear()
        self.applied = {segment: {} for segment in range(self.segments)}
        self.rounds = dict.fromkeys(range(self.segments), 0)
        self.settled = dict.fromkeys(range(self.segments), 0)
        self.open = {segment: {} for segment in range(self.segments)}
        self.number = self.committed = 0
        self.kept, self.made_by, self.waiting = {}, {}, []
        self.is_synced = False

    def _configure(self, new: Configuration) -> Out:
        now = self.configuration
        if new.epoch < now.epoch or (new.epoch == now.epoch and new.confirmed <= now.confirmed):
            return []
        self.configuration = new
        if self.node not in new.chain:
            if self.node not in new.holders:
                self._clear()  # others went on without it: what it held alone must not come back
            return []
        if new.epoch == now.epoch:
            return self._commit() if self.is_synced and self.is_tail else []
        if new.joining is not None and new.joining[0] == self.node and new.joining[1] != self.joined:
            self._clear()  # it was out of the chain without knowing
            self.joined = new.joining[1]
        if new.epoch == 0:
            self.is_synced = True
        if not self.is_synced:
            return []
        self.state_epoch = new.epoch
        # Gradients of the round under way were promised to nobody; their workers send them again.
        self.open = {segment: {} for segment in range(self.segments)}
        self.waiting = []
        if self.is_tail:
            return self._commit()
        return [(self.successor, self._state())] if self._is_joining(self.successor) else []

    def _state(self) -> State:
        applied = {segment: dict(clocks) for segment, clocks in self.applied.items()}
        return State(self.configuration.epoch, self.number, self.store.content(), applied, dict(self.rounds))

    def _take_over(self, state: State) -> Out:
        if self.is_synced:
            return []
        self._clear()
        self.store.restore(state.content)
        self.applied = {segment: dict(clocks) for segment, clocks in state.applied.items()}
        self.rounds, self.settled = dict(state.rounds), dict(state.rounds)
        self.number = self.committed = state.number
        self.is_synced, self.state_epoch = True, self.configuration.epoch
        return self._commit() if self.is_tail else []

    def _pushed(self, push: Push) -> Out:
        worker, segment = push.worker, push.segment
        if not self.is_head or worker not in self.configuration.workers or segment not in self.applied:
            return []
        answer: Out = [(worker, Pushed(self.configuration.epoch, push.clock, segment))] if self._is_confirmed() else []
        if push.clock <= self._last(segment, worker):
            number = self.made_by.get((worker, push.clock, segment))
            return answer if number is None or number < self.committed else []
        if self.mode.is_by_rounds:
            if push.clock < self.settled[segment]:  # its round went on without it, for good
                return answer
            if push.clock != self.rounds[segment]:
                return []
            self.open[segment][worker] = push
            return self._close(segment)
        if push.clock != self._last(segment, worker) + 1:
            return []  # one before it is on its way
        return self._make([push])

    def _close(self, segment: int) -> Out:
        here = self.open[segment]
        active = [w for w, first in self.configuration.workers.items() if first <= self.rounds[segment]]
        counted = {worker: push for worker, push in here.items() if worker in active}
        if not self.mode.is_complete(counted, active):
            return []
        self.open[segment] = {}
        return self._make([counted[worker] for worker in sorted(counted)])

    def _make(self, pushes: Sequence[Push]) -> Out:
        payload = self.store.summed([push.payload for push in pushes])
        weight = sum(push.weight for push in pushes)
        made = Update(pushes[0].segment, tuple((p.worker, p.clock) for p in pushes), payload, weight)
        number = self._apply(made)
        if self.is_tail:
            return self._commit()
        return [(self.successor, Forward(self.configuration.epoch, number, made))]

    def _apply(self, update: Update) -> int:
        self.store.apply(update)
        number = self.number
        for worker, clock in update.pushes:
            self.applied[update.segment][worker] = clock
            self.made_by[worker, clock, update.segment] = number
        if self.mode.is_by_rounds:
            self.rounds[update.segment] += 1
        self.kept[number] = update
        self.number += 1
        return number

    def _forwarded(self, message: Forward) -> Out:
        if message.number > self.number:
            return [(self.predecessor, Missing(self.configuration.epoch, self.number))]
        if message.number < self.number:  # its acknowledgement may have been lost
            return [(self.predecessor, Forwarded(self.configuration.epoch, self.committed))]
        number = self._apply(message.update)
        if self.is_tail:
            return self._commit()
        return [(self.successor, Forward(self.configuration.epoch, number, message.update))]

    def _commit(self) -> Out:
        """At the tail: everything it has, all have. Nothing is promised in a configuration that is not confirmed."""
        return self._settle(self.number) if self._is_confirmed() else []

    def _is_confirmed(self) -> bool:
        return self.configuration.confirmed == self.configuration.epoch

    def _acknowledged(self, message: Forwarded) -> Out:
        return self._settle(min(message.number, self.number)) if message.number > self.committed else []

    def _settle(self, number: int) -> Out:
        """Updates before `number` can't be lost any more: tell those who wait for it."""
        out: Out = []
        for settled in range(self.committed, number):
            update = self.kept.pop(settled)
            self.settled[update.segment] += self.mode.is_by_rounds
            for worker, clock in update.pushes:
                self.made_by.pop((worker, clock, update.segment), None)
                if self.is_head:
                    out.append((worker, Pushed(self.configuration.epoch, clock, update.segment)))
        self.committed = number
        if self.predecessor is not None:
            out.append((self.predecessor, Forwarded(self.configuration.epoch, number)))
        return out + self._answer_waiting()

    def _resend(self, message: Missing) -> Out:
        following = self.successor
        if following is None:
            return []
        if message.number < self.committed:  # no longer kept: it needs the state
            return [(following, self._state())] if self._is_joining(following) else []
        numbers = range(message.number, self.number)
        return [(following, Forward(self.configuration.epoch, n, self.kept[n])) for n in numbers]

    def _pulled(self, pull: Pull) -> Out:
        if not self.is_tail or pull.worker not in self.configuration.workers:
            return []
        if self._is_confirmed() and self._may_read(pull):
            clock = max(pull.clock, min(self.rounds.values())) if self.mode.is_by_rounds else pull.clock
            return [(pull.worker, Pulled(self.configuration.epoch, pull.request, clock, self.store.read()))]
        if pull not in self.waiting:
            self.waiting.append(pull)
        return []

    def _answer_waiting(self) -> Out:
        ready = [pull for pull in self.waiting if self._is_confirmed() and self._may_read(pull)]
        self.waiting = [pull for pull in self.waiting if pull not in ready]
        return [out for pull in ready for out in self._pulled(pull)]

    def _may_read(self, pull: Pull) -> bool:
        everybody = {worker: self._behind(worker) for worker in self.configuration.workers}
        return self.mode.may_read(pull.clock, list(self.rounds.values()), everybody)

    def _behind(self, worker: Worker) -> int:
        return min((self._last(segment, worker) for segment in self.applied), default=-1)

    def _last(self, segment: int, worker: Worker) -> int:
        first: Mapping[Worker, int] = self.configuration.workers
        return self.applied[segment].get(worker, first.get(worker, 0) - 1)
