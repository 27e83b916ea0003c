"""Decide membership: which replicas are in the chain of each range, and which workers take part.

The coordinator decides by heartbeats and time, writes each decision to its log before it sends it to anybody, and can
go on from that log. Gradients and parameters never pass through it.

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
    """The length of chains, and the silence after which a process is taken for dead.

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
    heard: dict[Node, tuple[float, Heartbeat]] = field(default_factory=dict)  # the last heartbeat, and when it came
    gone: dict[Node, float] = field(default_factory=dict)  # since when their connections are broken
    began_s: float | None = None

    def on(self, message: Heartbeat, now_s: float) -> Out:
        """Handle a replica's heartbeat."""
        node = message.node
        self.heard[node] = (now_s, message)
        self.gone.pop(node, None)
        current = self.configuration
        is_in = node in current.chain and message.state_config_version == current.config_version
        if is_in and self._is_joining(node):
            # Since it is the tail nothing was acknowledged without it, and before it took over everything.
            return self.decide(joining=None, holders=current.chain)
        # One replica with everything is in this version: from here on replicas may make promises in it.
        if is_in and current.confirmed < current.config_version:
            return self._confirm()
        return self.answer(node, message.config_version)

    def answer(self, addressee: Any, config_version: int) -> Out:
        """Return the configuration for a process that is in version `config_version`, if it may lack anything of it."""
        current = self.configuration
        # Sent again even to who has this version: the message that said that it is confirmed may have been lost.
        if config_version < current.config_version or self._is_confirmed:
            return [(addressee, current)]
        return []

    def tick(self, now_s: float, load: Callable[[Node], int], host: Callable[[Node], str]) -> Out:
        """Make the next decision that the silence or the presence of a replica asks for.

        Args:
            now_s: the current time, in seconds.
            load: a function that returns the number of chains in which a node is.
            host: a function that returns the host of a node: replicas are to be on several.
        """
        if self.began_s is None:
            self.began_s = now_s
        # One decision at a time. Dropping first makes room in the chain for another.
        return self._drop_nodes(now_s) or self._bring_back(now_s) or self._add_node(now_s, load, host)

    @property
    def is_whole(self) -> bool:
        """True if as many replicas as there should be have everything."""
        current = self.configuration
        return current.joining is None and len(current.chain) == self.settings.replicas and self._is_confirmed

    @property
    def _is_confirmed(self) -> bool:
        return self.configuration.confirmed == self.configuration.config_version

    def is_lost(self, now_s: float) -> bool:
        """Return True if nobody is left who has everything: their processes have ended, or they are silent for long."""
        return self.began_s is not None and all(self._is_given_up(node, now_s) for node in self._holders)

    @property
    def has_ended(self) -> bool:
        """True if the connections to all that had everything are broken."""
        return all(node in self.gone for node in self._holders)

    @property
    def _holders(self) -> set[Node]:
        return {*self.configuration.holders, *self.configuration.chain}

    def _is_joining(self, node: Node) -> bool:
        return self.configuration.joining is not None and self.configuration.joining[0] == node

    def _silent_since_s(self, node: Node) -> float | None:
        """Return when a node was heard last; of one that never was, when this coordinator began."""
        return self.heard[node][0] if node in self.heard else self.began_s

    def _is_given_up(self, node: Node, now_s: float) -> bool:
        # Its process has ended, unless it connects again soon. A stopped one still has the parameters: it gets longer.
        if node in self.gone:
            return now_s - self.gone[node] > self.settings.node_return_s
        since_s = self._silent_since_s(node)
        return since_s is not None and now_s - since_s > self.settings.lost_s

    def everybody(self) -> Out:
        """Return the current configuration for all replicas and workers that are in it or have been heard."""
        addressees: list[Any] = [*{*self.configuration.chain, *self.heard}, *self.configuration.workers]
        return [(addressee, self.configuration) for addressee in addressees]

    def _confirm(self) -> Out:
        current = self.configuration
        holders = tuple(node for node in current.chain if not self._is_joining(node))
        self.configuration = dataclasses.replace(current, confirmed=current.config_version, holders=holders)
        return self.everybody()

    def decide(self, **changes: Any) -> Out:
        """Change the configuration and give it the next version."""
        version = self.configuration.config_version + 1
        self.configuration = dataclasses.replace(self.configuration, config_version=version, **changes)
        return self.everybody()

    def _is_silent(self, node: Node, now_s: float) -> bool:
        since_s = self._silent_since_s(node)
        return since_s is not None and now_s - since_s > self.settings.node_deadline_s

    def _has_state(self, node: Node, now_s: float) -> bool:
        """Return True if a replica is known to hold everything that was acknowledged, and to live."""
        if node not in self.heard or self._is_silent(node, now_s):
            return False
        _, heartbeat = self.heard[node]
        return heartbeat.state_config_version >= 0 and not self._is_joining(node)

    def _drop_nodes(self, now_s: float) -> Out:
        """Take a silent replica out of the chain if another one has everything."""
        for node in self.configuration.chain:
            if not self._is_silent(node, now_s):
                continue
            remaining = tuple(member for member in self.configuration.chain if member != node)
            # The last one that has everything stays, even if it is silent: without it the parameters are gone.
            if any(self._has_state(member, now_s) for member in remaining):
                # If it was the joining one, nobody joins now.
                joining = None if self._is_joining(node) else self.configuration.joining
                return self.decide(chain=remaining, joining=joining)
        return []

    def _bring_back(self, now_s: float) -> Out:
        """Begin a chain anew with a replica that was taken for dead, if those left in the chain never confirmed it."""
        chain = self.configuration.chain
        if self._is_confirmed or any(self._has_state(node, now_s) for node in chain):
            return []
        for node, (_, heartbeat) in sorted(self.heard.items()):
            # Only holders: what was promised in the last confirmed version is in all of them.
            is_holder = node in self.configuration.holders and heartbeat.state_config_version >= 0
            if is_holder and node not in chain and not self._is_silent(node, now_s):
                return self.decide(chain=(node,), joining=None)
        return []

    def _add_node(self, now_s: float, load: Callable[[Node], int], host: Callable[[Node], str]) -> Out:
        """Append a replica to a chain that is too short: rather one on another host, then one with little to do."""
        chain = self.configuration.chain
        if not self._is_confirmed:
            return []  # one that was taken for dead may be the only one left, and joining begins empty
        if self.configuration.joining is not None or len(chain) >= self.settings.replicas:
            return []
        hosts = {host(node) for node in chain}
        for node in sorted(self.heard, key=lambda node: (host(node) in hosts, load(node), node)):
            if node not in chain and not self._is_silent(node, now_s):
                return self.decide(chain=(*chain, node), joining=(node, self.configuration.config_version + 1))
        return []


