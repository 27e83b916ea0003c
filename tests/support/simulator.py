"""The protocol in a world that loses, doubles, delays, cuts and kills: one seed is one run, and runs again exactly.

There are one or two ranges, and rounds may be gated. A push adds `1 << 2 * number` to its segment, so that a segment's
value is its history: a push counted twice shows as a digit 2 in base four, a lost one as a 0. Promises are checked
after every event.

Under sync a run may end early: a worker and a server are lost before one step is complete, and the job ends with an
error. The promise is that no worker ever computes from the parameters of two steps.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from paceline.server.protocol.admission import Mode
from paceline.server.protocol.client import Client, Session
from paceline.server.protocol.coordinator import Coordinator, Settings
from paceline.server.protocol.member import Member
from paceline.server.protocol.messages import COORDINATOR, Configuration, Pulled, Pushed
from paceline.server.protocol.replica import Replica

FAULTS_END_S = 120.0
SEGMENTS = 2
WORKERS = 3
TWOS = int("2" * 200, 4)  # in base four: a push that counts twice
# A worker whose ranges stand at different clocks for so long ends the job with an error. Longer than the 120 s of a
# job (see `link.Link.patience_s`), as messages are lost here all the time until FAULTS_END_S.
ENDS_AFTER_S = 200.0
MODES = (
    Mode(),
    Mode(),
    Mode("quorum", quorum=2),
    Mode("deadline", deadline_s=4.0),
    Mode("stale", staleness=0),
    Mode("stale", staleness=2),
    Mode("async"),
)


class Violation(Exception):
    """A promise was broken."""


@dataclass
class History:
    """A store whose value tells which updates it has seen."""

    values: list[int] = field(default_factory=lambda: [0] * SEGMENTS)
    updates: list[Any] = field(default_factory=list)
    changes: int = 0

    def combine(self, pushes):
        return sum(push.payload for push in pushes), {}

    def measure(self, updates):
        return float(len(updates))

    def finish(self, update, partials):
        if not all(partials):
            raise Violation("a gated round is applied before every range has told")
        return update

    def apply(self, update):
        self.changes += 1
        self.values[update.segment] += update.payload
        self.updates.append((update.segment, update.pushes))

    def read(self):
        return list(self.values)

    def content(self):
        return list(self.values), list(self.updates)

    def restore(self, content):
        self.changes += 1
        self.values, self.updates = list(content[0]), list(content[1])

    def clear(self):
        self.changes += 1
        self.values, self.updates = [0] * SEGMENTS, []


class Simulator:
    """One run."""

    def __init__(self, seed: int, steps: int = 6, replica_class=Replica, client_class=Client) -> None:
        self.random = random.Random(seed)
        self.steps, self.now_s, self.number, self.queue = steps, 0.0, 0, []
        self.replica_class, self.client_class = replica_class, client_class
        self.mode = self.random.choice(MODES)
        self.ranges = self.random.choice([1, 1, 2])
        self.gates = self.ranges if self.mode.is_by_rounds and self.random.random() < 0.5 else 0
        self.drop, self.double = self.random.choice([0, 0.05, 0.25]), self.random.choice([0, 0.1, 0.3])
        self.delay_s = self.random.choice([0.1, 1.0, 5.0])
        self.cut_off: Any = None
        self.members, self.alive = {}, {}
        for node in range(self.random.choice([2, 3])):
            self._start_member(node)
        self.sessions, self.working, self.numbers = {}, {}, {}
        for name in range(WORKERS):
            self._start_session((name, 0))
        self.has_failed = False  # the job ended with an error
        self.log: list[list[Configuration]] = []
        replicas = self.random.choice([2, len(self.members)])
        waits_for_replacement, is_sync = self.mode.is_by_rounds and self.random.random() < 0.7, self.mode.kind == "sync"
        self.settings = Settings(
            replicas, waits_for_replacement=waits_for_replacement or is_sync, needs_all=is_sync, steps=self.steps
        )
        nodes = list(self.members)
        chains = [[nodes[(first + at) % len(nodes)] for at in range(replicas)] for first in range(self.ranges)]
        self.coordinator = Coordinator.first(chains, list(self.sessions), self.log.append, self.settings)
        self.acknowledged: dict[Any, set[int]] = {}  # by range and push, segments that counted when acknowledged
        self.promised = [[0] * SEGMENTS for _ in range(self.ranges)]  # what a tail's values must have
        self.seen: dict[Any, list[int]] = {}
        self.began: dict[Any, int] = {}  # each worker's first clock
        self.events = 0
        self.checked: dict[Any, int] = {}  # by replica and range, changes of its store that were looked at
        self._deliver(COORDINATOR, self.coordinator.everybody())
        for what, after in (("tick", 1.0), ("crash", 20.0), ("cut", 15.0), ("stop_worker", 40.0), ("restart", 60.0)):
            self._at(self.random.uniform(0.2, after), what)

    def run(self, until_s: float = 3000.0) -> Simulator:
        """Play to the end."""
        while True:
            if not self.queue or self.now_s > until_s:
                raise Violation("liveness: somebody waits for ever")
            self.now_s, _, what, *arguments = heapq.heappop(self.queue)
            self.events += 1
            getattr(self, f"_do_{what}")(*arguments)
            self.check()
            if self.has_failed:
                return self
            if self.now_s > FAULTS_END_S and all(
                one.is_done for worker, one in self.sessions.items() if self.working[worker]
            ):
                return self

    # --- the world

    @property
    def is_faulty(self) -> bool:
        return self.now_s < FAULTS_END_S

    def _at(self, after_s: float, what: str, *arguments: Any) -> None:
        self.number += 1
        heapq.heappush(self.queue, (self.now_s + after_s, self.number, what, *arguments))

    def _deliver(self, source: Any, sent: Any) -> None:
        for addressee, about, message in sent:
            if self.is_faulty and self.cut_off is not None and (source == self.cut_off) != (addressee == self.cut_off):
                continue
            if self.is_faulty and self.random.random() < self.drop:
                continue
            delay = 0.1 + (self.random.expovariate(1 / self.delay_s) if self.is_faulty else 0)
            self._at(delay, "message", addressee, about, message)
            if self.is_faulty and self.random.random() < self.double:
                self._at(0.1 + self.random.expovariate(1 / (3 * self.delay_s)), "message", addressee, about, message)

    def _do_message(self, addressee: Any, about: int, message: Any) -> None:
        if addressee == COORDINATOR:
            self._deliver(COORDINATOR, self.coordinator.on(about, message, self.now_s))
        elif addressee in self.members:
            if self.alive[addressee]:
                self._deliver(addressee, self.members[addressee].on(about, message))
        elif self.working.get(addressee):
            self._to_session(addressee, about, message)

    def _do_tick(self) -> None:
        self._deliver(COORDINATOR, self.coordinator.tick(self.now_s))
        for node, member in self.members.items():
            if self.alive[node]:
                self._deliver(node, member.heartbeat() + member.expire(self.now_s) + member.repeat())
        for worker, session in list(self.sessions.items()):
            if self.working[worker]:
                self._deliver(worker, session.heartbeat(session.is_done) + session.repeat(self.now_s))
                since_s = session.differ_since_s
                if session.is_exact and since_s is not None and self.now_s - since_s > ENDS_AFTER_S:
                    self.has_failed = True
            if self.working[worker] and session.is_out and not session.is_done:
                self.working[worker] = False
                self._do_start_worker(worker)
        self._at(1.0 + self.random.random(), "tick")

    def _do_crash(self) -> None:
        """A replica dies, one at a time: another that has everything must live, and be known to."""
        able = [node for node in self.members if self.alive[node] and self._can_do_without(node)]
        if able and self.is_faulty:
            node = self.random.choice(able)
            self.alive[node] = False
            if self.random.random() < 0.5:  # its connections tell; otherwise its silence
                self.coordinator.forget(node, self.now_s)
            self._at(self.random.uniform(2, 30), "start_replica")
        if self.is_faulty:
            self._at(self.random.uniform(5, 40), "crash")

    def _can_do_without(self, node: int) -> bool:
        return all(self._has_other(node, about) for about in range(self.ranges))

    def _has_other(self, node: int, about: int) -> bool:
        known = self.coordinator.chains[about].configuration
        is_needed = self.members[node].replicas[about].is_synced or (node in known.chain and known.config_version == 0)
        others = [other for other in self.members if other != node and self.alive[other]]
        return not is_needed or any(self._could_lead(other, about) for other in others)

    def _could_lead(self, node: int, about: int) -> bool:
        """Whether a replica has everything that was promised, and the coordinator may know it."""
        known = self.coordinator.chains[about].configuration
        is_joining = known.joining is not None and known.joining[0] == node
        is_synced = self.members[node].replicas[about].is_synced
        return node in known.chain and not is_joining and is_synced and self._has_acknowledged(node, about)

    def _is_current(self, node: int, about: int) -> bool:
        replica = self.members[node].replicas[about]
        newest = self.coordinator.chains[about].configuration.config_version
        return replica.is_synced and replica.configuration.config_version == newest

    def _has_acknowledged(self, node: int, about: int) -> bool:
        values = self.members[node].replicas[about].store.values
        return all(value & mask == mask for value, mask in zip(values, self.promised[about], strict=True))

    def _counted(self, node: int, about: int, push: Any) -> set[int]:
        values, number = self.members[node].replicas[about].store.values, self.numbers[push]
        return {s for s in range(SEGMENTS) if values[s] >> 2 * number & 3}

    def _do_start_replica(self) -> None:
        self._start_member(max(self.members) + 1)  # a process that starts again is another one

    def _start_member(self, node: int) -> None:
        made = [
            self.replica_class(node, SEGMENTS, self.mode, History(), about, self.gates) for about in range(self.ranges)
        ]
        self.members[node] = Member(node, made)
        self.alive[node] = True

    def _do_cut(self) -> None:
        able = [None, *[n for n in self.members if self.alive[n] and self._can_do_without(n)]]
        self.cut_off = self.random.choice(able) if self.is_faulty else None
        if self.is_faulty:
            self._at(self.random.uniform(5, 25), "cut")

    def _do_stop_worker(self) -> None:
        """A worker dies; another incarnation of it, or a new one, comes."""
        able = [worker for worker in self.sessions if self.working[worker]]
        if len(able) > 1 and self.random.random() < 0.5:
            worker = self.random.choice(able)
            self.working[worker] = False
            if self.random.random() < 0.5:
                self.coordinator.forget(worker, self.now_s)
            self._at(self.random.uniform(1, 50), "start_worker", worker)

    def _do_start_worker(self, worker: Any) -> None:
        self._start_session((worker[0], worker[1] + 1))

    def _start_session(self, worker: Any) -> None:
        made = [self.client_class(worker, SEGMENTS, 0, self.steps) for _ in range(self.ranges)]
        self.sessions[worker] = Session(made, is_exact=self.mode.kind == "sync")
        self.working[worker] = True

    def _do_restart(self) -> None:
        """The coordinator dies and goes on from its log."""
        self.coordinator = Coordinator.again(self.log, self.log.append, self.settings)
        if self.is_faulty:
            self._at(self.random.uniform(10, 60), "restart")

    # --- workers

    def _to_session(self, worker: Any, about: int, message: Any) -> None:
        session = self.sessions[worker]
        client = session.clients[about]
        was_reading, clock = client.is_reading, client.clock
        sent, answers = session.on(about, message, self.now_s)
        self._deliver(worker, sent)
        if isinstance(message, Pushed) and not was_reading and message.clock == clock:
            self._note_acknowledged(worker, about, clock, message.segment)
        if answers is None:
            return
        if self.mode.kind == "sync" and len({answer.clock for answer in answers}) > 1:
            raise Violation(f"{worker} computes from parameters of different steps")
        for number, answer in enumerate(answers):
            assert isinstance(answer, Pulled)
            self._check_read(worker, number, session.clock, answer)
        if session.is_done:
            return
        self.began.setdefault(worker, session.clock)
        self.numbers.setdefault((worker, session.clock), len(self.numbers))
        gradient = 1 << 2 * self.numbers[worker, session.clock]
        self._deliver(worker, session.push([[(None, gradient)] * SEGMENTS] * self.ranges))

    def _note_acknowledged(self, worker: Any, about: int, clock: int, segment: int) -> None:
        counted = self._where_it_counts(worker, about, clock)
        if counted is None:
            return  # nobody is in the newest configuration yet: what has it can't be told
        known = self.acknowledged.setdefault((about, (worker, clock)), set())
        if segment in counted:
            known.add(segment)
            self.promised[about][segment] |= 1 << 2 * self.numbers[worker, clock]
        # Of one that joins: a round may have closed for some segments, or with what another in its place had sent.
        is_first = clock == self.began.get(worker)
        if self.mode.kind not in ("quorum", "deadline") and segment not in counted and not is_first:
            raise Violation(f"{worker} was told that its push at clock {clock} counts, and no replica has it")

    def _where_it_counts(self, worker: Any, about: int, clock: int) -> set[int] | None:
        members = self.coordinator.chains[about].configuration.chain
        chain = [n for n in members if self.alive.get(n) and self._is_current(n, about)]
        return set.intersection(*(self._counted(n, about, (worker, clock)) for n in chain)) if chain else None

    # --- promises

    def _check_read(self, worker: Any, about: int, clock: int, answer: Pulled) -> None:
        values = answer.values
        for (one, push), segments in self.acknowledged.items():
            if (
                one == about
                and push[0] == worker
                and any(not values[s] >> 2 * self.numbers[push] & 3 for s in segments)
            ):
                raise Violation(f"read-my-writes: {worker} at clock {clock} misses its push of clock {push[1]}")
        before = self.seen.get((worker, about), [0] * SEGMENTS)
        if any(old & ~new for old, new in zip(before, values, strict=True)):
            raise Violation(f"monotonic reads: {worker} at clock {clock} sees less than before")
        self.seen[worker, about] = values
        behind = {"sync": 1, "stale": self.mode.staleness + 1}.get(self.mode.kind)
        if behind is None:
            return
        # Who was in when it was given: a worker may come in while another range's answer is on its way.
        active = next(
            entry[about].workers for entry in self.log if entry[about].config_version == answer.config_version
        )
        for other, first in active.items():
            if other not in self.began:
                continue  # it has just come: rounds under way are closed without it
            # The first step of one that joins may count in part: of some segments its round was closed before.
            begins = self.began[other] + (self.began[other] > 0 or other[1] > 0)
            for step in range(max(first, begins), clock - behind + 1):
                number = self.numbers.get((other, step))
                if number is None or any(not value >> 2 * number & 3 for value in values):
                    raise Violation(
                        f"{self.mode.kind}: {worker} at clock {clock} misses {other}'s push of clock {step}"
                    )

    def check(self) -> None:
        """What must hold at any time."""
        for node, member in self.members.items():
            if self.alive[node]:
                for replica in member.replicas:
                    if replica.is_synced and self.checked.get((node, replica.key_range)) != replica.store.changes:
                        self._check_store(node, replica)
        for about, one in enumerate(self.coordinator.chains):
            self._check_chain(about, one.configuration.chain)

    def _check_store(self, node: int, replica: Replica) -> None:
        """Look at a replica's store, which has changed since the last time."""
        self.checked[node, replica.key_range] = replica.store.changes
        if any(value & TWOS for value in replica.store.values):
            raise Violation(f"a push counts twice on replica {node}")
        updates = replica.store.updates
        # What a job's end says of gradients that were left out comes from this number.
        counted = sum(len(pushes) for segment, pushes in updates if segment == 0)
        if replica.note is not None and replica.note["counted"] != counted:
            raise Violation(f"{counted} pushes count on replica {node}, it says {replica.note['counted']}")
        if self.mode.kind == "sync":
            self._check_rounds(node, updates)

    def _check_rounds(self, node: int, updates: list[Any]) -> None:
        """Under sync every update is made of all workers' gradients of its round: no sample of a step is dropped."""
        rounds = [0] * SEGMENTS
        for segment, pushes in updates:
            made_of = sorted((worker[0], clock) for worker, clock in pushes)
            expected = [(name, rounds[segment]) for name in range(WORKERS)]
            if made_of != expected:
                raise Violation(f"sync: round {rounds[segment]} on replica {node} is made of {made_of}")
            rounds[segment] += 1

    def _check_chain(self, about: int, members: tuple[int, ...]) -> None:
        chain = [n for n in members if self.alive.get(n) and self._is_current(n, about)]
        for before, after in itertools.pairwise(chain):
            ours, theirs = (self.members[node].replicas[about].store.updates for node in (before, after))
            if theirs != ours[: len(theirs)]:
                raise Violation(f"replica {after} has updates that {before}, before it in the chain, has not")
        if chain and chain[-1] == members[-1] and not self._has_acknowledged(chain[-1], about):
            raise Violation("an acknowledged push is lost")
