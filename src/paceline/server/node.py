"""A server's process: keeps ranges of the parameters, takes gradients in, gives parameters out."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from paceline.nouns.errors import CheckpointError, PacelineError
from paceline.nouns.reading import parse_whole
from paceline.server import setup
from paceline.server.layout import BYTES, Segment, ServerLayout, most_state_bytes
from paceline.server.protocol import messages
from paceline.server.protocol.client import with_range
from paceline.server.protocol.member import Member
from paceline.server.protocol.messages import COORDINATOR
from paceline.server.protocol.replica import Replica
from paceline.server.settings import JobSettings
from paceline.server.tensors import Segments, bytes_of, views_of
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import FrameError
from paceline.server.transport.peers import HEARTBEAT_S, Peers, addresses_of, every

REPEAT_S = (0.5, 60.0)  # what has no answer is said again after so long; each time later, up to
EARLY = 1000  # messages before the job's start that are kept; what is forgotten is said again
EXPIRE_S = 0.05  # how exact a deadline is
_DTYPES = {name: getattr(torch, name) for name in BYTES}


class Server(Peers):
    """One server.

    Args:
        listen_at: where workers and other servers come.
        coordinator: where it is.
        credentials: for whatever leaves the host.
    """

    def __init__(self, listen_at: Address, coordinator: Address, credentials: Credentials | None = None) -> None:
        super().__init__(credentials)
        self.listen_at, self.where = listen_at, ""
        self.addresses[COORDINATOR] = coordinator
        self.node = -1
        self.member: Member | None = None
        self.ranges: list[list[Segment]] = []
        self.waiting: deque[tuple[Any, int, Any]] = deque(maxlen=EARLY)  # what came before the job's start
        self.counts: Counter[str] = Counter()
        self.sent_heartbeats: dict[int, messages.Out] = {}  # by range, what it last said because of a message
        self.progress_s = self.repeated_s = 0.0
        self.repeat_after_s = REPEAT_S[0]
        self.ending: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Serve until this task is cancelled. A coordinator that is gone is tried again and again.

        Raises:
            PacelineError: the address can't be had, or the coordinator refuses this server.
            Exception: an error of this process's own.
        """
        self.ending = asyncio.get_running_loop().create_future()
        self.where = await self.listen(self.listen_at)
        self.open(COORDINATOR)
        self.spawn(every(HEARTBEAT_S, self._tick))
        self.spawn(every(EXPIRE_S, self._expire))
        try:
            await self.ending
        finally:
            self.close()

    def hello(self, to: Any) -> setup.Hello:
        """Who this is."""
        return setup.Hello("server", self.node, 0, self.where, "")

    def failed(self, error: BaseException | None) -> None:
        """End with the error."""
        if self.ending is not None and not self.ending.done():
            self.ending.set_exception(error or RuntimeError("failed"))

    def connected(self, peer: Any) -> None:
        """Say again what another server may have missed."""
        if isinstance(peer, int) and self.member is not None:
            self.send(self.member.repeat())

    def lost(self, peer: Any) -> None:
        """The coordinator comes back, or it does not."""
        if peer == COORDINATOR:
            self.open(COORDINATOR)

    def take(self, peer: Any, number: int, message: Any) -> None:
        """A message about range `number`."""
        self.counts[type(message).__name__] += 1
        if isinstance(message, setup.Welcome):
            self.node = message.name
        elif isinstance(message, setup.StartServers):
            self._start(message)
        elif isinstance(message, setup.Addresses):
            known = addresses_of(message.servers).items()
            higher = {node: address for node, address in known if node > self.node}  # the lower one connects
            self.addresses = {COORDINATOR: self.addresses[COORDINATOR], **higher}
            self._open_all()
        elif isinstance(message, setup.Refused):
            self.failed(PacelineError(message.asked, message.found, message.fix))
        elif self.member is None:
            self.waiting.append((peer, number, message))
        else:
            try:
                self._take_started(peer, number, message)
            except CheckpointError as error:
                raise FrameError(f"{error.asked}, but {error.found}") from None

    def _take_started(self, peer: Any, number: int, message: Any) -> None:
        assert self.member is not None
        if number >= len(self.member.replicas):
            raise FrameError(f"range {number} of {len(self.member.replicas)}")
        replica = self.member.replicas[number]
        if isinstance(message, setup.Install):
            if not replica.is_synced:
                replica.store.restore(message.content)
            self.send([(COORDINATOR, number, setup.Installed(self.node))])
        elif isinstance(message, setup.ReadState):
            if replica.is_synced and replica.is_tail:
                self.send([(peer, number, setup.StateRead(message.request, replica.store.content()))])
        else:
            before, done = replica.update_count, replica.committed
            self.send(self.member.on(number, message))
            self.counts["updates"] += replica.update_count - before
            if isinstance(message, messages.Configuration | messages.State):
                self._send_heartbeat_if_new(number, replica.heartbeat())
            if replica.update_count + replica.committed > before + done:
                self.progress_s, self.repeat_after_s = time.monotonic(), REPEAT_S[0]

    def _send_heartbeat_if_new(self, number: int, heartbeat: messages.Out) -> None:
        """Others wait to hear that it is in. Once: the coordinator answers each beat with the configuration."""
        if self.sent_heartbeats.get(number) != heartbeat:
            self.sent_heartbeats[number] = heartbeat
            self.send(with_range(number, heartbeat))

    def _start(self, message: setup.StartServers) -> None:
        if self.member is not None:
            return  # the coordinator began again
        settings = JobSettings.of_json(message.settings)
        layout = ServerLayout.of_json(bytes(message.layout).decode())
        self.ranges = layout.ranges(settings.servers)
        stores = [
            Segments(layout, own, settings.implementation, settings.clip_norm, settings.workers, settings.admission())
            for own in self.ranges
        ]
        gates = settings.gates(len(self.ranges))
        self.member = Member(
            self.node,
            [
                Replica(self.node, len(own), settings.admission(), store, number, gates)
                for number, (own, store) in enumerate(zip(self.ranges, stores, strict=True))
            ],
        )
        for peer, number, early in self.waiting:
            if number < len(self.ranges):
                self._take_started(peer, number, early)
        self.waiting.clear()

    def destination(self, connection: Connection, number: int, message: Any, nbytes: int) -> tuple[Any, memoryview]:
        """Where a payload goes; a gradient is exactly as long as its segment."""
        if isinstance(message, messages.Push | messages.Forward | messages.State | setup.Install):
            if connection.peer is None or number >= len(self.ranges):
                raise FrameError(f"a {type(message).__name__} of range {number} of {len(self.ranges)}")
            if isinstance(message, messages.State | setup.Install):
                return self._room_for_state(number, nbytes)
            at = message.segment if isinstance(message, messages.Push) else message.update.segment
            return self._room_for_gradient(number, at, nbytes)
        return super().destination(connection, number, message, nbytes)

    def _room_for_state(self, number: int, nbytes: int) -> tuple[Any, memoryview]:
        if nbytes > most_state_bytes(self.ranges[number]):
            raise FrameError(f"a state of {nbytes} bytes")
        content = bytearray(nbytes)
        return content, memoryview(content)

    def _room_for_gradient(self, number: int, at: int, nbytes: int) -> tuple[Any, memoryview]:
        if not 0 <= at < len(self.ranges[number]) or nbytes != self.ranges[number][at].nbytes:
            raise FrameError(f"a gradient of segment {at} with {nbytes} bytes")
        place = torch.empty(nbytes, dtype=torch.uint8)
        return place.view(_DTYPES[self.ranges[number][at].dtype]), bytes_of(place)

    def views(self, payload: Any) -> Sequence[memoryview]:
        """The bytes of a payload."""
        return views_of(payload)

    def status(self) -> dict[str, Any]:
        """What a person may want to know."""
        replicas = self.member.replicas if self.member is not None else []
        own = [(n, replica) for n, replica in enumerate(replicas) if self.node in replica.configuration.chain]
        rows = [_status_of(number, replica) for number, replica in own]
        sent = sum(connection.bytes_sent for connection in self.connections.values())
        received = sum(connection.bytes_received for connection in self.connections.values())
        facts = {"node": self.node, "ranges": rows, "bytes_sent": sent, "bytes_received": received}
        process = {"pid": os.getpid(), "rank": parse_whole(os.environ.get("PACELINE_RANK", ""))}  # the supervisor's
        return {**facts, "messages": dict(self.counts), "refused": list(self.refused), **process}

    def _open_all(self) -> None:
        for peer in self.addresses:
            self.open(peer)

    def _expire(self) -> None:
        if self.member is not None:
            self.send(self.member.expire(time.monotonic()))

    def _tick(self) -> None:
        self._open_all()
        if self.member is None:
            return
        self.send(self.member.heartbeat())
        now = time.monotonic()
        if now - max(self.progress_s, self.repeated_s) > self.repeat_after_s:
            self.repeated_s = now
            self.repeat_after_s = min(2 * self.repeat_after_s, REPEAT_S[1])
            self.send(self.member.repeat())


