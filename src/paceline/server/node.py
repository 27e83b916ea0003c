"""Run a server: keep ranges of the parameters, apply workers' gradients, and send the parameters back."""

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
from paceline.server.protocol import messages
from paceline.server.protocol.client import with_range
from paceline.server.protocol.member import Member
from paceline.server.protocol.messages import COORDINATOR
from paceline.server.protocol.replica import Replica
from paceline.server.range_tensors import Segments, bytes_of, views_of
from paceline.server.server_layout import BYTES, Segment, ServerLayout, most_state_bytes
from paceline.server.settings import JobSettings
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import FrameError
from paceline.server.transport.peers import HEARTBEAT_S, Peers, addresses_of, every

REPEAT_S = (0.5, 60.0)  # what has no answer is said again after so long; each time later, up to
EARLY = 1000  # messages before the job's start that are kept; those that are dropped are sent again
EXPIRE_S = 0.05  # how exact a deadline is
_DTYPES = {name: getattr(torch, name) for name in BYTES}


class Server(Peers):
    """The process of one server: the state machine `Member` with connections.

    Args:
        listen_at: the address for workers and other servers.
        coordinator: the coordinator's address.
        credentials: the credentials for connections that leave the host.
    """

    def __init__(self, listen_at: Address, coordinator: Address, credentials: Credentials | None = None) -> None:
        super().__init__(credentials)
        self.listen_at = listen_at
        self.address = ""
        self.addresses[COORDINATOR] = coordinator
        self.node = -1
        self.member: Member | None = None
        self.ranges: list[list[Segment]] = []
        self.early: deque[tuple[Any, int, Any]] = deque(maxlen=EARLY)  # messages from before the job's start
        self.counts: Counter[str] = Counter()
        self.sent_heartbeats: dict[int, messages.Out] = {}  # by range, the last one that a message was the reason for
        self.progress_s = 0.0  # when an update was last applied or committed
        self.repeated_s = 0.0
        self.repeat_after_s = REPEAT_S[0]
        self.ending: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Serve until this task is cancelled. A coordinator that is gone is tried again and again.

        Raises:
            PacelineError: the address can't be had, or the coordinator refuses this server.
            Exception: an error of this process's own.
        """
        self.ending = asyncio.get_running_loop().create_future()
        self.address = await self.listen(self.listen_at)
        self.open(COORDINATOR)
        self.spawn(every(HEARTBEAT_S, self._tick))
        self.spawn(every(EXPIRE_S, self._expire))
        try:
            await self.ending
        finally:
            self.close()

    def hello(self, to: object) -> setup.Hello:
        """Return the greeting of this server."""
        return setup.Hello("server", self.node, 0, self.address, "")

    def failed(self, error: BaseException | None) -> None:
        """End with the error."""
        if self.ending is not None and not self.ending.done():
            self.ending.set_exception(error or RuntimeError("failed"))

    def connected(self, peer: object) -> None:
        """Send another server again what it may have missed."""
        if isinstance(peer, int) and self.member is not None:
            self.send(self.member.repeat())

    def lost(self, peer: object) -> None:
        """Connect to the coordinator again: it may come back."""
        if peer == COORDINATOR:
            self.open(COORDINATOR)

    def take(self, peer: object, number: int, message: object) -> None:
        """Handle a message about range `number`."""
        self.counts[type(message).__name__] += 1
        if isinstance(message, setup.Welcome):
            self.node = message.name
        elif isinstance(message, setup.StartServers):
            self._start(message)
        elif isinstance(message, setup.Addresses):
            self._take_addresses(addresses_of(message.servers))
        elif isinstance(message, setup.Refused):
            self.failed(PacelineError(message.asked, message.found, message.fix))
        elif self.member is None:
            # Other processes may have heard of the start first: connections have no order among each other.
            self.early.append((peer, number, message))
        else:
            try:
                self._take_started(peer, number, message)
            except CheckpointError as error:
                # A state that can't be read is its sender's fault: a FrameError closes only that connection.
                raise FrameError(f"{error.asked}: {error.found}") from None

    def _take_addresses(self, servers: dict[messages.Node, Address]) -> None:
        """Connect to the coordinator and to servers with higher numbers, so that two servers have one connection."""
        higher = {node: address for node, address in servers.items() if node > self.node}
        self.addresses = {COORDINATOR: self.addresses[COORDINATOR], **higher}
        self._open_all()

    def _take_started(self, peer: object, number: int, message: object) -> None:
        """Handle a message that needs the replicas."""
        assert self.member is not None
        if number >= len(self.member.replicas):
            raise FrameError(f"range {number} of {len(self.member.replicas)}")
        replica = self.member.replicas[number]
        if isinstance(message, setup.Install):
            if not message.content:
                raise FrameError("an Install without content")
            # First content that comes again, after a broken connection, must not undo what was trained since.
            if not replica.is_synced:
                replica.store.restore(message.content)
            # Acknowledged each time: the first acknowledgement may have been lost.
            self.send([(COORDINATOR, number, setup.Installed(self.node))])
        elif isinstance(message, setup.ReadState):
            # The tail has only updates that no failure can take back. The worker asks again where this is not it.
            if replica.is_synced and replica.is_tail:
                self.send([(peer, number, setup.StateRead(message.request, replica.store.content()))])
        else:
            self._take_protocol(replica, number, message)

    def _take_protocol(self, replica: Replica, number: int, message: object) -> None:
        assert self.member is not None
        applied_before = replica.update_count
        committed_before = replica.committed
        self.send(self.member.on(number, message))
        self.counts["updates"] += replica.update_count - applied_before
        if isinstance(message, messages.Configuration | messages.State):
            self._send_heartbeat_if_new(number, replica.heartbeat())
        if replica.update_count + replica.committed > applied_before + committed_before:
            self.progress_s = time.monotonic()
            # Progress shows that messages arrive: the next loss is to be mended soon.
            self.repeat_after_s = REPEAT_S[0]

    def _send_heartbeat_if_new(self, number: int, heartbeat: messages.Out) -> None:
        """Send a heartbeat at once when the configuration or the state is new: others wait for it.

        Only once: the coordinator answers each heartbeat with the configuration, and this answer with a heartbeat
        would go on for ever, some ten thousand times a second.
        """
        if self.sent_heartbeats.get(number) != heartbeat:
            self.sent_heartbeats[number] = heartbeat
            self.send(with_range(number, heartbeat))

    def _start(self, message: setup.StartServers) -> None:
        if self.member is not None:
            return  # the coordinator began again
        settings = JobSettings.of_json(message.settings)
        layout = ServerLayout.of_json(bytes(message.layout).decode())
        self.ranges = layout.ranges(settings.servers)
        mode = settings.admission()
        gates = settings.gates(len(self.ranges))
        replicas: list[Replica] = []
        for number, segments in enumerate(self.ranges):
            store = Segments(layout, segments, settings.implementation, settings.clip_norm, settings.workers, mode)
            replicas.append(Replica(self.node, len(segments), mode, store, number, gates))
        self.member = Member(self.node, replicas)
        for peer, number, early_message in self.early:
            if number < len(self.ranges):
                self._take_started(peer, number, early_message)
        self.early.clear()

    def destination(self, connection: Connection, number: int, message: object, nbytes: int) -> tuple[Any, memoryview]:
        """Return the memory for a payload; a gradient is exactly as long as its segment."""
        if not isinstance(message, messages.Push | messages.Forward | messages.State | setup.Install):
            return super().destination(connection, number, message, nbytes)
        # Before the job's start there are no ranges, so no length is right. The worker sends first content again.
        if connection.peer is None or number >= len(self.ranges):
            raise FrameError(f"a {type(message).__name__} of range {number} of {len(self.ranges)}")
        if isinstance(message, messages.Push):
            return self._room_for_gradient(number, message.segment, nbytes)
        if isinstance(message, messages.Forward):
            return self._room_for_gradient(number, message.update.segment, nbytes)
        return self._room_for_state(number, nbytes)

    def _room_for_state(self, number: int, nbytes: int) -> tuple[Any, memoryview]:
        if nbytes > most_state_bytes(self.ranges[number]):
            raise FrameError(f"a state of {nbytes} bytes")
        content = bytearray(nbytes)
        return content, memoryview(content)

    def _room_for_gradient(self, number: int, index: int, nbytes: int) -> tuple[Any, memoryview]:
        segments = self.ranges[number]
        if not 0 <= index < len(segments) or nbytes != segments[index].nbytes:
            raise FrameError(f"a gradient of segment {index} with {nbytes} bytes")
        # The payload is received into the tensor that the store adds up: no copy. The bytes are whole elements, as
        # segments are.
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory.view(_DTYPES[segments[index].dtype]), bytes_of(memory)

    def views(self, payload: object) -> Sequence[memoryview]:
        """Return the bytes of a payload."""
        return views_of(payload)

    def status(self) -> dict[str, Any]:
        """Return the status that `paceline server top` shows of this server."""
        rows: list[dict[str, Any]] = []
        for number, replica in enumerate(self.member.replicas if self.member is not None else []):
            if self.node in replica.configuration.chain:
                rows.append(_status_of(number, replica))
        connections = self.connections.values()
        return {
            "node": self.node,
            "ranges": rows,
            "bytes_sent": sum(connection.bytes_sent for connection in connections),
            "bytes_received": sum(connection.bytes_received for connection in connections),
            "messages": dict(self.counts),
            "refused": list(self.refused),
            "pid": os.getpid(),
            "rank": parse_whole(os.environ.get("PACELINE_RANK", "")),  # set by the supervisor
        }

    def _open_all(self) -> None:
        for peer in self.addresses:
            self.open(peer)

    def _expire(self) -> None:
        # time.monotonic everywhere: a host's clock that is set must not close a round, or make anybody silent.
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
    role = ""
    if replica.is_head:
        role = "head"
    elif replica.is_tail:
        role = "tail"
    return {
        "range": number,
        "role": role,
        "epoch": replica.configuration.config_version,
        "updates": replica.update_count,
        "behind": replica.update_count - replica.committed,
        "readers_waiting": len(replica.waiting_pulls),
        "waits_for": _waits_for(replica),
        "duplicates": replica.duplicates,
        "staleness": replica.staleness,
    }


def _waits_for(replica: Replica) -> list[int]:
    """Return the workers without whom the oldest open round can't close."""
    if not (replica.is_head and replica.mode.is_by_rounds):
        return []
    oldest = min(replica.rounds.values())
    due = [segment for segment, closed in replica.rounds.items() if closed == oldest]
    # All gradients are here: the round waits for other ranges, not for workers.
    if any(segment in replica.staged for segment in due):
        return []
    have_pushed: set[int] = set()
    for segment in due:
        have_pushed.update(replica.open_rounds[segment])
    return [name for name, _ in replica.configuration.workers if name not in have_pushed]


async def serve(listen_at: str, coordinator: str, credentials: Credentials | None = None) -> None:
    """Run one server.

    Raises:
        PacelineError: the address can't be had, or the coordinator refuses this server.
    """
    torch.set_num_threads(1)
    await Server(Address.parse(listen_at), Address.parse(coordinator), credentials).run()
