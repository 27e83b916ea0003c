"""One replica of one key range: it takes gradients, sends updates down the chain and answers reads.

The head gathers gradients and makes updates of them; only the update travels down the chain (chain replication, van
Renesse and Schneider 2004, after aggregation as Li et al. 2014 have it). The tail answers reads, so nobody ever sees
an update that a failure could take back. A push is acknowledged once the tail has it.

A gated round is applied only when the heads of all ranges have all of its gradients. Then the norm of the whole
gradient is known, which clipping needs; and a worker that dies while it pushes can't leave one range a step behind
another.

Promises: a push counts at most once; an acknowledged one is never lost while one synced replica of the chain lives; all
replicas apply the same updates in the same order; a reader at clock c sees what its mode promises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Store(Protocol):
    """The parameters of one range, and their optimizer; `server/range_tensors.py` implements it with torch."""

    def combine(self, pushes: Sequence[Push]) -> tuple[Any, dict[str, Any]]:
        """Sum some workers' gradients of one segment, in the order given; return the payload and note of the update."""

    def measure(self, updates: Sequence[Update]) -> float:
        """Return the value that the other ranges need of a gated round, such as the squared norm of its gradient."""

    def finish(self, update: Update, partials: Sequence[float]) -> Update:
        """Return the update of a gated round as it is to be applied, given the values of all ranges."""

    def apply(self, update: Update) -> None:
        """Change the parameters of one segment."""

    def read(self) -> Any:
        """Return the parameters."""

    def content(self) -> Any:
        """Return everything, for a replica that joins."""

    def restore(self, content: Any) -> None:
        """Take over what `content` returned."""

    def clear(self) -> None:
        """Forget everything."""


