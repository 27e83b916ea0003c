"""Run the coordinator: gather a job's servers and workers, start the job, and replace processes that are lost.

Gradients and parameters don't pass through it. When it dies, workers and servers go on as they are; started again on
the same log it goes on where it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.nouns.errors import CheckpointError, PacelineError, PlanError, ReadError
from paceline.nouns.reading import parse_json
from paceline.server import setup
from paceline.server.coordinator.absences import BY_HAND_S, Absences, silence_s
from paceline.server.coordinator.decision_log import Log
from paceline.server.protocol.coordinator import Coordinator, Settings
from paceline.server.protocol.messages import COORDINATOR, Heartbeat, Node, Worker, WorkerHeartbeat
from paceline.server.server_layout import SEGMENT_BYTES, ServerLayout
from paceline.server.settings import OF_WORKERS, JobSettings
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.connection import Connection
from paceline.server.transport.peers import HEARTBEAT_S, Peers, every, facts_of, is_watcher

LEAST_DEADLINE_S = 5.0  # silence that may be a machine under load
ASK_S = 2.0  # of silence before somebody is asked for a sign of life
# A tick comes every HEARTBEAT_S / 2, 0.25 s: eight of them in a row are missing then.
STOOD_STILL_S = 2.0  # between two ticks of HEARTBEAT_S / 2: this process was stopped, or its host slept
PAUSES = 8  # silence is death after so many times the longest pause between signs of life
RECENT_S = 60.0  # pauses of those who were heard within it count


class Coordination(Peers):
    """The coordinator's process: the state machine `Coordinator` with connections, a log and the start of the job.

    Args:
        listen_at: the address for servers and workers.
        job: what the plan says; the workers add their part.
        log: the file that keeps decisions.
        tell: takes what happens, as events.
        returns_s: time for another worker to take a lost one's place; 0 where nobody starts one.
    """

    takes_layouts = True

    def __init__(
        self,
        listen_at: Address,
        job: JobSettings,
        log: Path,
        tell: Callable[[dict[str, Any]], None],
        returns_s: float = 0.0,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(credentials)
        self.listen_at = listen_at
        self.job = job
        self.tell = tell
        self.returns_s = returns_s
        self.log = Log.open(log)
        self.address = ""
        self.layouts: dict[int, ServerLayout] = {}  # by worker, until the job starts
        self.workers: dict[int, Worker] = {}  # by name, the incarnation that is here
        self.coordinator: Coordinator | None = None
        self.installed: set[tuple[int, Node]] = set()  # ranges and servers that have their first content
        self.chains: list[list[Node]] = []  # that the job is about to start with
        self.pauses: dict[Any, tuple[float, float]] = {}  # who was last heard when, and the longest pause of late
        self.told_versions: list[int] = []  # of the configurations in the last event
        self.active: set[Worker] = set()
        self.left_out: set[int] = set()  # workers without whom the others go on
        self.last_heard_s: dict[Any, float] = {}  # when servers and workers that are connected said anything
        self.last_asked_s: dict[Any, float] = {}
        self.last_tick_s = 0.0
        self.reports: dict[Any, dict[str, Any]] = {}  # by worker or server, the last status that it sent
        self.silence_s = silence_s(os.environ)
        patience_s = self.silence_s if returns_s else max(self.silence_s, BY_HAND_S)
        self.absences = Absences(patience_s, is_replaced=bool(returns_s))
        self.ending: asyncio.Future[None] | None = None

    async def run(self, ready: Callable[[str], None] = lambda address: None) -> None:
        """Serve until the job is over.

        Args:
            ready: a function that is called with the address where it listens.

        Raises:
            PacelineError: the address can't be had; the plan does not fit the model; a part of the parameters is lost.
        """
        self.ending = asyncio.get_running_loop().create_future()
        self.address = await self.listen(self.listen_at)
        ready(self.address)
        # Started again: what the workers added to the plan's settings is in the log.
        if self.log.job is not None:
            self.job = JobSettings.of_json(self.log.job[0])
        if self.log.configurations:
            self.coordinator = Coordinator.again(self.log.configurations, self._decided, self._settings())
            self.told_versions = [chain.configuration.config_version for chain in self.coordinator.chains]
            self.tell({"event": "coordinator_back", "epochs": self.told_versions, "mode": self.job.mode})
        self.spawn(every(HEARTBEAT_S / 2, self._tick))
        try:
            await self.ending
        finally:
            self.close()
            self.log.close()

    def failed(self, error: BaseException | None) -> None:
        """End with the error, and tell the workers."""
        if isinstance(error, PacelineError):
            self._refuse_all(error)
        if self.ending is not None and not self.ending.done():
            asyncio.get_running_loop().call_later(0.2, self._end, error)  # so that the refusals are sent before

    def _end(self, error: BaseException | None) -> None:
        if self.ending is not None and not self.ending.done():
            self.ending.set_exception(error or RuntimeError("failed"))

    # --- who comes

    def greet(self, connection: Connection, hello: setup.Hello) -> object:
        """Name servers and workers that have no name yet.

        Raises:
            PacelineError: the worker's model is another than the others'.
        """
        # Peers knows the connection by its peer only after this: what is sent to all waits for the loop's next turn.
        loop = asyncio.get_running_loop()
        if hello.role == "server":
            # One that connects again keeps its number; numbers that the log has not given out are not taken.
            node = hello.name if 0 <= hello.name < self.log.nodes else self.log.name_node()
            self.addresses[node] = Address.parse(hello.address)
            connection.send(0, setup.Welcome(node, 0))
            loop.call_soon(self.call, self._server_is_here, node)
            return node
        worker = self._greet_worker(hello)
        connection.send(0, setup.Welcome(*worker))
        loop.call_soon(self.call, self._worker_is_here, worker)
        return worker

    def _greet_worker(self, hello: setup.Hello) -> Worker:
        layout, settings = _layout_of(hello)
        if self.log.job is not None:
            layout.check_same(ServerLayout.of_json(self.log.job[1]), f"worker {hello.name}", "the job")
        elif self.layouts:
            name, other_layout = next(iter(self.layouts.items()))
            layout.check_same(other_layout, f"worker {hello.name}", f"worker {name}")
        layout.ranges(self.job.servers)  # raises PlanError for a model without parameters
        self.layouts[hello.name] = layout
        if self.log.job is None:
            self.job = dataclasses.replace(self.job, **settings)
        # The same process again, after its connection broke.
        if 0 <= hello.incarnation < self.log.incarnations.get(hello.name, 0):
            return hello.name, hello.incarnation
        return self.log.name_worker(hello.name)

    def _server_is_here(self, node: Node) -> None:
        self._tell_addresses()
        if self.coordinator is None:
            self._start_if_all_are_here()
            return
        self._send_start(node)
        self.send(self.coordinator.everybody())

    def _worker_is_here(self, worker: Worker) -> None:
        self.workers[worker[0]] = worker
        self._tell_addresses()
        if self.coordinator is None:
            self._start_if_all_are_here()
            return
        for known in self.coordinator.workers:
            # A new incarnation shows that the old one's process has ended, whatever its connection looks like.
            if known[0] == worker[0] and known != worker:  # whose place it takes
                self.coordinator.forget(known, time.monotonic())
        self._send_start(worker)
        self.send([item for item in self.coordinator.everybody() if item[0] == worker])

    def _connected_workers(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker in self.connections]

    def _start_if_all_are_here(self) -> None:
        """Begin the job once enough servers and workers are here: have a worker hand out the first parameters."""
        servers = sorted(peer for peer in self.connections if isinstance(peer, int))
        workers = self._connected_workers()
        if len(servers) < self.job.servers or len(workers) < self.job.workers:
            return
        nodes = hosts_in_turn(servers[: self.job.servers], self.addresses)
        layout = self.layouts[min(self.layouts)]
        # In the log before any process hears of it. A job that began again keeps its first settings.
        if self.log.job is None:
            self.log.begin(self.job.to_json(), layout.to_json())
        ranges = len(layout.ranges(self.job.servers))
        self.chains = _first_chains(nodes, ranges, self.job.replicas)
        if ranges < len(nodes) and not self.installed:
            self.tell({"event": "notice", "text": _few_ranges(ranges, len(nodes), self.job.replicas)})
        # Servers may have changed since an earlier attempt: all content is handed out again.
        self.installed = set()
        for peer in [*servers, *workers]:
            self._send_start(peer)
        first_worker = self.workers[min(self.workers)]
        for number, chain in enumerate(self.chains):
            # From only one worker: all others, and it too, begin with what they then pull.
            self.send([(first_worker, number, setup.Install(tuple(chain)))])

    def _send_start(self, peer: object) -> None:
        assert self.log.job is not None
        settings, layout = self.log.job
        self.send([(peer, 0, setup.StartServers(settings, layout.encode()))])

    def _tell_addresses(self) -> None:
        connected = {node: str(address) for node, address in self.addresses.items() if node in self.connections}
        for peer in self.connections:
            if not is_watcher(peer):
                self.send([(peer, 0, setup.Addresses(json.dumps(connected)))])

    # --- what comes

    def take(self, peer: object, number: int, message: object) -> None:
        """Handle a message about range `number`."""
        self.last_heard_s[peer] = time.monotonic()
        if isinstance(message, setup.Status):
            self.reports[peer] = facts_of(message.facts)
            self._note_waiting(peer)
        elif isinstance(message, setup.Installed):
            self._note_installed(number, message.node)
        elif isinstance(message, Heartbeat | WorkerHeartbeat):
            self._note_pause(peer)
            if self.coordinator is not None and number < len(self.coordinator.chains):
                self.send(self.coordinator.on(number, message, time.monotonic()))
                if isinstance(message, WorkerHeartbeat) and message.is_done:
                    self._tick()  # it waits to hear that it is out

    def _note_installed(self, number: int, node: Node) -> None:
        """Start the job when the last server has its first parameters."""
        if self.coordinator is not None:
            return
        self.installed.add((number, node))
        workers = self._connected_workers()
        if len(workers) < self.job.workers:
            return  # one has died meanwhile; when another is there, all begins again
        for range_number, chain in enumerate(self.chains):
            if any((range_number, member) not in self.installed for member in chain):
                return
        self.coordinator = Coordinator.first(self.chains, workers, self._decided, self._settings())
        started = {"servers": self.job.servers, "workers": len(workers), "mode": self.job.mode}
        self.tell({"event": "servers_started", **started})
        self.send(self.coordinator.everybody())

    def _note_waiting(self, peer: object) -> None:
        if self.coordinator is None or peer not in self.coordinator.heard:
            return
        _, heartbeat = self.coordinator.heard[peer]
        is_waiting = self.reports[peer].get("is_waiting") is True
        self.absences.note_waiting(peer, heartbeat.clock, is_waiting, time.monotonic())

    def lost(self, peer: Any) -> None:
        """Note that a connection has ended."""
        now = time.monotonic()
        self.last_heard_s.pop(peer, None)
        self.last_asked_s.pop(peer, None)
        if self.coordinator is not None and not is_watcher(peer):
            self.coordinator.forget(peer, now)
        if self.coordinator is None and isinstance(peer, tuple):
            self.workers.pop(peer[0], None)

    # --- what time brings

    def _tick(self) -> None:
        now = time.monotonic()
        # First: whatever looks at silence afterwards must not count the time in which nobody could be heard.
        stood_still_s = self._note_standstill(now)
        self._look_for_silent(now)
        if self.coordinator is None:
            return
        if stood_still_s:
            self.coordinator.slept(stood_still_s)
        self._renew_settings(self.coordinator)
        sent = self.coordinator.tick(now)
        is_over = self._is_over(self.coordinator, now)
        if is_over:  # before the last worker hears that it may go: then this process may be ended
            self.tell({"event": "servers_ended", **self._counted()})
        self.send(sent)
        # After the decisions are sent: these two may end the job with an error.
        self._check_ranges(now)
        self._look_for_missing(now)
        if is_over and self.ending is not None:
            self.ending.set_result(None)

    def _note_standstill(self, now: float) -> float:
        """Return the seconds for which this process was stopped, else 0, and count them as nobody's silence."""
        since_tick_s = now - self.last_tick_s if self.last_tick_s else 0.0
        self.last_tick_s = now  # also before the job's start: it may be stopped right after it
        if since_tick_s <= STOOD_STILL_S:
            return 0.0
        self.last_heard_s = {peer: heard_s + since_tick_s for peer, heard_s in self.last_heard_s.items()}
        # Said before the standstill; who still waits says so again.
        self.absences.waits.clear()
        return since_tick_s

    def _renew_settings(self, coordinator: Coordinator) -> None:
        """Have the state machine use the deadlines and hosts as they are now."""
        settings = self._settings()
        coordinator.settings = settings
        for chain in coordinator.chains:
            chain.settings = settings
        coordinator.hosts = {node: _host(address) for node, address in self.addresses.items()}

    def _is_over(self, coordinator: Coordinator, now: float) -> bool:
        """Return True if all workers have left, and no other needs the servers (to join, to read, to save)."""
        if coordinator.workers or self._is_joining(now):
            return False
        # Workers that were all dropped as silent may come back. The job is over only if one has said so.
        if not any(heartbeat.is_done for _, heartbeat in coordinator.heard.values()):
            return False
        if self.ending is None or self.ending.done():
            return False
        return not self.absences.is_replaced or self._has_saved()

    def _check_ranges(self, now: float) -> None:
        """Raise CheckpointError when nobody is left who has a range of the parameters."""
        assert self.coordinator is not None
        if not self.coordinator.workers:
            return
        for number, chain in enumerate(self.coordinator.chains):
            if chain.is_lost(now):
                raise _lost_range(number, self.job.replicas, chain.has_ended, self.silence_s)

    def _look_for_silent(self, now: float) -> None:
        """Ask silent processes for their status, and give up those that do not answer for long.

        Servers are asked always, workers where `_may_give_up_workers` holds.

        Raises:
            PeerLostError: nobody can take its place.
        """
        silent: dict[Any, tuple[str, float]] = {}
        for peer in list(self.connections):
            if is_watcher(peer) or (isinstance(peer, tuple) and not self._may_give_up_workers()):
                continue
            silent_s = now - self.last_heard_s.setdefault(peer, now)
            is_new = peer not in self.last_asked_s  # its answer has the number of its process
            if is_new or (silent_s > ASK_S and now - self.last_asked_s[peer] > ASK_S):
                self.last_asked_s[peer] = now
                # They answer from their event loops, which a stopped process does not run.
                self.send([(peer, 0, setup.AskStatus())])
            name = f"worker {peer[0]}" if isinstance(peer, tuple) else f"the server at {self.addresses.get(peer)}"
            silent[peer] = name, silent_s
        has_begun = self.coordinator is not None
        for event in self.absences.look_at_others(silent, self._pids(), has_begun):
            rank = None
            if "node" in event:
                rank = self.reports.get(event["node"], {}).get("rank")
            self.tell({**event, "rank": rank} if isinstance(rank, int) else event)

    def _may_give_up_workers(self) -> bool:
        """Return True if silent workers may be given up here. Under sync `_look_for_missing` does, after the start."""
        return self.coordinator is None or (self.absences.is_replaced and not self.coordinator.settings.needs_all)

    def _pids(self) -> dict[Any, int]:
        """Return the process ids of those who are connected, as far as they are known."""
        pids: dict[Any, int] = {}
        for peer, connection in self.connections.items():
            reported = self.reports.get(peer, {}).get("pid")
            # Over TLS only the process itself can say its id; on a unix socket the kernel says it.
            pid = reported if isinstance(reported, int) else connection.process
            if pid is not None:
                pids[peer] = pid
        return pids

    def _look_for_missing(self, now: float) -> None:
        """Under sync: tell who is waited for, and end a wait that has no end.

        Raises:
            PeerLostError: rounds need somebody who does not come.
        """
        assert self.coordinator is not None
        coordinator = self.coordinator
        missing: dict[Worker, tuple[float, int, bool]] = {}
        if coordinator.settings.needs_all and not coordinator.is_finished:
            step = self._step_that_waits(coordinator)
            for worker, silent_s in coordinator.missing(now).items():
                is_connected = worker not in coordinator.gone
                missing[worker] = (silent_s, step, is_connected)
        tell_s = coordinator.settings.worker_deadline_s
        for event in self.absences.look(missing, self._pids(), tell_s, now):
            self.tell(event)
        departed: dict[Worker, int] = {}
        for worker in coordinator.left_early():
            _, heartbeat = coordinator.heard[worker]
            departed[worker] = heartbeat.clock
        active = [worker for worker in coordinator.workers if worker not in departed]
        self.absences.check_left(departed, active, tell_s, now)

    def _step_that_waits(self, coordinator: Coordinator) -> int:
        """Return the step, from 1, for which rounds wait under sync."""
        # The furthest: a lost worker's last heartbeat, or a new worker's first, may give the number of an earlier step.
        clocks: list[int] = []
        for worker, (_, heartbeat) in coordinator.heard.items():
            if worker in coordinator.workers:
                clocks.append(heartbeat.clock)
        return max(clocks, default=0) + 1

    def _counted(self) -> dict[str, Any]:
        """Return, for the event at the end, the gradients that counted and all that workers should have pushed."""
        assert self.coordinator is not None
        counts = [report.get("counted") for report in self.reports.values()]
        counted = max((count for count in counts if isinstance(count, int)), default=None)
        # Sorted: of several incarnations of a worker the last one counts.
        latest = {worker[0]: heartbeat for worker, (_, heartbeat) in sorted(self.coordinator.heard.items())}
        furthest = max((heartbeat.clock for heartbeat in latest.values()), default=0)
        gradients = 0
        if self.job.admission().is_by_rounds:
            gradients = furthest * self.job.workers
        else:
            for heartbeat in latest.values():  # each that has left by itself took as many steps as it says
                gradients += heartbeat.clock if heartbeat.is_done else furthest
        return {"mode": self.job.mode, "counted": counted, "gradients": gradients}

    def _is_joining(self, now_s: float) -> bool:
        """Return True if a connected worker that is not done is not in yet: it must at least read the parameters."""
        assert self.coordinator is not None
        for worker in self._connected_workers():
            if worker not in self.coordinator.heard:
                # It has just come, unless it was in and was taken for dead.
                is_coming = worker not in self.coordinator.ever_active
            else:
                heard_s, heartbeat = self.coordinator.heard[worker]
                is_silent = now_s - heard_s > self.coordinator.settings.worker_deadline_s
                is_coming = not heartbeat.is_done and not is_silent
            if is_coming:
                return True
        return False

    def _has_saved(self) -> bool:
        """Return True if worker 0, which saves at the end, has done so.

        Another that takes its place reads the end first: until then the servers are needed.
        """
        assert self.coordinator is not None
        incarnations = [worker for worker in self.coordinator.heard if worker[0] == 0]
        if not incarnations:
            return True
        _, heartbeat = self.coordinator.heard[max(incarnations)]
        return heartbeat.is_done

    def _settings(self) -> Settings:
        """Return the deadlines, as multiples of the longest recent pause: a machine under load is not dead."""
        now = time.monotonic()
        recent_pauses = [longest for since_s, longest in self.pauses.values() if now - since_s < RECENT_S]
        # The longest pause of anybody: load on a host delays all of its processes.
        deadline_s = max(LEAST_DEADLINE_S, PAUSES * max(recent_pauses, default=0.0))
        return Settings(
            self.job.replicas,
            node_deadline_s=deadline_s,
            node_return_s=0.2 if self.listen_at.is_unix else 1.0,  # on one host a broken connection is a death
            worker_deadline_s=deadline_s,
            worker_return_s=max(self.returns_s, 0.5),
            waits_for_replacement=self.job.admission().is_by_rounds,
            needs_all=self.job.mode == "sync",
            steps=self.job.steps,
            lost_s=max(self.silence_s, deadline_s),
        )

    def _note_pause(self, peer: object) -> None:
        now = time.monotonic()
        since_s, longest_s = self.pauses.get(peer, (now, 0.0))
        pause_s = now - since_s
        if pause_s > 0.01:  # one heartbeat is several messages, one of each range
            longest_s = max(pause_s, 0.9 * longest_s)  # an older pause counts less and less
            # Capped, as a process may have been stopped for minutes: deadlines are at most 5 s * PAUSES, 40 s.
            self.pauses[peer] = (now, min(longest_s, 5.0))

    def _decided(self, configurations: Any) -> None:
        """Write a decision of the state machine to the log, and tell of it."""
        # Before anything is told: an event of a decision that a crash took back would be wrong.
        self.log.decide(configurations)
        self._tell_left_out(configurations[0].workers)
        versions = [configuration.config_version for configuration in configurations]
        if versions == self.told_versions:  # only a confirmation
            return
        self.told_versions = versions
        chains = [list(configuration.chain) for configuration in configurations]
        workers = sorted([*worker] for worker in configurations[0].workers)
        self.tell({"event": "epoch", "epochs": versions, "chains": chains, "workers": workers})

    def _tell_left_out(self, workers: Mapping[Worker, int]) -> None:
        """Report workers that rounds go on without (never under sync), and those that take part again."""
        names = {worker[0] for worker in workers}
        for worker in self.active - workers.keys():
            has_left = False
            if self.coordinator is not None and worker in self.coordinator.heard:
                _, heartbeat = self.coordinator.heard[worker]
                has_left = heartbeat.is_done
            if worker[0] not in names and not has_left and self.job.mode != "sync":
                self.left_out.add(worker[0])
                self.tell({"event": "left_out", "worker": worker[0]})
        for name in self.left_out & names:
            self.left_out.discard(name)
            self.tell({"event": "joined_again", "worker": name})
        self.active = set(workers)

    def _refuse_all(self, error: PacelineError) -> None:
        refusal = setup.Refused(type(error).__name__, error.asked, error.found, error.fix)
        self.send([(peer, 0, refusal) for peer in list(self.connections)])

    # --- what people see

    def status(self) -> dict[str, Any]:
        """Return the status that `paceline server top` and `why-waiting` show of the job."""
        status: dict[str, Any] = {
            "job": json.loads(self.job.to_json()),
            "pid": os.getpid(),
            "refused": list(self.refused),
            "servers": {node: str(address) for node, address in self.addresses.items() if node != COORDINATOR},
        }
        if self.coordinator is None:
            status["state"] = "gathering"
            status["here"] = [str(peer) for peer in self.connections]
            return status
        status["workers"] = self._status_of_workers(self.coordinator)
        status["state"] = "training"
        status["chains"] = self._status_of_chains(self.coordinator)
        return status

    def _status_of_workers(self, coordinator: Coordinator) -> list[dict[str, Any]]:
        now = time.monotonic()
        rows: list[dict[str, Any]] = []
        for worker, (heard_s, heartbeat) in sorted(coordinator.heard.items()):
            row = {
                "worker": worker[0],
                "incarnation": worker[1],
                "clock": heartbeat.clock,
                "is_in": worker in coordinator.workers,
                "is_done": heartbeat.is_done,
                "silent_s": round(max(0.0, now - heard_s), 2),
            }
            rows.append({**row, **self.reports.get(worker, {})})
        return rows

    def _status_of_chains(self, coordinator: Coordinator) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, chain in enumerate(coordinator.chains):
            nodes = chain.configuration.chain
            are_all_here = all(node in self.connections for node in nodes)
            rows.append(
                {
                    "range": number,
                    "epoch": chain.configuration.config_version,
                    "chain": list(nodes),
                    "is_whole": chain.is_whole and are_all_here,
                }
            )
        return rows


