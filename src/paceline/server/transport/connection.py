"""One connection: frames in, frames out, each payload received straight into its place.

What is to be sent waits in a queue of views, and goes on as the kernel takes it: nothing is copied to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.server.transport.frames import (
    FORMS,
    PREFIX,
    FrameError,
    Prefix,
    payload_of,
    read_header,
    read_prefix,
    with_payload,
    write_frame,
)

CHUNK_BYTES = 2**20
HIGH_WATER_BYTES = 2**21  # in the transport's own buffer
MAX_QUEUE_BYTES = 2**36  # a peer that takes nothing for so long is gone


class Endpoint(Protocol):
    """Whose connections they are."""

    def check_may_send(self, connection: Connection, kind: type, nbytes: int) -> None:
        """Raise FrameError unless the other may send messages of this kind, with a payload of so many bytes."""

    def destination(self, connection: Connection, number: int, message: Any, nbytes: int) -> tuple[Any, memoryview]:
        """Where the payload of a message about range `number` goes: what the message will hold, and its bytes.

        Raises:
            FrameError: it may not have so many.
        """

    def views(self, payload: Any) -> Sequence[memoryview]:
        """The bytes of a payload."""

    def on_open(self, connection: Connection) -> None:
        """A connection is there."""

    def on_message(self, connection: Connection, number: int, message: Any) -> None:
        """A message has come."""

    def on_lost(self, connection: Connection, why: str) -> None:
        """A connection has ended."""


class Connection(asyncio.BufferedProtocol):
    """Either end.

    Attributes:
        peer: who the other is, once it has said so.
        role: what its certificate says that it is; None on a unix socket.
        process: at the other end of a unix socket, where the system says it.
        accepted: the acceptor's name for it; None where this end has opened it.
        why: why it was closed from here.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.peer: Any = None
        self.role: str | None = None
        self.process: int | None = None
        self.accepted: Any = None
        self.transport: Any = None
        self.why = ""
        self.is_paused = self.is_closed = False
        self.queue: deque[memoryview] = deque()
        self.queued_bytes = self.bytes_sent = self.bytes_received = 0
        self._expect_prefix()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The transport is there."""
        self.transport = transport
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.endpoint.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self.is_closed = True
        self.queue.clear()
        self.endpoint.on_lost(self, self.why or str(exc or "the other end closed it"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self.target[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self.filled += nbytes
        self.bytes_received += nbytes
        while not self.is_closed and self.filled == len(self.target):
            try:
                self._take()
            except FrameError as error:
                self.close(f"a wrong frame: {error}")

    def send(self, number: int, message: Any) -> None:
        """Queue a message about range `number`."""
        if self.is_closed:
            return
        payload = payload_of(message)
        views = [view for view in self.endpoint.views(payload) if view.nbytes] if payload is not None else []
        size = sum(view.nbytes for view in views)
        self.queue.append(memoryview(write_frame(number, message, size)))
        self.queue.extend(views)
        self.queued_bytes += size
        if self.queued_bytes > MAX_QUEUE_BYTES:
            self.close(f"{self.queued_bytes >> 20} MiB wait to be taken")
        self._flush()

    def close(self, why: str) -> None:
        """End it from here."""
        if not self.is_closed:
            self.why, self.is_closed = self.why or why, True
            self.transport.abort()

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """It does again."""
        self.is_paused = False
        self._flush()

    @property
    def is_idle(self) -> bool:
        """Whether everything has been handed to the kernel."""
        return not self.queue and not self.is_paused

    def _flush(self) -> None:
        while self.queue and not self.is_paused and not self.is_closed:
            view = self.queue.popleft()
            if view.nbytes > CHUNK_BYTES:
                view = view.cast("B") if view.format != "B" else view
                self.queue.appendleft(view[CHUNK_BYTES:])
                view = view[:CHUNK_BYTES]
            self.bytes_sent += view.nbytes
            self.queued_bytes = max(0, self.queued_bytes - view.nbytes)
            self.transport.write(view)

    def _expect_prefix(self) -> None:
        self.prefix: Prefix | None = None
        self.message: Any = None
        self.target, self.filled = memoryview(bytearray(PREFIX.size)), 0

    def _take(self) -> None:
        if self.prefix is None:
            self.prefix = read_prefix(self.target)
            self.endpoint.check_may_send(self, FORMS[self.prefix.kind].kind, self.prefix.payload_bytes)
            self.target, self.filled = memoryview(bytearray(self.prefix.header_bytes)), 0
        elif self.message is None:
            self.message = read_header(self.prefix, self.target)
            if not self.prefix.payload_bytes and payload_of(self.message) is None:
                self._deliver(self.message)
                return
            number, nbytes = self.prefix.key_range, self.prefix.payload_bytes
            self.place, self.target = self.endpoint.destination(self, number, self.message, nbytes)
            self.filled = 0
            if len(self.target) != nbytes:
                raise FrameError(f"a {type(self.message).__name__} with {nbytes} bytes, not {len(self.target)}")
        else:
            self._deliver(with_payload(self.message, self.place))

    def _deliver(self, message: Any) -> None:
        number = self.prefix.key_range if self.prefix is not None else 0
        self._expect_prefix()
        self.endpoint.on_message(self, number, message)