@dataclass(slots=True)
class Replica:
    """The state machine of one replica: messages and the time go in, the messages to send come out.

    Args:
        node: this process's node.
        segments: the number of the range's segments.
        mode: when gradients become an update, and who may read.
        store: parameters and optimizer.
        key_range: which range this is.
        gates: of gated rounds, how many ranges there are; 0 where every segment goes on by itself.
    """

    node: Node
    segments: int
    mode: Mode
    store: Store
    key_range: int = 0
    gates: int = 0
    configuration: Configuration = field(default_factory=lambda: Configuration(-1, (), {}))
    is_synced: bool = False
    applied: dict[int, dict[Worker, int]] = field(init=False)  # by segment: each worker's last clock
    rounds: dict[int, int] = field(init=False)  # by segment: rounds closed
    settled: dict[int, int] = field(init=False)  # by segment: rounds closed that can't be lost any more
    update_count: int = 0  # updates applied
    committed: int = 0  # updates that every replica has
    uncommitted: dict[int, Update] = field(default_factory=dict)  # the updates from `committed` on, by number
    update_of_push: dict[tuple[Worker, int, int], int] = field(default_factory=dict)  # the number, while uncommitted
    open_rounds: dict[int, dict[int, Push]] = field(init=False)  # by segment and worker name: gradients so far
    staged: dict[int, Update] = field(default_factory=dict)  # by segment: what waits at the gate
    partials: dict[int, float] = field(default_factory=dict)  # by round: what this range told the others
    peer_partials: dict[int, dict[int, float]] = field(default_factory=dict)  # by round and range: what they told
    round_opened_s: dict[tuple[int, int], float] = field(default_factory=dict)  # by segment and round: since when
    note: dict[str, Any] | None = None  # of the last update of the first segment
    duplicates: int = 0  # pushes that had been counted before
    staleness: dict[int, int] = field(default_factory=dict)  # updates since its parameters were read: how many pushes
    waiting_pulls: list[Pull] = field(default_factory=list)
    joined_at_version: int = -1  # the configuration in which this process last joined the chain
    state_config_version: int = -1  # the last in which it was in the chain, with everything

    def __post_init__(self) -> None:
        self._clear()

    def on(self, message: Any) -> Out:
        """Handle one message and return the messages that follow from it."""
        if isinstance(message, Configuration):
            return self._on_configuration(message)
        # A Partial has no version: versions of different ranges can't be compared.
        if isinstance(message, Partial):
            return self._on_partial(message)
        # Fencing: a replica that was stopped and goes on refuses, and is refused by, those who went on without it. Only
        # workers are told, as they wait for an answer; replicas and heads repeat by themselves.
        if message.config_version != self.configuration.config_version:
            if isinstance(message, Push | Pull):
                return [(message.worker, Stale(self.configuration.config_version))]
            return []
        if self.node not in self.configuration.chain:
            return []
        # Before the check of `is_synced`: the state is what makes a joining replica synced.
        if isinstance(message, State):
            return self._on_state(message)
        if not self.is_synced:
            return []
        handlers: dict[type, Any] = {
            Push: self._on_push,
            Pull: self._on_pull,
            Forward: self._on_forward,
            Forwarded: self._on_forwarded,
            Missing: self._on_missing,
        }
        handler = handlers.get(type(message))
        if handler is None:
            return []
        out: Out = handler(message)
        return out

    def heartbeat(self) -> Out:
        """Return the message that says that this replica is alive."""
        # -1 while it is joining: the coordinator must not count it among those that have everything.
        state_config_version = self.state_config_version if self.is_synced else -1
        return [(COORDINATOR, Heartbeat(self.node, self.configuration.config_version, state_config_version))]

    def repeat(self) -> Out:
        """Return again the messages that may have been lost."""
        out: Out = self.announce()
        if self.is_synced and self.successor is not None:
            if self._is_joining(self.successor):
                out.append((self.successor, self._state()))
            out += self._forward_from(self.committed)
        return out

    def announce(self) -> Out:
        """Return again this range's value of the round at the gate, for the heads of the other ranges."""
        if self.is_synced and self.is_head and self.staged:
            return self._announce_round()
        return []

    @property
    def is_head(self) -> bool:
        """True if workers push here."""
        return bool(self.configuration.chain) and self.configuration.chain[0] == self.node

    @property
    def is_tail(self) -> bool:
        """True if workers pull here."""
        return bool(self.configuration.chain) and self.configuration.chain[-1] == self.node

    @property
    def successor(self) -> Node | None:
        """The next replica of the chain."""
        return self.configuration.neighbour(self.node, 1)

    @property
    def predecessor(self) -> Node | None:
        """The replica before this one in the chain."""
        return self.configuration.neighbour(self.node, -1)

    def _is_joining(self, node: Node | None) -> bool:
        return self.configuration.joining is not None and self.configuration.joining[0] == node

    def _clear(self) -> None:
        self.store.clear()
        self.applied = {segment: {} for segment in range(self.segments)}
        self.rounds = dict.fromkeys(range(self.segments), 0)
        self.settled = dict.fromkeys(range(self.segments), 0)
        self.update_count = 0
        self.committed = 0
        self.uncommitted = {}
        self.update_of_push = {}
        self._drop_open_rounds()
        self.partials = {}
        self.peer_partials = {}
        self.round_opened_s = {}
        self.note = None
        self.waiting_pulls = []
        # `joined_at_version` stays: the same configuration, sent again, must not clear the state that came after it.
        self.is_synced = False

    def _drop_open_rounds(self) -> None:
        self.open_rounds = {segment: {} for segment in range(self.segments)}
        self.staged = {}

    # --- who is in the chain

    def _on_configuration(self, new: Configuration) -> Out:
        old = self.configuration
        if new.config_version < old.config_version:
            return []
        is_same_version = new.config_version == old.config_version
        if is_same_version and new.confirmed <= old.confirmed:
            return []
        self.configuration = new
        if self.node not in new.chain:
            if self.node not in new.holders:
                # Taken for dead, it kept its state until others were known to go on without it, as a false suspicion
                # and a crash within one deadline would lose everything. What only it held must not come back.
                self._clear()
            return []
        if is_same_version:  # only its confirmation is new
            return self._commit() if self.is_synced and self.is_tail else []
        if new.joining is not None:
            # Later versions name the same joining until it has the state: only a new joining clears.
            joining_node, joined_at_version = new.joining
            if joining_node == self.node and joined_at_version != self.joined_at_version:
                self._clear()  # it was out of the chain without knowing
                self.joined_at_version = joined_at_version
        if new.config_version == 0:  # the job's first: every replica begins with the parameters that a worker sent
            self.is_synced = True
        return self._enter_configuration() if self.is_synced else []

    def _enter_configuration(self) -> Out:
        """Do what a new configuration asks of a replica that has everything."""
        self.state_config_version = self.configuration.config_version
        # Workers ask again in the new version: see `Client._on_configuration`.
        self.waiting_pulls = []
        out: Out = []
        if self.is_head:
            out = self._close_complete_rounds()  # a worker that was waited for may be gone
        else:
            # Nobody was promised that gradients under way count: their workers send them to the new head.
            self._drop_open_rounds()
        if self.is_tail:
            return out + self._commit()
        # Another new successor gets what it lacks from `repeat`: updates since the last that all had are kept.
        if self._is_joining(self.successor):
            # The state has the updates that were made just now; sent again after it they change nothing.
            out.append((self.successor, self._state()))
        return out

    def _state(self) -> State:
        return State(
            config_version=self.configuration.config_version,
            number=self.update_count,
            applied={segment: dict(clocks) for segment, clocks in self.applied.items()},
            rounds=dict(self.rounds),
            partials=dict(self.partials),
            note=self.note,
            content=self.store.content(),
        )

    def _on_state(self, state: State) -> Out:
        if self.is_synced:
            return []
        self._clear()
        self.store.restore(state.content)
        self.applied = {segment: dict(clocks) for segment, clocks in state.applied.items()}
        self.rounds = dict(state.rounds)
        # It joins at the tail, so the replicas before it have all that is in the state.
        self.settled = dict(state.rounds)
        self.update_count = state.number
        self.committed = state.number
        self.partials = dict(state.partials)
        self.note = state.note
        self.is_synced = True
        self.state_config_version = self.configuration.config_version
        return self._commit() if self.is_tail else []

    # --- at the head: gradients become updates

    def _on_push(self, push: Push) -> Out:
        worker, segment = push.worker, push.segment
        if not self.is_head or worker not in self.configuration.workers or segment not in self.applied:
            return []
        acknowledgement: Out = []
        # An acknowledgement is a promise: none is made before a replica with everything is known to be in this version.
        if self._is_confirmed():
            acknowledgement = [(worker, Pushed(self.configuration.config_version, push.clock, segment))]
        if push.clock <= self._last_clock(segment, worker):
            self.duplicates += 1
            # Numbers are dropped when updates are settled: None means that every replica has it.
            number = self.update_of_push.get((worker, push.clock, segment))
            is_committed = number is None or number < self.committed
            return acknowledgement if is_committed else []
        if self.mode.is_by_rounds:
            # Its round went on without it, for good. A round that is closed but not settled may be lost with this
            # head: then the gradient is needed after all.
            if push.clock < self.settled[segment]:
                return acknowledgement
            # A push of a later round, or one whose round is at the gate: the worker sends it again.
            if push.clock != self.rounds[segment] or segment in self.staged:
                return []
            # A retry has the same bytes, so it may take the first one's place: a worker counts once.
            self.open_rounds[segment][worker[0]] = push
            return self._close_round(segment)
        if push.clock != self._last_clock(segment, worker) + 1:
            return []  # one before it is on its way
        return self._apply_push(push)

    def _apply_push(self, push: Push) -> Out:
        """Make an update of one push, where gradients are not summed in rounds."""
        # Updates are counted by segment, and a whole step makes one for each: divided, they are steps.
        behind = max(0, self.update_count - push.updates_read) // self.segments
        self.staleness[behind] = self.staleness.get(behind, 0) + 1
        share = 1.0
        if self.mode.kind == "async":
            # Of the learning rate: a gradient of old parameters takes a smaller step.
            share = 1 / (1 + behind)
        payload, note = self.store.combine([push])
        if push.segment == 0:
            note = self._with_count(note, 1)
        return self._apply_and_forward(Update(push.segment, ((push.worker, push.clock),), note, payload, share))

    def _with_count(self, note: dict[str, Any], pushes: int) -> dict[str, Any]:
        """Return the note of an update of the first segment, which says how many pushes have counted so far."""
        before = self.note["counted"] if self.note else 0
        return {**note, "counted": before + pushes}

    def _close_complete_rounds(self) -> Out:
        out: Out = []
        for segment in range(self.segments):
            if self.open_rounds[segment]:
                out += self._close_round(segment)
        return out

    def expire(self, now_s: float) -> Out:
        """Close the rounds whose deadline has passed, with the gradients that are here."""
        out: Out = []
        if not self.mode.deadline_s or not self.is_head:
            return out
        for segment, pushes in self.open_rounds.items():
            if not pushes:
                continue
            # Counted from the first call that finds a gradient. The round is part of the key: the next one begins anew.
            since_s = self.round_opened_s.setdefault((segment, self.rounds[segment]), now_s)
            if now_s - since_s >= self.mode.deadline_s:
                out += self._close_round(segment, is_over=True)
        return out

    def _close_round(self, segment: int, is_over: bool = False) -> Out:
        """Make an update of a segment's gradients if no more are waited for, or if the time of the round is over."""
        if segment in self.staged:
            return []
        pushes_by_name = self.open_rounds[segment]
        # One that joined later has no part in earlier rounds; waiting for it would never end.
        active = [worker for worker, first in self.configuration.workers.items() if first <= self.rounds[segment]]
        # A worker that took another's place counts by what that one had sent, until it has sent itself.
        counted = {worker: pushes_by_name[worker[0]] for worker in active if worker[0] in pushes_by_name}
        is_closed_by_time = is_over and bool(counted)
        if not is_closed_by_time and not self.mode.is_complete(counted, active):
            return []
        self.open_rounds[segment] = {}
        pushes = [counted[worker] for worker in sorted(counted)]  # the order in which one process would sum them
        payload, note = self.store.combine(pushes)
        if segment == 0:
            note = self._with_count(note, len(pushes))
        update = Update(segment, tuple((push.worker, push.clock) for push in pushes), note, payload)
        if not self.gates:
            return self._apply_and_forward(update)
        # Applied at once, it could leave parameters of two steps: a worker may die between its pushes to two ranges,
        # and nobody can compute the missing gradient again.
        self.staged[segment] = update
        return self._announce_round()

    # --- at the gate: a round is applied when all ranges have all of its gradients

    def _announce_round(self) -> Out:
        """Tell the other ranges, once all gradients of this one are here; apply the round if they are ready, too."""
        current, due = self._round_under_way()
        # A round has a gradient of every segment: the value is of the whole range, such as its part of the squared
        # norm.
        if not due or any(segment not in self.staged for segment in due):
            return []
        if current not in self.partials:  # otherwise a head that died applied some of it, with what it had told
            self.partials[current] = self.store.measure([self.staged[segment] for segment in due])
        told = self.peer_partials.get(current, {})
        out: Out = []
        for other_range in range(self.gates):
            if other_range != self.key_range:
                partial = Partial(self.key_range, current, self.partials[current], is_question=other_range not in told)
                out.append(((HEAD, other_range), partial))
        return out + self._pass_gate()

    def _round_under_way(self) -> tuple[int, list[int]]:
        """Return the first round that is not closed, and the segments that have not closed it."""
        current = min(self.rounds.values())
        return current, [segment for segment, closed in self.rounds.items() if closed == current]

    def _pass_gate(self) -> Out:
        """Apply the round, if every range has all of its gradients."""
        current, due = self._round_under_way()
        partials = dict(self.peer_partials.get(current, {}))
        if current in self.partials:
            partials[self.key_range] = self.partials[current]
        if len(partials) < self.gates or any(segment not in self.staged for segment in due):
            return []
        # In the order of ranges: all heads add the values up to the same bits, and clip alike.
        by_range = [partials[number] for number in range(self.gates)]
        out: Out = []
        for segment in due:
            update = self.store.finish(self.staged.pop(segment), by_range)
            out += self._apply_and_forward(dataclasses.replace(update, partial=self.partials[current]))
        return out

    def _on_partial(self, message: Partial) -> Out:
        # Kept also by a replica that is not the head: it may become the head before the round is over.
        self.peer_partials.setdefault(message.round, {})[message.key_range] = message.value
        if not self.is_synced or not self.is_head:
            return []
        out: Out = []
        if message.is_question and message.round in self.partials:
            # Also for the round before: a new head may have to apply a round that this range has already applied.
            answer = Partial(self.key_range, message.round, self.partials[message.round], is_question=False)
            out.append(((HEAD, message.key_range), answer))
        if self.staged:
            out += self._pass_gate()
        return out

    # --- down the chain

    def _apply_and_forward(self, update: Update) -> Out:
        # Applied before it is forwarded, so a replica always has at least what the next one has.
        number = self._apply(update)
        if self.is_tail:
            return self._commit()
        return [(self.successor, Forward(self.configuration.config_version, number, update))]

    def _apply(self, update: Update) -> int:
        """Apply an update and return its number."""
        self.store.apply(update)
        number = self.update_count
        for worker, clock in update.pushes:
            self.applied[update.segment][worker] = clock
            self.update_of_push[worker, clock, update.segment] = number
        if update.segment == 0:
            self.note = update.note
        if self.mode.is_by_rounds:
            self._note_closed_round(update)
        self.uncommitted[number] = update
        self.update_count += 1
        return number

    def _note_closed_round(self, update: Update) -> None:
        closed = self.rounds[update.segment]
        self.rounds[update.segment] += 1
        self.round_opened_s.pop((update.segment, closed), None)
        if self.gates:  # one range may ask another for the round before
            self.partials[closed] = update.partial
            self.partials = {past: value for past, value in self.partials.items() if past >= closed - 1}
            self.peer_partials = {past: values for past, values in self.peer_partials.items() if past >= closed - 1}

    def _on_forward(self, message: Forward) -> Out:
        # A gap: applied out of order, the replicas' parameters would differ.
        if message.number > self.update_count:
            return [(self.predecessor, Missing(self.configuration.config_version, self.update_count))]
        if message.number < self.update_count:  # its acknowledgement may have been lost
            return [(self.predecessor, Forwarded(self.configuration.config_version, self.committed))]
        return self._apply_and_forward(message.update)

    def _commit(self) -> Out:
        """Settle everything, at the tail: what it has, all have.

        Nothing is promised in a configuration that is not confirmed.
        """
        return self._settle(self.update_count) if self._is_confirmed() else []

    def _is_confirmed(self) -> bool:
        return self.configuration.confirmed == self.configuration.config_version

    def _on_forwarded(self, message: Forwarded) -> Out:
        if message.number <= self.committed:
            return []
        return self._settle(min(message.number, self.update_count))

    def _settle(self, committed: int) -> Out:
        """Note that the first `committed` updates can't be lost any more, and tell those who wait for it."""
        out: Out = []
        for number in range(self.committed, committed):
            update = self.uncommitted.pop(number)
            if self.mode.is_by_rounds:
                self.settled[update.segment] += 1
            for worker, clock in update.pushes:
                self.update_of_push.pop((worker, clock, update.segment), None)
                # Only the head answers pushes: workers know only the head of a range.
                if self.is_head:
                    out.append((worker, Pushed(self.configuration.config_version, clock, update.segment)))
        self.committed = committed
        if self.predecessor is not None:
            out.append((self.predecessor, Forwarded(self.configuration.config_version, committed)))
        return out + self._answer_waiting_pulls()

    def _on_missing(self, message: Missing) -> Out:
        return self._forward_from(message.number)

    def _forward_from(self, first: int) -> Out:
        """Return the updates from number `first` on, for the next replica, or the state if they are gone."""
        successor = self.successor
        if successor is None:
            return []
        if first < self.committed:  # this replica has dropped the update: the other needs the state
            return [(successor, self._state())] if self._is_joining(successor) else []
        out: Out = []
        for number in range(first, self.update_count):
            out.append((successor, Forward(self.configuration.config_version, number, self.uncommitted[number])))
        return out

    # --- at the tail: parameters are read

    def _on_pull(self, pull: Pull) -> Out:
        if not self.is_tail or pull.worker not in self.configuration.workers:
            return []
        if self._is_confirmed() and self._may_read(pull):
            return [(pull.worker, self._parameters_for(pull))]
        # A worker repeats its pull while it waits.
        if pull not in self.waiting_pulls:
            self.waiting_pulls.append(pull)
        return []

    def _parameters_for(self, pull: Pull) -> Pulled:
        clock = pull.clock
        if self.mode.is_by_rounds:  # a worker does not make up for the rounds that were closed without it
            clock = max(clock, min(self.rounds.values()))
        return Pulled(
            config_version=self.configuration.config_version,
            request=pull.request,
            clock=clock,
            number=self.update_count,
            note=self.note,
            values=self.store.read(),
        )

    def _answer_waiting_pulls(self) -> Out:
        ready = [pull for pull in self.waiting_pulls if self._is_confirmed() and self._may_read(pull)]
        self.waiting_pulls = [pull for pull in self.waiting_pulls if pull not in ready]
        out: Out = []
        for pull in ready:
            out += self._on_pull(pull)
        return out

    def _may_read(self, pull: Pull) -> bool:
        applied = {worker: self._applied_clock(worker) for worker in self.configuration.workers}
        return self.mode.may_read(pull.clock, list(self.rounds.values()), applied)

    def _applied_clock(self, worker: Worker) -> int:
        """Return the worker's last clock of which every segment is applied."""
        return min((self._last_clock(segment, worker) for segment in self.applied), default=-1)

    def _last_clock(self, segment: int, worker: Worker) -> int:
        """Return the worker's last clock that is applied to a segment; before the first, the one before it began."""
        first: Mapping[Worker, int] = self.configuration.workers
        return self.applied[segment].get(worker, first.get(worker, 0) - 1)