def _status_of(number: int, replica: Replica) -> dict[str, Any]:
    return {
        "range": number,
        "role": "head" if replica.is_head else "tail" if replica.is_tail else "",
        "epoch": replica.configuration.config_version,
        "updates": replica.update_count,
        "behind": replica.update_count - replica.committed,
        "readers_waiting": len(replica.waiting_pulls),
        "waits_for": _waits_for(replica),
        "duplicates": replica.duplicates,
        "staleness": replica.staleness,
    }


def _waits_for(replica: Replica) -> list[int]:
    """Workers without whom the oldest open round can't close."""
    if not (replica.is_head and replica.mode.is_by_rounds):
        return []
    oldest = min(replica.rounds.values())
    due = [segment for segment, closed in replica.rounds.items() if closed == oldest]
    if any(segment in replica.staged for segment in due):
        return []
    here = {name for segment in due for name in replica.open_rounds[segment]}
    return [worker for worker, _ in replica.configuration.workers if worker not in here]


async def serve(listen_at: str, coordinator: str, credentials: Credentials | None = None) -> None:
    """Run one server.

    Raises:
        PacelineError: the address can't be had, or the coordinator refuses this server.
    """
    torch.set_num_threads(1)
    await Server(Address.parse(listen_at), Address.parse(coordinator), credentials).run()
