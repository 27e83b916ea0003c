"""The coordinator's process: gathers a job's servers and workers, starts it, and says who is in.

It is never on the way of gradients and parameters. When it dies, workers and servers go on as they are; started again
on the same log it takes up where it was.
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
from paceline.server.coordinator.log import Log
from paceline.server.layout import SEGMENT_BYTES, ServerLayout
from paceline.server.protocol.coordinator import Coordinator, Settings
from paceline.server.protocol.messages import COORDINATOR, Heartbeat, Node, Worker, WorkerHeartbeat
from paceline.server.settings import OF_WORKERS, JobSettings
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.connection import Connection
from paceline.server.transport.peers import HEARTBEAT_S, Peers, every, facts_of

LEAST_DEADLINE_S = 5.0  # silence that may be a machine under load
ASK_S = 2.0  # of silence before somebody is asked for a sign of life
STOOD_STILL_S = 2.0  # between two ticks of HEARTBEAT_S / 2: this process was stopped, or its host slept
GAPS = 8  # silence is death after so many times the longest pause between signs of life


class Coordination(Peers):
    """The process.

    Args:
        listen_at: where servers and workers come.
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
        self.listen_at, self.job, self.tell, self.returns_s = listen_at, job, tell, returns_s
        self.log = Log.open(log)
        self.where = ""
        self.layouts: dict[int, ServerLayout] = {}  # by worker, until the job starts
        self.workers: dict[int, tuple[int, int]] = {}
        self.coordinator: Coordinator | None = None
        self.installed: set[tuple[int, Node]] = set()
        self.chains: list[list[Node]] = []
        self.gaps: dict[Any, tuple[float, float]] = {}  # who was last heard when, and the longest pause of late
        self.told: list[int] = []
        self.active: set[Worker] = set()
        self.left_out: set[int] = set()  # workers without whom the others go on
        self.heard_s: dict[Any, float] = {}  # when servers and workers that are connected said anything
        self.asked_s: dict[Any, float] = {}
        self.ticked_s = 0.0
        self.facts: dict[Any, dict[str, Any]] = {}  # by worker, what it says of itself
        self.silence_s = silence_s(os.environ)
        patience_s = self.silence_s if returns_s else max(self.silence_s, BY_HAND_S)
        self.absences = Absences(patience_s, is_replaced=bool(returns_s))
        self.ending: asyncio.Future[None] | None = None

    async def run(self, ready: Callable[[str], None] = lambda where: None) -> None:
        """Serve until the job is over.

        Args:
            ready: told where it listens.

        Raises:
            PacelineError: the address can't be had; the plan does not fit the model; a part of the parameters is lost.
        """
        self.ending = asyncio.get_running_loop().create_future()
        self.where = await self.listen(self.listen_at)
        ready(self.where)
        if self.log.job is not None:
            self.job = JobSettings.of_json(self.log.job[0])
        if self.log.configurations:
            self.coordinator = Coordinator.again(self.log.configurations, self._decided, self._settings())
            self.told = self._config_versions()
            self.tell({"event": "coordinator_back", "epochs": self.told, "mode": self.job.mode})
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
            asyncio.get_running_loop().call_later(0.2, self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if self.ending is not None and not self.ending.done():
            self.ending.set_exception(error or RuntimeError("failed"))

    # --- who comes

    def greet(self, connection: Connection, hello: setup.Hello) -> Any:
        """Name servers and workers that have no name yet.

        Raises:
            PacelineError: the worker's model is another than the others'.
        """
        if hello.role == "server":
            node = hello.name if 0 <= hello.name < self.log.nodes else self.log.name_node()
            self.addresses[node] = Address.parse(hello.address)
            connection.send(0, setup.Welcome(node, 0))
            asyncio.get_running_loop().call_soon(self.call, self._server_is_here, node)
            return node
        worker = self._greet_worker(hello)
        connection.send(0, setup.Welcome(*worker))
        asyncio.get_running_loop().call_soon(self.call, self._worker_is_here, worker)
        return worker

    def _greet_worker(self, hello: setup.Hello) -> tuple[int, int]:
        layout, settings = _layout_of(hello)
        if self.log.job is not None:
            layout.check_same(ServerLayout.of_json(self.log.job[1]), f"worker {hello.name}", "the job")
        elif self.layouts:
            name, other = next(iter(self.layouts.items()))
            layout.check_same(other, f"worker {hello.name}", f"worker {name}")
        layout.ranges(self.job.servers)
        self.layouts[hello.name] = layout
        if self.log.job is None:
            self.job = dataclasses.replace(self.job, **settings)
        if 0 <= hello.incarnation < self.log.incarnations.get(hello.name, 0):
            return hello.name, hello.incarnation
        return self.log.name_worker(hello.name)

    def _server_is_here(self, node: Node) -> None:
        self._tell_addresses()
        if self.coordinator is not None:
            self._send_start(node)
            self.send(self.coordinator.everybody())
        else:
            self._start_if_all_are_here()

    def _worker_is_here(self, worker: tuple[int, int]) -> None:
        self.workers[worker[0]] = worker
        self._tell_addresses()
        if self.coordinator is not None:
            for other in self.coordinator.workers:
                if other[0] == worker[0] and other != worker:  # whose place it takes
                    self.coordinator.forget(other, time.monotonic())
            self._send_start(worker)
            self.send([one for one in self.coordinator.everybody() if one[0] == worker])
        else:
            self._start_if_all_are_here()

    def _start_if_all_are_here(self) -> None:
        servers = sorted(peer for peer in self.connections if isinstance(peer, int))
        here = [worker for worker in self.workers.values() if worker in self.connections]
        if len(servers) < self.job.servers or len(here) < self.job.workers:
            return
        nodes = hosts_in_turn(servers[: self.job.servers], self.addresses)
        layout = self.layouts[min(self.layouts)]
        if self.log.job is None:
            self.log.begin(self.job.to_json(), layout.to_json())
        ranges = len(layout.ranges(self.job.servers))
        self.chains = [[nodes[(at + r) % len(nodes)] for r in range(self.job.replicas)] for at in range(ranges)]
        if ranges < len(nodes) and not self.installed:
            self.tell({"event": "notice", "text": _few_ranges(ranges, len(nodes), self.job.replicas)})
        self.installed = set()
        for peer in [*servers, *here]:
            self._send_start(peer)
        first = self.workers[min(self.workers)]
        self.send([(first, number, setup.Install(tuple(chain))) for number, chain in enumerate(self.chains)])

    def _send_start(self, peer: Any) -> None:
        assert self.log.job is not None
        settings, layout = self.log.job
        self.send([(peer, 0, setup.StartServers(settings, layout.encode()))])

    def _tell_addresses(self) -> None:
        known = {node: str(at) for node, at in self.addresses.items() if node in self.connections}
        for peer in self.connections:
            if not (isinstance(peer, tuple) and peer[0] == "watcher"):
                self.send([(peer, 0, setup.Addresses(json.dumps(known)))])

    # --- what comes

    def take(self, peer: Any, number: int, message: Any) -> None:
        """A message about range `number`."""
        self.heard_s[peer] = time.monotonic()
        if isinstance(message, setup.Status):
            self.facts[peer] = facts_of(message.facts)
            self._note_waiting(peer)
        elif isinstance(message, setup.Installed):
            self._is_installed(number, message.node)
        elif isinstance(message, Heartbeat | WorkerHeartbeat):
            self._note_gap(peer)
            if self.coordinator is not None and number < len(self.coordinator.chains):
                self.send(self.coordinator.on(number, message, time.monotonic()))
                if isinstance(message, WorkerHeartbeat) and message.is_done:
                    self._tick()  # it waits to hear that it is out

    def _is_installed(self, number: int, node: Node) -> None:
        if self.coordinator is not None:
            return
        self.installed.add((number, node))
        workers = [worker for worker in self.workers.values() if worker in self.connections]
        if len(workers) < self.job.workers:
            return  # one has died meanwhile; when another is there, all begins again
        if all((at, one) in self.installed for at, chain in enumerate(self.chains) for one in chain):
            self.coordinator = Coordinator.first(self.chains, workers, self._decided, self._settings())
            started = {"servers": self.job.servers, "workers": len(workers), "mode": self.job.mode}
            self.tell({"event": "servers_started", **started})
            self.send(self.coordinator.everybody())

    def _note_waiting(self, peer: Any) -> None:
        heard = self.coordinator.heard.get(peer) if self.coordinator is not None else None
        if heard is not None:
            is_waiting = self.facts[peer].get("is_waiting") is True
            self.absences.note_waiting(peer, heard[1].clock, is_waiting, time.monotonic())

    def lost(self, peer: Any) -> None:
        """A connection has ended."""
        now = time.monotonic()
        self.heard_s.pop(peer, None)
        self.asked_s.pop(peer, None)
        if self.coordinator is not None and not (isinstance(peer, tuple) and peer[0] == "watcher"):
            self.coordinator.forget(peer, now)
        if self.coordinator is None and isinstance(peer, tuple):
            self.workers.pop(peer[0], None)

    def _tick(self) -> None:
        now = time.monotonic()
        stood_still_s = now - self.ticked_s if self.ticked_s else 0.0
        self.ticked_s = now  # also before the job's start: it may be stopped right after it
        if stood_still_s > STOOD_STILL_S:
            self.heard_s = {peer: since + stood_still_s for peer, since in self.heard_s.items()}
            self.absences.waits.clear()
        self._look_for_silent(now)
        if self.coordinator is None:
            return
        if stood_still_s > STOOD_STILL_S:
            self.coordinator.slept(stood_still_s)
        self.coordinator.settings = settings = self._settings()
        for chain in self.coordinator.chains:
            chain.settings = settings
        self.coordinator.hosts = {node: _host(at) for node, at in self.addresses.items()}
        sent = self.coordinator.tick(now)
        is_over = not self.coordinator.workers and any(
            heartbeat.is_done for _, heartbeat in self.coordinator.heard.values()
        )
        is_over = is_over and not self._is_joining(now) and self.ending is not None and not self.ending.done()
        is_over = is_over and (not self.absences.is_replaced or self._has_saved())
        if is_over:  # before the last worker hears that it may go: then this process may be ended
            self.tell({"event": "servers_ended", **self._counted()})
        self.send(sent)
        self._check_ranges(now)
        self._look_for_missing(now)
        if is_over and self.ending is not None:
            self.ending.set_result(None)

    def _check_ranges(self, now: float) -> None:
        """Raise CheckpointError when nobody is left who has a range of the parameters."""
        assert self.coordinator is not None
        lost = [number for number, chain in enumerate(self.coordinator.chains) if chain.is_lost(now)]
        if lost and self.coordinator.workers:
            raise _lost_range(lost[0], self.job.replicas, self.coordinator.chains[lost[0]].has_ended, self.silence_s)

    def _look_for_silent(self, now: float) -> None:
        """Ask who has said nothing for a while, and give up who does not answer: a server, or before the start anybody.

        Raises:
            PeerLostError: nobody can take its place.
        """
        silent: dict[Any, tuple[str, float]] = {}
        for peer in list(self.connections):
            if isinstance(peer, tuple) and (peer[0] == "watcher" or not self._may_give_up_workers()):
                continue
            quiet_s = now - self.heard_s.setdefault(peer, now)
            is_new = peer not in self.asked_s  # its answer has the number of its process
            if is_new or (quiet_s > ASK_S and now - self.asked_s[peer] > ASK_S):
                self.asked_s[peer] = now
                self.send([(peer, 0, setup.AskStatus())])
            name = f"worker {peer[0]}" if isinstance(peer, tuple) else f"the server at {self.addresses.get(peer)}"
            silent[peer] = name, quiet_s
        for event in self.absences.look_at_others(silent, self._pids(), self.coordinator is not None):
            rank = self.facts.get(event["node"], {}).get("rank") if "node" in event else None
            self.tell({**event, "rank": rank} if isinstance(rank, int) else event)

    def _may_give_up_workers(self) -> bool:
        """Under sync `_look_for_missing` does, once the job runs; in the other modes rounds can do without one."""
        return self.coordinator is None or (self.absences.is_replaced and not self.coordinator.settings.needs_all)

    def _pids(self) -> dict[Any, int]:
        """The processes of those who are connected, as far as they are known."""
        pids: dict[Any, int] = {}
        for peer, connection in self.connections.items():
            said = self.facts.get(peer, {}).get("pid")
            pid = said if isinstance(said, int) else connection.process
            if pid is not None:
                pids[peer] = pid
        return pids

    def _look_for_missing(self, now: float) -> None:
        """Under sync: tell who is waited for, and end a wait that has no end.

        Raises:
            PeerLostError: rounds need somebody who does not come.
        """
        assert self.coordinator is not None
        one, missing = self.coordinator, {}
        if one.settings.needs_all and not one.is_finished:
            # The furthest: a lost worker's last beat, or a new worker's first, may give the number of an earlier step.
            clocks = [heartbeat.clock for worker, (_, heartbeat) in one.heard.items() if worker in one.workers]
            step = max(clocks, default=0) + 1
            silent_s = one.missing(now)
            missing = {worker: (quiet_s, step, worker not in one.gone) for worker, quiet_s in silent_s.items()}
        tell_s = one.settings.worker_deadline_s
        for event in self.absences.look(missing, self._pids(), tell_s, now):
            self.tell(event)
        left = {worker: one.heard[worker][1].clock for worker in one.left_early()}
        self.absences.check_left(left, [worker for worker in one.workers if worker not in left], tell_s, now)

    def _counted(self) -> dict[str, Any]:
        """How many gradients have counted, and of how many: what is missing was left out."""
        assert self.coordinator is not None
        said = [facts.get("counted") for facts in self.facts.values()]
        counted = max((count for count in said if isinstance(count, int)), default=None)
        latest = {worker[0]: heartbeat for worker, (_, heartbeat) in sorted(self.coordinator.heard.items())}
        furthest = max((heartbeat.clock for heartbeat in latest.values()), default=0)
        clocks = [furthest] * self.job.workers
        if not self.job.admission().is_by_rounds:  # each that has left by itself took as many steps as it says
            clocks = [heartbeat.clock if heartbeat.is_done else furthest for heartbeat in latest.values()]
        return {"mode": self.job.mode, "counted": counted, "gradients": sum(clocks)}

    def _is_joining(self, now_s: float) -> bool:
        """Whether a worker that is not done is about to come in, to read at least what the others have made."""
        assert self.coordinator is not None
        for worker in self.workers.values():
            heard = self.coordinator.heard.get(worker)
            if heard is None:  # it has just come, unless it was in and was taken for dead
                is_coming = worker not in self.coordinator.ever_active
            else:
                is_coming = not heard[1].is_done and now_s - heard[0] <= self.coordinator.settings.worker_deadline_s
            if is_coming and worker in self.connections:
                return True
        return False

    def _has_saved(self) -> bool:
        """Whether worker 0, which saves at the end, has done so: another that takes its place reads the end first."""
        assert self.coordinator is not None
        incarnations = [worker for worker in self.coordinator.heard if worker[0] == 0]
        return not incarnations or self.coordinator.heard[max(incarnations)][1].is_done

    def _settings(self) -> Settings:
        """Silence is death after some times the longest pause of late: a machine under load is not dead."""
        now = time.monotonic()
        pauses = [longest for since, longest in self.gaps.values() if now - since < 60]
        deadline_s = max(LEAST_DEADLINE_S, GAPS * max(pauses, default=0.0))
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

    def _note_gap(self, peer: Any) -> None:
        now = time.monotonic()
        since, longest = self.gaps.get(peer, (now, 0.0))
        gap = now - since
        if gap > 0.01:  # one sign of life is several messages
            self.gaps[peer] = (now, min(max(gap, 0.9 * longest), 5.0))

    def _decided(self, configurations: Any) -> None:
        self.log.decide(configurations)
        self._tell_left_out(configurations[0].workers)
        versions = [one.config_version for one in configurations]
        if versions != self.told:
            self.told = versions
            chains = [list(one.chain) for one in configurations]
            workers = sorted([*worker] for worker in configurations[0].workers)
            self.tell({"event": "epoch", "epochs": versions, "chains": chains, "workers": workers})

    def _tell_left_out(self, workers: Mapping[Worker, int]) -> None:
        """Where the mode allows it, the others go on without a worker that is lost."""
        names = {worker[0] for worker in workers}
        for worker in self.active - workers.keys():
            heard = self.coordinator.heard.get(worker) if self.coordinator is not None else None
            has_left = heard is not None and heard[1].is_done
            if worker[0] not in names and not has_left and self.job.mode != "sync":
                self.left_out.add(worker[0])
                self.tell({"event": "left_out", "worker": worker[0]})
        for name in self.left_out & names:
            self.left_out.discard(name)
            self.tell({"event": "joined_again", "worker": name})
        self.active = set(workers)

    def _config_versions(self) -> list[int]:
        return [chain.configuration.config_version for chain in self.coordinator.chains] if self.coordinator else []

    def _refuse_all(self, error: PacelineError) -> None:
        refusal = setup.Refused(type(error).__name__, error.asked, error.found, error.fix)
        self.send([(peer, 0, refusal) for peer in list(self.connections)])

    def status(self) -> dict[str, Any]:
        """What a person may want to know."""
        now = time.monotonic()
        facts: dict[str, Any] = {
            "job": json.loads(self.job.to_json()),
            "pid": os.getpid(),
            "refused": list(self.refused),
        }
        facts["servers"] = {node: str(at) for node, at in self.addresses.items() if node != COORDINATOR}
        if self.coordinator is None:
            return {**facts, "state": "gathering", "here": [str(peer) for peer in self.connections]}
        facts["workers"] = [
            {
                "worker": worker[0],
                "incarnation": worker[1],
                "clock": heartbeat.clock,
                "is_in": worker in self.coordinator.workers,
                "is_done": heartbeat.is_done,
                "silent_s": round(max(0.0, now - since), 2),
                **self.facts.get(worker, {}),
            }
            for worker, (since, heartbeat) in sorted(self.coordinator.heard.items())
        ]
        chains = [
            {
                "range": number,
                "epoch": chain.configuration.config_version,
                "chain": list(chain.configuration.chain),
                "is_whole": chain.is_whole and all(node in self.connections for node in chain.configuration.chain),
            }
            for number, chain in enumerate(self.coordinator.chains)
        ]
        return {**facts, "state": "training", "chains": chains}


def hosts_in_turn(nodes: Sequence[Node], addresses: Mapping[Any, Address]) -> list[Node]:
    """Servers in such an order that neighbours, which have a range together, are on different hosts where that can be.

    Args:
        nodes: the servers' names, which they got in the order in which they came.
        addresses: where each listens.
    """
    by_host: dict[str, list[Node]] = {}
    for node in nodes:
        by_host.setdefault(_host(addresses[node]), []).append(node)
    turns = itertools.zip_longest(*(by_host[host] for host in sorted(by_host)))
    return [node for turn in turns for node in turn if node is not None]


def _host(at: Address) -> str:
    """Of a server: "", where all are on this one."""
    return "" if at.is_unix else at.host


def _few_ranges(ranges: int, servers: int, replicas: int) -> str:
    """What the servers of a small model do."""
    idle = servers - min(servers, ranges + replicas - 1)
    shown = f"the model fills {ranges} segment{'s' * (ranges > 1)} of {SEGMENT_BYTES >> 20} MiB: of {servers} servers"
    copies = servers - ranges - idle
    parts = [f"{ranges} take{'s' * (ranges == 1)} gradients"]
    if copies:
        parts.append(f"{copies} keep{'s' * (copies == 1)} a copy")
    if idle and replicas == 1:
        no_use = "has no use" if idle == 1 else "have no use"
        parts.append(f"{idle} {no_use}, as replicas=1 keeps no copy to take over: write server={ranges}, or replicas=2")
    elif idle:
        parts.append(f"{idle} {'is spare and takes' if idle == 1 else 'are spare and take'} the place of a lost one")
    return f"{shown} {', '.join(parts)}"


def _lost_range(number: int, replicas: int, has_ended: bool, silence_s: float) -> CheckpointError:
    """What ends a job when nobody is left who has a range of the parameters."""
    if replicas == 1:
        found = "the server that had it has ended" if has_ended else f"it has not answered for {silence_s:g} s"
        fix = (
            "go on from the last checkpoint: paceline run --resume; two servers with replicas=2 survive the loss of one"
        )
        return CheckpointError(f"range {number} of the parameters on 1 server", found, fix)
    found = (
        "all servers that had it have ended" if has_ended else f"no server that has it has answered for {silence_s:g} s"
    )
    fix = "go on from the last checkpoint: paceline run --resume"
    return CheckpointError(f"range {number} of the parameters on {replicas} servers", found, fix)


def _layout_of(hello: setup.Hello) -> tuple[ServerLayout, dict[str, Any]]:
    """The layout that a worker brings, and its part of the settings.

    Raises:
        PlanError: they are none.
    """
    try:
        value = parse_json(hello.layout or b"", "a worker's layout", {"layout": dict, "settings": OF_WORKERS})
        layout = ServerLayout.of_json(json.dumps(value["layout"]))
        return layout, {name: value["settings"][name] for name in OF_WORKERS}
    except ReadError as error:
        raise PlanError("a worker's layout", error.found, "use one version everywhere") from None