def hosts_in_turn(nodes: Sequence[Node], addresses: Mapping[object, Address]) -> list[Node]:
    """Order servers so that neighbours, which keep the same range, are on different hosts where possible.

    Args:
        nodes: the servers' names, which they got in the order in which they came.
        addresses: where each listens.
    """
    by_host: dict[str, list[Node]] = {}
    for node in nodes:
        by_host.setdefault(_host(addresses[node]), []).append(node)
    # The first server of each host, then the second of each: neighbours differ while several hosts are left.
    turns = itertools.zip_longest(*(by_host[host] for host in sorted(by_host)))
    ordered: list[Node] = []
    for turn in turns:
        ordered += [node for node in turn if node is not None]
    return ordered


def _first_chains(nodes: Sequence[Node], ranges: int, replicas: int) -> list[list[Node]]:
    """Return the chain of every range: of range i the servers i, i + 1, ..., modulo their number."""
    chains: list[list[Node]] = []
    for first in range(ranges):
        chains.append([nodes[(first + offset) % len(nodes)] for offset in range(replicas)])
    return chains


def _host(address: Address) -> str:
    """Return a server's host; "" where all are on this one."""
    return "" if address.is_unix else address.host


def _few_ranges(ranges: int, servers: int, replicas: int) -> str:
    """Return the notice for a model with fewer ranges than servers: what each server is used for."""
    idle = servers - min(servers, ranges + replicas - 1)
    copies = servers - ranges - idle
    roles = [f"{ranges} take{'s' * (ranges == 1)} gradients"]
    if copies:
        roles.append(f"{copies} keep{'s' * (copies == 1)} a copy")
    if idle and replicas == 1:
        no_use = "has no use" if idle == 1 else "have no use"
        roles.append(f"{idle} {no_use}, as replicas=1 keeps no copy to take over: write server={ranges}, or replicas=2")
    elif idle:
        roles.append(f"{idle} {'is spare and takes' if idle == 1 else 'are spare and take'} the place of a lost one")
    segments = f"{ranges} segment{'s' * (ranges > 1)} of {SEGMENT_BYTES >> 20} MiB"
    return f"the model fills {segments}: of {servers} servers {', '.join(roles)}"


