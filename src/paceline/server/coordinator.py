"""Who is in: the chain of replicas, the active workers, and the epoch in which that holds.

It decides from what it hears and from the time, writes each decision to its log before telling anybody, and can begin
again from that log. Gradients and parameters never pass through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.messages import Beat, Configuration, Node, Out, Worker, WorkerBeat

REPLICAS = 2  # one may fail


@dataclass(slots=True)
class Coordinator:
    """The state machine.

    Args:
        configuration: the first one, or the last of the log.
        write: keeps a decision, durably, before it is told.
        replicas: how long the chain is to be.
        node_deadline_s: silence of a replica after which it is taken for dead.
        worker_deadline_s: the same for a worker.
    """

    configuration: Configuration
    write: Callable[[Configuration], None]
    replicas: int = REPLICAS
    node_deadline_s: float = 8.0
    worker_deadline_s: float = 40.0
    heard: dict[Node, tuple[float, Beat]] = field(default_factory=dict)
    workers_heard: dict[Worker, tuple[float, WorkerBeat]] = field(default_factory=dict)
    known: set[Worker] = field(default_factory=set)  # that are or were active: one that was dropped comes as another
    began_s: float | None = None

    @classmethod
    def first(
        cls, nodes: Sequence[Node], workers: Iterable[Worker], write: Callable[[Configuration], None], **more: Any
    ) -> Coordinator:
        """Begin a job with these replicas, in this order."""
        configuration = Configuration(0, tuple(nodes), dict.fromkeys(workers, 0), confirmed=0, holders=tuple(nodes))
        write(configuration)
        return cls(configuration, write, known=set(configuration.workers), **more)

    @classmethod
    def again(cls, log: Sequence[Configuration], write: Callable[[Configuration], None], **more: Any) -> Coordinator:
        """Go on from the log of one that ended. Nobody is suspected before a deadline has passed since now."""
        return cls(log[-1], write, known={worker for one in log for worker in one.workers}, **more)

    def on(self, message: Beat | WorkerBeat, now_s: float) -> Out:
        """Take a sign of life."""
        if isinstance(message, Beat):
            self.heard[message.node] = (now_s, message)
            joining = self.configuration.joining
            is_in = message.node in self.configuration.chain and message.state_epoch == self.configuration.epoch
            if joining is not None and joining[0] == message.node and is_in:
                # Since it is the tail nothing was acknowledged without it, and before it took over everything.
                return self._decide(joining=None, holders=self.configuration.chain)
            if is_in and self.configuration.confirmed < self.configuration.epoch:
                return self._confirm()
            addressee: Any = message.node
        else:
            self.workers_heard[message.worker] = (now_s, message)
            addressee = message.worker
        now = self.configuration  # said again even to who has it: whether it is confirmed may have been lost
        return [(addressee, now)] if message.epoch < now.epoch or now.confirmed == now.epoch else []

    def tick(self, now_s: float) -> Out:
        """Now and then: who is silent, who wants in."""
        self.began_s = now_s if self.began_s is None else self.began_s
        for decide in (self._drop_nodes, self._bring_back, self._add_node, self._drop_workers, self._add_worker):
            if out := decide(now_s):
                return out
        return []

    def everybody(self) -> Out:
        """The present configuration, to all who are in it or have been heard."""
        addressees: list[Any] = [*{*self.configuration.chain, *self.heard}]
        addressees += [*{*self.configuration.workers, *self.workers_heard}]
        return [(addressee, self.configuration) for addressee in addressees]

    def _confirm(self) -> Out:
        now = self.configuration
        holders = tuple(node for node in now.chain if now.joining is None or node != now.joining[0])
        self.configuration = dataclasses.replace(now, confirmed=now.epoch, holders=holders)
        self.write(self.configuration)
        return self.everybody()

    def _decide(self, **changes: Any) -> Out:
        self.known |= changes.get("workers", {}).keys()
        self.configuration = dataclasses.replace(self.configuration, epoch=self.configuration.epoch + 1, **changes)
        self.write(self.configuration)
        return self.everybody()

    def _is_silent(self, node: Node, now_s: float) -> bool:
        since = self.heard[node][0] if node in self.heard else self.began_s
        return since is not None and now_s - since > self.node_deadline_s

    def _has_state(self, node: Node, now_s: float) -> bool:
        """Whether a replica is known to hold everything that was acknowledged, and to live."""
        if node not in self.heard or self._is_silent(node, now_s):
            return False
        joining = self.configuration.joining
        return self.heard[node][1].state_epoch >= 0 and not (joining is not None and joining[0] == node)

    def _drop_nodes(self, now_s: float) -> Out:
        chain, joining = self.configuration.chain, self.configuration.joining
        for node in chain:
            rest = tuple(other for other in chain if other != node)
            if self._is_silent(node, now_s) and any(self._has_state(other, now_s) for other in rest):
                is_joining = joining is not None and joining[0] == node
                return self._decide(chain=rest, joining=None if is_joining else joining)
        return []

    def _bring_back(self, now_s: float) -> Out:
        """One that was taken for dead, when those who were to go on without it never did."""
        chain, confirmed = self.configuration.chain, self.configuration.confirmed
        if confirmed == self.configuration.epoch or any(self._has_state(node, now_s) for node in chain):
            return []
        for node, (_, beat) in sorted(self.heard.items()):
            is_holder = node in self.configuration.holders and beat.state_epoch >= 0
            if node not in chain and is_holder and not self._is_silent(node, now_s):
                return self._decide(chain=(node,), joining=None)
        return []

    def _add_node(self, now_s: float) -> Out:
        chain = self.configuration.chain
        is_confirmed = self.configuration.confirmed == self.configuration.epoch
        if not is_confirmed or self.configuration.joining is not None or len(chain) >= self.replicas:
            return []  # unconfirmed: one that was taken for dead may be the only one left, and joining begins empty
        for node in sorted(self.heard):
            if node not in chain and not self._is_silent(node, now_s):
                return self._decide(chain=(*chain, node), joining=(node, self.configuration.epoch + 1))
        return []

    def _drop_workers(self, now_s: float) -> Out:
        for worker in self.configuration.workers:
            heard = self.workers_heard.get(worker)
            since = heard[0] if heard is not None else self.began_s
            is_silent = since is not None and now_s - since > self.worker_deadline_s
            if is_silent or (heard is not None and heard[1].is_done):
                rest = {other: first for other, first in self.configuration.workers.items() if other != worker}
                return self._decide(workers=rest)
        return []

    def _add_worker(self, now_s: float) -> Out:
        """One that comes begins at the clock of the furthest: it has no part in rounds under way."""
        for worker, (since, beat) in sorted(self.workers_heard.items()):
            is_new = worker not in self.known and not beat.is_done
            if is_new and now_s - since <= self.worker_deadline_s:
                clocks = [self.workers_heard[w][1].clock for w in self.configuration.workers if w in self.workers_heard]
                first = max([*clocks, *self.configuration.workers.values(), beat.clock], default=0) + 1
                return self._decide(workers={**self.configuration.workers, worker: first})
        return []
