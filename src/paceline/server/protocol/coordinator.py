"""Who is in: every range's chain of replicas, the active workers, and the epochs in which that holds.

It decides from what it hears and from the time, writes each decision to its log before telling anybody, and can begin
again from that log. Gradients and parameters never pass through it.

`Chain` looks after one range's replicas; `Coordinator` after the workers, who are the same for every range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.server.protocol.client import with_range
from paceline.server.protocol.messages import Configuration, Heartbeat, Node, Out, Sent, Worker, WorkerHeartbeat

REPLICAS = 2  # one may fail


@dataclass(frozen=True, slots=True)
class Settings:
    """How long chains are, and when silence is death.

    Args:
        replicas: of every range.
        node_deadline_s: silence of a replica after which it is taken for dead.
        worker_deadline_s: the same for a worker.
        node_return_s: time for a replica whose connection broke to come back.
        worker_return_s: the same for a worker, or for another in its place.
        waits_for_replacement: rounds wait for the one that takes a lost worker's place.
        needs_all: every round needs every worker's gradient (sync): a worker is left out only once its steps are done.
        steps: that every worker takes.
        lost_s: silence of all replicas of a range after which it is lost, although their connections stand.
    """

    replicas: int = REPLICAS
    node_deadline_s: float = 8.0
    worker_deadline_s: float = 40.0
    node_return_s: float = 1.0
    worker_return_s: float = 10.0
    waits_for_replacement: bool = False
    needs_all: bool = False
    steps: int = 0
    lost_s: float = 60.0


@dataclass(slots=True)
class Chain:
    """The replicas of one range.

    Args:
        configuration: the first one, or the last of the log.
        settings: how long the chain is to be, and when silence is death.
    """

    configuration: Configuration
    settings: Settings
    heard: dict[Node, tuple[float, Heartbeat]] = field(default_factory=dict)
    gone: dict[Node, float] = field(default_factory=dict)  # since when their connections are broken
    began_s: float | None = None

    def on(self, message: Heartbeat, now_s: float) -> Out:
        """Take a replica's sign of life."""
        self.heard[message.node] = (now_s, message)
        self.gone.pop(message.node, None)
        joining = self.configuration.joining
        is_in = message.node in self.configuration.chain and message.state_epoch == self.configuration.epoch
        if joining is not None and joining[0] == message.node and is_in:
            # Since it is the tail nothing was acknowledged without it, and before it took over everything.
            return self.decide(joining=None, holders=self.configuration.chain)
        if is_in and self.configuration.confirmed < self.configuration.epoch:
            return self._confirm()
        return self.answer(message.node, message.epoch)

    def answer(self, addressee: Any, epoch: int) -> Out:
        """The configuration, for one that may lack it."""
        now = self.configuration  # said again even to who has it: whether it is confirmed may have been lost
        return [(addressee, now)] if epoch < now.epoch or now.confirmed == now.epoch else []

    def tick(self, now_s: float, load: Callable[[Node], int], host: Callable[[Node], str]) -> Out:
        """Now and then: who is silent, who wants in.

        Args:
            now_s: the time.
            load: in how many chains a node is.
            host: where a node is: replicas are to be on several.
        """
        self.began_s = now_s if self.began_s is None else self.began_s
        return self._drop_nodes(now_s) or self._bring_back(now_s) or self._add_node(now_s, load, host)

    @property
    def is_whole(self) -> bool:
        """Whether as many replicas as there should be have everything."""
        now = self.configuration
        return now.joining is None and len(now.chain) == self.settings.replicas and now.confirmed == now.epoch

    def is_lost(self, now_s: float) -> bool:
        """Whether nobody is left who has everything: their processes have ended, or they are silent for long."""
        return self.began_s is not None and all(self._is_given_up(node, now_s) for node in self._holders)

    @property
    def has_ended(self) -> bool:
        """Whether the connections to all that had everything are broken."""
        return all(node in self.gone for node in self._holders)

    @property
    def _holders(self) -> set[Node]:
        return {*self.configuration.holders, *self.configuration.chain}

    def _is_given_up(self, node: Node, now_s: float) -> bool:
        if node in self.gone:
            return now_s - self.gone[node] > self.settings.node_return_s
        since_s = self.heard[node][0] if node in self.heard else self.began_s
        return since_s is not None and now_s - since_s > self.settings.lost_s

    def everybody(self) -> Out:
        """The present configuration, to all replicas and workers that are in it or have been heard."""
        addressees: list[Any] = [*{*self.configuration.chain, *self.heard}, *self.configuration.workers]
        return [(addressee, self.configuration) for addressee in addressees]

    def _confirm(self) -> Out:
        now = self.configuration
        holders = tuple(node for node in now.chain if now.joining is None or node != now.joining[0])
        self.configuration = dataclasses.replace(now, confirmed=now.epoch, holders=holders)
        return self.everybody()

    def decide(self, **changes: Any) -> Out:
        """A new epoch."""
        self.configuration = dataclasses.replace(self.configuration, epoch=self.configuration.epoch + 1, **changes)
        return self.everybody()

    def _is_silent(self, node: Node, now_s: float) -> bool:
        since = self.heard[node][0] if node in self.heard else self.began_s
        return since is not None and now_s - since > self.settings.node_deadline_s

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
                return self.decide(chain=rest, joining=None if is_joining else joining)
        return []

    def _bring_back(self, now_s: float) -> Out:
        """One that was taken for dead, when those who were to go on without it never did."""
        chain, confirmed = self.configuration.chain, self.configuration.confirmed
        if confirmed == self.configuration.epoch or any(self._has_state(node, now_s) for node in chain):
            return []
        for node, (_, heartbeat) in sorted(self.heard.items()):
            is_holder = node in self.configuration.holders and heartbeat.state_epoch >= 0
            if node not in chain and is_holder and not self._is_silent(node, now_s):
                return self.decide(chain=(node,), joining=None)
        return []

    def _add_node(self, now_s: float, load: Callable[[Node], int], host: Callable[[Node], str]) -> Out:
        chain = self.configuration.chain
        is_confirmed = self.configuration.confirmed == self.configuration.epoch
        if not is_confirmed or self.configuration.joining is not None or len(chain) >= self.settings.replicas:
            return []  # unconfirmed: one that was taken for dead may be the only one left, and joining begins empty
        hosts = {host(node) for node in chain}
        for node in sorted(self.heard, key=lambda node: (host(node) in hosts, load(node), node)):
            if node not in chain and not self._is_silent(node, now_s):
                return self.decide(chain=(*chain, node), joining=(node, self.configuration.epoch + 1))
        return []