def _lost_range(number: int, replicas: int, has_ended: bool, silence_s: float) -> CheckpointError:
    """Return the error that ends a job when nobody is left who has a range of the parameters."""
    fix = "go on from the last checkpoint: paceline run --resume"
    if replicas == 1:
        found = "the server that had it has ended" if has_ended else f"it has not answered for {silence_s:g} s"
        fix = f"{fix}; two servers with replicas=2 survive the loss of one"
        return CheckpointError(f"range {number} of the parameters should be on 1 server", found, fix)
    found = f"no server that has it has answered for {silence_s:g} s"
    if has_ended:
        found = "all servers that had it have ended"
    return CheckpointError(f"range {number} of the parameters should be on {replicas} servers", found, fix)


def _layout_of(hello: setup.Hello) -> tuple[ServerLayout, dict[str, Any]]:
    """Return the layout that a worker brings, and its part of the settings.

    Raises:
        PlanError: they are none.
    """
    try:
        value = parse_json(hello.layout or b"", "a worker's layout", {"layout": dict, "settings": OF_WORKERS})
        layout = ServerLayout.of_json(json.dumps(value["layout"]))
        return layout, {name: value["settings"][name] for name in OF_WORKERS}
    except ReadError as error:
        raise PlanError("can't read a worker's layout", error.found, "use one version everywhere") from None