@dataclass(slots=True)
class Coordinator:
    """The state machine of the coordinator.

    Args:
        chains: the chain of each range.
        write: a function that keeps a decision about all ranges, durably, before it is sent to anybody.
        settings: the settings of when silence is death.
    """

    chains: list[Chain]
    write: Callable[[Sequence[Configuration]], None]
    settings: Settings
    heard: dict[Worker, tuple[float, WorkerHeartbeat]] = field(default_factory=dict)  # the last one, and when it came
    gone: dict[Worker, float] = field(default_factory=dict)  # since when their connections are broken
    hosts: Mapping[Node, str] = field(default_factory=dict)  # of replicas; unknown ones count as one
    ever_active: set[Worker] = field(default_factory=set)  # one of these that was dropped comes back as another
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
        configurations: list[Configuration] = []
        for nodes in chains:
            configurations.append(Configuration(0, tuple(nodes), clocks, confirmed=0, holders=tuple(nodes)))
        write(configurations)
        begun = [Chain(configuration, settings) for configuration in configurations]
        return cls(begun, write, settings, ever_active=set(clocks))

    @classmethod
    def again(
        cls,
        log: Sequence[Sequence[Configuration]],
        write: Callable[[Sequence[Configuration]], None],
        settings: Settings,
    ) -> Coordinator:
        """Go on from the log of one that ended. Nobody is suspected before a deadline has passed since now."""
        # From all lines of the log: a worker that was dropped long ago must not come back under the same incarnation.
        ever_active: set[Worker] = set()
        for decision in log:
            for configuration in decision:
                ever_active.update(configuration.workers)
        chains = [Chain(configuration, settings) for configuration in log[-1]]
        return cls(chains, write, settings, ever_active=ever_active)

    @property
    def workers(self) -> Mapping[Worker, int]:
        """The active workers and their first clocks."""
        return self.chains[0].configuration.workers

    def on(self, number: int, message: Heartbeat | WorkerHeartbeat, now_s: float) -> Sent:
        """Handle a heartbeat about range `number`."""
        chain = self.chains[number]
        if isinstance(message, WorkerHeartbeat):
            self.heard[message.worker] = (now_s, message)
            self.gone.pop(message.worker, None)
            return with_range(number, chain.answer(message.worker, message.config_version))
        # On the disk before it is sent: a coordinator that starts again must know all that others may have heard.
        before = chain.configuration
        out = chain.on(message, now_s)
        if chain.configuration is not before:
            self._write_decision()
        return with_range(number, out)

    def tick(self, now_s: float) -> Sent:
        """Make the next decision that the silence or the presence of somebody asks for."""
        if self.began_s is None:
            self.began_s = now_s
        for number, chain in enumerate(self.chains):
            out = chain.tick(now_s, self._load, self._host)
            if out:  # the chain has made a decision
                self._write_decision()
                return with_range(number, out)
        return self._drop_worker(now_s) or self._add_worker(now_s)

    def everybody(self) -> Sent:
        """Return the current configurations for all who are in them or have been heard."""
        sent: Sent = []
        for number, chain in enumerate(self.chains):
            sent += with_range(number, chain.everybody())
        # Workers that are out, or not in yet: they learn it from the configuration.
        inactive = [worker for worker in self.heard if worker not in self.workers]
        for number, chain in enumerate(self.chains):
            sent += [(worker, number, chain.configuration) for worker in inactive]
        return sent

    def forget(self, who: Node | Worker, now_s: float) -> None:
        """Note that the connection to a process is broken: it has a short time left to come back."""
        if isinstance(who, tuple):
            self.gone[who] = now_s
            return
        # As if it had been silent for the deadline, but for the time that it has to come back.
        latest_s = now_s - self.settings.node_deadline_s + self.settings.node_return_s
        for chain in self.chains:
            chain.gone.setdefault(who, now_s)
            if who in chain.heard:
                since_s, heartbeat = chain.heard[who]
                chain.heard[who] = (min(since_s, latest_s), heartbeat)

    def slept(self, seconds: float) -> None:
        """Note that the coordinator itself stood still: nobody was silent in that time, whether heard before or not."""
        # All times move by as much, so that each silence is as long as it was before.
        if self.began_s is not None:
            self.began_s += seconds
        self.heard = {worker: (since_s + seconds, heartbeat) for worker, (since_s, heartbeat) in self.heard.items()}
        self.gone = {worker: since_s + seconds for worker, since_s in self.gone.items()}
        for chain in self.chains:
            if chain.began_s is not None:
                chain.began_s += seconds
            chain.heard = {node: (since_s + seconds, heartbeat) for node, (since_s, heartbeat) in chain.heard.items()}
            chain.gone = {node: since_s + seconds for node, since_s in chain.gone.items()}

    def _load(self, node: Node) -> int:
        return sum(node in chain.configuration.chain for chain in self.chains)

    def _host(self, node: Node) -> str:
        return self.hosts.get(node, "")

    def _write_decision(self) -> None:
        self.write([chain.configuration for chain in self.chains])

    def _decide(self, workers: Mapping[Worker, int]) -> Sent:
        """Give every range the same workers, in one entry of the log."""
        self.ever_active |= workers.keys()
        # One line of the log for all ranges: a crash can't leave them with different workers.
        for chain in self.chains:
            chain.decide(workers=workers)
        self._write_decision()
        return self.everybody()

    def _without(self, worker: Worker | None) -> dict[Worker, int]:
        return {known: first for known, first in self.workers.items() if known != worker}

    def _drop_worker(self, now_s: float) -> Sent:
        for worker in self.workers:
            if self._may_drop(worker, now_s):
                return self._decide(self._without(worker))
        return []

    def _may_drop(self, worker: Worker, now_s: float) -> bool:
        has_left = self._has_left(worker)
        if not self.settings.needs_all or self.is_finished:
            return has_left or self._is_silent(worker, now_s)
        # Rounds need its gradients: one that left early is missing until all leave.
        return has_left and all(self._has_left(known) for known in self.workers)

    @property
    def is_finished(self) -> bool:
        """True if a worker has come to the end: then every round is closed."""
        clocks = [heartbeat.clock for _, heartbeat in self.heard.values()]
        return bool(self.settings.steps) and max(clocks, default=0) >= self.settings.steps

    def _has_left(self, worker: Worker) -> bool:
        if worker not in self.heard:
            return False
        _, heartbeat = self.heard[worker]
        return heartbeat.is_done

    def left_early(self) -> list[Worker]:
        """Return the workers that have left although rounds need their gradients."""
        if not self.settings.needs_all or self.is_finished:
            return []
        return [worker for worker in self.workers if self._has_left(worker)]

    def missing(self, now_s: float) -> dict[Worker, float]:
        """Return the active workers from whom nothing has been heard for too long, and for how many seconds.

        One whose connection is broken counts at once.
        """
        missing_s: dict[Worker, float] = {}
        for worker in self.workers:
            if self._has_left(worker):
                continue
            since_s = self.heard[worker][0] if worker in self.heard else self.began_s
            silent_s = now_s - since_s if since_s is not None else 0.0
            if worker in self.gone or silent_s > self.settings.worker_deadline_s:
                missing_s[worker] = silent_s
        return missing_s

    def _is_silent(self, worker: Worker, now_s: float) -> bool:
        deadline_s = self.settings.worker_deadline_s
        return_s = self.settings.worker_return_s
        if worker in self.gone:  # another takes its place, or nobody does
            return now_s - self.gone[worker] > return_s
        if worker in self.heard:
            return now_s - self.heard[worker][0] > deadline_s
        # Never heard by this coordinator, which may have just been started again: it has time to connect.
        return self.began_s is not None and now_s - self.began_s > max(deadline_s, return_s)

    def _add_worker(self, now_s: float) -> Sent:
        """Let one worker in that has come.

        One that takes another's place begins where that one was: rounds under way wait for it. Any other begins at the
        clock of the furthest: it has no part in rounds under way.
        """
        for worker, (since_s, heartbeat) in sorted(self.heard.items()):
            # `heard` keeps those that left or were dropped. A dropped one comes back as another incarnation, by which
            # its pushes are identified.
            if worker in self.ever_active or heartbeat.is_done or now_s - since_s > self.settings.worker_deadline_s:
                continue
            replaced = self._active_incarnation(worker[0])
            # A late heartbeat of an incarnation that has been replaced.
            if replaced is not None and replaced > worker:
                continue
            if replaced is not None and self.settings.waits_for_replacement:
                first = self.workers[replaced]
            else:
                first = max(self._furthest_clock(), heartbeat.clock) + 1
            # One swap in one version: no round sees both incarnations, or neither.
            return self._decide({**self._without(replaced), worker: first})
        return []

    def _active_incarnation(self, name: int) -> Worker | None:
        """Return the active worker of this name; None where there is none."""
        for worker in self.workers:
            if worker[0] == name:
                return worker
        return None

    def _furthest_clock(self) -> int:
        """Return the highest clock of the active workers; -1 where there are none."""
        furthest = -1
        for worker, first in self.workers.items():
            furthest = max(furthest, first)
            if worker in self.heard:
                _, heartbeat = self.heard[worker]
                furthest = max(furthest, heartbeat.clock)
        return furthest