@dataclass(slots=True)
class Coordinator:
    """The state machine.

    Args:
        chains: by range.
        write: keeps a decision about all ranges, durably, before it is told.
        settings: when silence is death.
    """

    chains: list[Chain]
    write: Callable[[Sequence[Configuration]], None]
    settings: Settings
    heard: dict[Worker, tuple[float, WorkerHeartbeat]] = field(default_factory=dict)
    gone: dict[Worker, float] = field(default_factory=dict)  # since when their connections are broken
    hosts: Mapping[Node, str] = field(default_factory=dict)  # of replicas; unknown ones count as one
    known: set[Worker] = field(default_factory=set)  # that are or were active: one that was dropped comes as another
    began_s: float | None = None

    @classmethod
    def first(
        cls,
        chains: Sequence[Sequence[Node]],
        workers: Iterable[Worker],
        write: Callable[[Sequence[Configuration]], None],
        settings: Settings,
    ) -> Coordinator:
        """Begin a job with these replicas, by range, head first."""
        clocks = dict.fromkeys(workers, 0)
        first = [Configuration(0, tuple(nodes), clocks, confirmed=0, holders=tuple(nodes)) for nodes in chains]
        write(first)
        return cls([Chain(one, settings) for one in first], write, settings, known=set(clocks))

    @classmethod
    def again(
        cls,
        log: Sequence[Sequence[Configuration]],
        write: Callable[[Sequence[Configuration]], None],
        settings: Settings,
    ) -> Coordinator:
        """Go on from the log of one that ended. Nobody is suspected before a deadline has passed since now."""
        known = {worker for entry in log for one in entry for worker in one.workers}
        return cls([Chain(one, settings) for one in log[-1]], write, settings, known=known)

    @property
    def workers(self) -> Mapping[Worker, int]:
        """The active ones and their first clocks."""
        return self.chains[0].configuration.workers

    def on(self, number: int, message: Heartbeat | WorkerHeartbeat, now_s: float) -> Sent:
        """Take a sign of life about range `number`."""
        chain = self.chains[number]
        if isinstance(message, WorkerHeartbeat):
            self.heard[message.worker] = (now_s, message)
            self.gone.pop(message.worker, None)
            return with_range(number, chain.answer(message.worker, message.epoch))
        before = chain.configuration
        return self._kept([before], [number], [chain.on(message, now_s)])

    def tick(self, now_s: float) -> Sent:
        """Now and then: who is silent, who wants in."""
        self.began_s = now_s if self.began_s is None else self.began_s
        for number, chain in enumerate(self.chains):
            before = chain.configuration
            if out := chain.tick(now_s, self._load, lambda node: self.hosts.get(node, "")):
                return self._kept([before], [number], [out])
        return self._drop_worker(now_s) or self._add_worker(now_s)

    def everybody(self) -> Sent:
        """The present configurations, to all who are in them or have been heard."""
        sent = [one for number, chain in enumerate(self.chains) for one in with_range(number, chain.everybody())]
        others = [worker for worker in self.heard if worker not in self.workers]
        return sent + [(w, number, chain.configuration) for number, chain in enumerate(self.chains) for w in others]

    def forget(self, who: Node | Worker, now_s: float) -> None:
        """The connection to somebody has broken: it has a short time left to come back."""
        settings = self.settings
        if isinstance(who, tuple):
            self.gone[who] = now_s
            return
        for chain in self.chains:
            chain.gone.setdefault(who, now_s)
            if who in chain.heard:
                since_s, heartbeat = chain.heard[who]
                chain.heard[who] = (min(since_s, now_s - settings.node_deadline_s + settings.node_return_s), heartbeat)

    def slept(self, seconds: float) -> None:
        """The coordinator itself stood still: nobody was silent in that time, whether heard before it or not."""
        self.began_s = None if self.began_s is None else self.began_s + seconds
        self.heard = {worker: (since + seconds, heartbeat) for worker, (since, heartbeat) in self.heard.items()}
        self.gone = {worker: since + seconds for worker, since in self.gone.items()}
        for chain in self.chains:
            chain.began_s = None if chain.began_s is None else chain.began_s + seconds
            chain.heard = {node: (since + seconds, heartbeat) for node, (since, heartbeat) in chain.heard.items()}
            chain.gone = {node: since + seconds for node, since in chain.gone.items()}

    def _load(self, node: Node) -> int:
        return sum(node in chain.configuration.chain for chain in self.chains)

    def _kept(self, before: list[Configuration], numbers: list[int], outs: list[Out]) -> Sent:
        if any(self.chains[number].configuration is not old for number, old in zip(numbers, before, strict=True)):
            self.write([chain.configuration for chain in self.chains])
        return [one for number, out in zip(numbers, outs, strict=True) for one in with_range(number, out)]

    def _decide(self, workers: Mapping[Worker, int]) -> Sent:
        """Every range gets the same workers, in one entry of the log."""
        self.known |= workers.keys()
        before = [chain.configuration for chain in self.chains]
        outs = [chain.decide(workers=workers) for chain in self.chains]
        self._kept(before, list(range(len(self.chains))), outs)
        return self.everybody()

    def _drop_worker(self, now_s: float) -> Sent:
        for worker in self.workers:
            if self._may_drop(worker, now_s):
                return self._decide({other: first for other, first in self.workers.items() if other != worker})
        return []

    def _may_drop(self, worker: Worker, now_s: float) -> bool:
        has_left = self._has_left(worker)
        if not self.settings.needs_all or self.is_finished:
            return has_left or self._is_silent(worker, now_s)
        # Rounds need its gradients: one that left early is missing until all leave.
        return has_left and all(self._has_left(other) for other in self.workers)

    @property
    def is_finished(self) -> bool:
        """Whether a worker has come to the end: then every round is closed."""
        clocks = [heartbeat.clock for _, heartbeat in self.heard.values()]
        return bool(self.settings.steps) and max(clocks, default=0) >= self.settings.steps

    def _has_left(self, worker: Worker) -> bool:
        heard = self.heard.get(worker)
        return heard is not None and heard[1].is_done

    def left_early(self) -> list[Worker]:
        """Workers that have left although rounds need their gradients."""
        is_needed = self.settings.needs_all and not self.is_finished
        return [worker for worker in self.workers if self._has_left(worker)] if is_needed else []

    def missing(self, now_s: float) -> dict[Worker, float]:
        """Active workers from whom nothing has been heard for too long, and for how many seconds.

        One whose connection is broken counts at once.
        """
        silent_s: dict[Worker, float] = {}
        for worker in self.workers:
            since_s = self.heard[worker][0] if worker in self.heard else self.began_s
            quiet_s = now_s - since_s if since_s is not None else 0.0
            if worker in self.gone or quiet_s > self.settings.worker_deadline_s:
                silent_s[worker] = quiet_s
        return {worker: quiet_s for worker, quiet_s in silent_s.items() if not self._has_left(worker)}

    def _is_silent(self, worker: Worker, now_s: float) -> bool:
        deadline_s, return_s = self.settings.worker_deadline_s, self.settings.worker_return_s
        if worker in self.gone:  # another takes its place, or nobody does
            return now_s - self.gone[worker] > return_s
        if worker in self.heard:
            return now_s - self.heard[worker][0] > deadline_s
        return self.began_s is not None and now_s - self.began_s > max(deadline_s, return_s)

    def _add_worker(self, now_s: float) -> Sent:
        """One that takes another's place begins where that one was: rounds under way wait for it.

        Any other begins at the clock of the furthest: it has no part in rounds under way.
        """
        for worker, (since, heartbeat) in sorted(self.heard.items()):
            if worker in self.known or heartbeat.is_done or now_s - since > self.settings.worker_deadline_s:
                continue
            before = next((other for other in self.workers if other[0] == worker[0]), None)
            if before is not None and before > worker:
                continue
            rest = {other: first for other, first in self.workers.items() if other != before}
            if before is not None and self.settings.waits_for_replacement:
                return self._decide({**rest, worker: self.workers[before]})
            clocks = [self.heard[other][1].clock for other in self.workers if other in self.heard]
            first = max([*clocks, *self.workers.values(), heartbeat.clock], default=0) + 1
            return self._decide({**rest, worker: first})
        return []
