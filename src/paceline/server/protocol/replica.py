"""One replica of one key range: gradients in, updates down the chain, parameters out.

The head gathers gradients and makes updates of them; only the update travels down the chain (chain replication, van
Renesse and Schneider 2004, after aggregation as Li et al. 2014 have it). The tail answers reads, so nobody ever sees
what a failure could take back. A push is acknowledged once the tail has it.

Where a round is gated, nobody applies it before the heads of all ranges have all of its gradients: what depends on the
whole gradient (clipping by its norm) is known then, and a worker that dies while it pushes leaves no range behind.

Promises: a push counts at most once; an acknowledged one is never lost while one synced replica of the chain lives; all
replicas apply the same updates in the same order; a reader at clock c sees what its mode promises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.server.protocol.admission import Mode
from paceline.server.protocol.messages import (
    COORDINATOR,
    HEAD,
    Configuration,
    Forward,
    Forwarded,
    Heartbeat,
    Missing,
    Node,
    Out,
    Partial,
    Pull,
    Pulled,
    Push,
    Pushed,
    Stale,
    State,
    Update,
    Worker,
)
from paceline.server.protocol.store import Store


@dataclass(slots=True)
class Replica:
    """The state machine.

    Args:
        node: this process.
        segments: how many the range has.
        mode: when gradients become an update, and who may read.
        store: parameters and optimizer.
        range: which range this is.
        gates: of gated rounds, how many ranges there are; 0 where every segment goes on by itself.
    """

    node: Node
    segments: int
    mode: Mode
    store: Store
    range: int = 0
    gates: int = 0
    configuration: Configuration = field(default_factory=lambda: Configuration(-1, (), {}))
    is_synced: bool = False
    applied: dict[int, dict[Worker, int]] = field(init=False)  # by segment: each worker's last clock
    rounds: dict[int, int] = field(init=False)  # by segment: rounds closed
    settled: dict[int, int] = field(init=False)  # by segment: rounds closed that can't be lost any more
    number: int = 0  # updates applied
    kept: dict[int, Update] = field(default_factory=dict)  # those that the tail has not said to have, by number
    committed: int = 0  # updates that every replica has
    made_by: dict[tuple[Worker, int, int], int] = field(default_factory=dict)  # push to the number of its update
    open: dict[int, dict[int, Push]] = field(init=False)  # by segment and name: gradients of the round under way
    staged: dict[int, Update] = field(default_factory=dict)  # by segment: what waits at the gate
    own: dict[int, float] = field(default_factory=dict)  # by round: what this range told the others
    told: dict[int, dict[int, float]] = field(default_factory=dict)  # by round and range: what the others told
    opened_s: dict[tuple[int, int], float] = field(default_factory=dict)  # by segment and round: since when
    note: dict[str, Any] | None = None  # of the last update of the first segment
    duplicates: int = 0  # pushes that had been counted
    staleness: dict[int, int] = field(default_factory=dict)  # updates since its parameters were read: how many pushes
    waiting: list[Pull] = field(default_factory=list)
    joined: int = -1  # the epoch at which this process last joined the chain
    state_epoch: int = -1  # the last in which it was in the chain, with everything

    def __post_init__(self) -> None:
        self._clear()

    def on(self, message: Any) -> Out:
        """Take one message; the messages that follow from it."""
        if isinstance(message, Configuration):
            return self._configure(message)
        if isinstance(message, Partial):
            return self._hear_partial(message)
        if message.epoch != self.configuration.epoch:
            return [(message.worker, Stale(self.configuration.epoch))] if isinstance(message, Push | Pull) else []
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
        out: Out = act[type(message)](message) if type(message) in act else []
        return out

    def heartbeat(self) -> Out:
        """Now and then: a sign of life."""
        return [
            (COORDINATOR, Heartbeat(self.node, self.configuration.epoch, self.state_epoch if self.is_synced else -1))
        ]

    def repeat(self) -> Out:
        """Say again what may have been lost."""
        out: Out = self.announce()
        if self.is_synced and self.successor is not None:
            if self._is_joining(self.successor):
                out.append((self.successor, self._state()))
            out += self._resend(Missing(self.configuration.epoch, self.committed))
        return out

    def announce(self) -> Out:
        """Tell the other ranges again what waits at the gate."""
        return self._stage() if self.is_synced and self.is_head and self.staged else []

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
        return self.configuration.neighbour(self.node, 1)

    @property
    def predecessor(self) -> Node | None:
        """The one before in the chain."""
        return self.configuration.neighbour(self.node, -1)

    def _is_joining(self, node: Node | None) -> bool:
        return self.configuration.joining is not None and self.configuration.joining[0] == node

    def _clear(self) -> None:
        self.store.clear()
        self.applied = {segment: {} for segment in range(self.segments)}
        self.rounds = dict.fromkeys(range(self.segments), 0)
        self.settled = dict.fromkeys(range(self.segments), 0)
        self.open = {segment: {} for segment in range(self.segments)}
        self.number = self.committed = 0
        self.kept, self.made_by, self.waiting = {}, {}, []
        self.staged, self.own, self.told, self.note, self.opened_s = {}, {}, {}, None, {}
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
        self.waiting = []
        if not self.is_head:  # gradients under way were promised to nobody: their workers send them to the new head
            self.open, self.staged = {segment: {} for segment in range(self.segments)}, {}
            out: Out = []
        else:
            out = self._close_all()  # a worker that was waited for may be gone
        if self.is_tail:
            return out + self._commit()
        # The state has the updates that were made just now; sent again after it they change nothing.
        return [*out, (self.successor, self._state())] if self._is_joining(self.successor) else out

    def _state(self) -> State:
        applied = {segment: dict(clocks) for segment, clocks in self.applied.items()}
        facts = (self.number, applied, dict(self.rounds), dict(self.own), self.note)
        return State(self.configuration.epoch, *facts, self.store.content())

    def _take_over(self, state: State) -> Out:
        if self.is_synced:
            return []
        self._clear()
        self.store.restore(state.content)
        self.applied = {segment: dict(clocks) for segment, clocks in state.applied.items()}
        self.rounds, self.settled = dict(state.rounds), dict(state.rounds)
        self.number = self.committed = state.number
        self.own, self.note = dict(state.partials), state.note
        self.is_synced, self.state_epoch = True, self.configuration.epoch
        return self._commit() if self.is_tail else []

    def _pushed(self, push: Push) -> Out:
        worker, segment = push.worker, push.segment
        if not self.is_head or worker not in self.configuration.workers or segment not in self.applied:
            return []
        answer: Out = [(worker, Pushed(self.configuration.epoch, push.clock, segment))] if self._is_confirmed() else []
        if push.clock <= self._last(segment, worker):
            self.duplicates += 1
            number = self.made_by.get((worker, push.clock, segment))
            return answer if number is None or number < self.committed else []
        if self.mode.is_by_rounds:
            if push.clock < self.settled[segment]:  # its round went on without it, for good
                return answer
            if push.clock != self.rounds[segment] or segment in self.staged:
                return []
            self.open[segment][worker[0]] = push
            return self._close(segment)
        if push.clock != self._last(segment, worker) + 1:
            return []  # one before it is on its way
        behind = max(0, self.number - push.read) // self.segments
        self.staleness[behind] = self.staleness.get(behind, 0) + 1
        share = 1 / (1 + behind) if self.mode.kind == "async" else 1.0
        payload, note = self.store.combine([push])
        counted = self._count(note, 1) if segment == 0 else note
        return self._make(Update(segment, ((worker, push.clock),), counted, payload, share))

    def _count(self, note: dict[str, Any], pushes: int) -> dict[str, Any]:
        """The note of an update of the first segment says how many pushes have counted since the start."""
        before = self.note["counted"] if self.note else 0
        return {**note, "counted": before + pushes}

    def _close_all(self) -> Out:
        return [out for segment in range(self.segments) if self.open[segment] for out in self._close(segment)]

    def expire(self, now_s: float) -> Out:
        """Now and then: close the rounds whose deadline has passed, with the gradients that are here."""
        out: Out = []
        for segment, here in self.open.items() if self.mode.deadline_s and self.is_head else ():
            since_s = self.opened_s.setdefault((segment, self.rounds[segment]), now_s) if here else now_s
            if now_s - since_s >= self.mode.deadline_s:
                out += self._close(segment, is_over=True)
        return out

    def _close(self, segment: int, is_over: bool = False) -> Out:
        here = self.open[segment]
        active = [worker for worker, first in self.configuration.workers.items() if first <= self.rounds[segment]]
        # A worker that took another's place counts by what that one had sent, until it has sent itself.
        counted = {worker: here[worker[0]] for worker in active if worker[0] in here}
        if segment in self.staged or not (self.mode.is_complete(counted, active) or (is_over and counted)):
            return []
        self.open[segment] = {}
        pushes = [counted[worker] for worker in sorted(counted)]
        payload, note = self.store.combine(pushes)
        note = self._count(note, len(pushes)) if segment == 0 else note
        made = Update(segment, tuple((push.worker, push.clock) for push in pushes), note, payload)
        if not self.gates:
            return self._make(made)
        self.staged[segment] = made
        return self._stage()

    def _stage(self) -> Out:
        """Tell the other ranges, once all gradients of this one are here."""
        now, due = self._due()
        if not due or any(segment not in self.staged for segment in due):
            return []
        if now not in self.own:  # otherwise a head that died applied some of it, with what it had told
            self.own[now] = self.store.measure([self.staged[segment] for segment in due])
        known = self.told.get(now, {})
        others = [other for other in range(self.gates) if other != self.range]
        out: Out = [((HEAD, other), Partial(self.range, now, self.own[now], other not in known)) for other in others]
        return out + self._pass_gate()

    def _due(self) -> tuple[int, list[int]]:
        """The round under way, and the segments that have not closed it."""
        now = min(self.rounds.values())
        return now, [segment for segment, closed in self.rounds.items() if closed == now]

    def _pass_gate(self) -> Out:
        """Apply the round, if every range has all of its gradients."""
        now, due = self._due()
        known = {**self.told.get(now, {}), **({self.range: self.own[now]} if now in self.own else {})}
        if len(known) < self.gates or any(segment not in self.staged for segment in due):
            return []
        out: Out = []
        for segment in due:
            finished = self.store.finish(self.staged.pop(segment), [known[index] for index in range(self.gates)])
            out += self._make(dataclasses.replace(finished, partial=self.own[now]))
        return out

    def _hear_partial(self, message: Partial) -> Out:
        self.told.setdefault(message.round, {})[message.range] = message.value
        if not self.is_synced or not self.is_head:
            return []
        out: Out = []
        if message.is_question and message.round in self.own:
            out = [((HEAD, message.range), Partial(self.range, message.round, self.own[message.round], False))]
        return out + (self._pass_gate() if self.staged else [])

    def _make(self, made: Update) -> Out:
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
        if update.segment == 0:
            self.note = update.note
        if self.mode.is_by_rounds:
            self._count_round(update)
        self.kept[number] = update
        self.number += 1
        return number

    def _count_round(self, update: Update) -> None:
        closed = self.rounds[update.segment]
        self.rounds[update.segment] += 1
        self.opened_s.pop((update.segment, closed), None)
        if self.gates:  # one range may ask another for the round before
            self.own[closed] = update.partial
            self.own = {past: value for past, value in self.own.items() if past >= closed - 1}
            self.told = {past: values for past, values in self.told.items() if past >= closed - 1}

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
        return [
            (following, Forward(self.configuration.epoch, n, self.kept[n])) for n in range(message.number, self.number)
        ]

    def _pulled(self, pull: Pull) -> Out:
        if not self.is_tail or pull.worker not in self.configuration.workers:
            return []
        if self._is_confirmed() and self._may_read(pull):
            clock = max(pull.clock, min(self.rounds.values())) if self.mode.is_by_rounds else pull.clock
            facts = (pull.request, clock, self.number, self.note)
            return [(pull.worker, Pulled(self.configuration.epoch, *facts, self.store.read()))]
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
