"""Send and receive frames over one connection, each payload directly into the memory where it belongs.

Frames to send wait in a queue of views until the kernel takes them, without a copy.
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

# asyncio's transport may copy what the kernel does not take at once. It is handed chunks, and none above the high-water
# mark, which bounds that copy; all else waits in our queue as views.
CHUNK_BYTES = 2**20
HIGH_WATER_BYTES = 2**21  # in the transport's own buffer
MAX_QUEUE_BYTES = 2**36  # a peer that takes nothing for so long is gone


class Endpoint(Protocol):
    """The owner of connections: it says what may come, where payloads go, and handles messages."""

    def check_may_send(self, connection: Connection, kind: type, nbytes: int) -> None:
        """Raise FrameError unless the other may send messages of this kind, with a payload of so many bytes."""

    def destination(
        self, connection: Connection, number: int, message: object, nbytes: int
    ) -> tuple[object, memoryview]:
        """Return the payload that the message about range `number` will hold, and the memory for its bytes.

        Raises:
            FrameError: it may not have so many.
        """

    def views(self, payload: object) -> Sequence[memoryview]:
        """Return the bytes of a payload."""

    def on_open(self, connection: Connection) -> None:
        """Called when a connection is there."""

    def on_message(self, connection: Connection, number: int, message: object) -> None:
        """Called with each message that has come."""

    def on_lost(self, connection: Connection, reason: str) -> None:
        """Called when a connection has ended."""


class Connection(asyncio.BufferedProtocol):
    """One end of a connection.

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
        self.reason = ""
        self.is_paused = False
        self.is_closed = False
        self.queue: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._expect_prefix()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport: called by asyncio."""
        self.transport = transport
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.endpoint.on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the endpoint that the transport is gone: called by asyncio."""
        self.is_closed = True
        # Views in the queue keep tensors alive.
        self.queue.clear()
        self.endpoint.on_lost(self, self.reason or str(exc or "the other end closed it"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: called by asyncio."""
        return self.target[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes that have come: called by asyncio."""
        self.filled += nbytes
        self.bytes_received += nbytes
        # A loop: a target of no bytes is full at once, and asyncio raises if it is handed an empty buffer.
        while not self.is_closed and self.filled == len(self.target):
            try:
                self._take()
            except FrameError as error:
                self.close(f"a wrong frame: {error}")

    def send(self, number: int, message: object) -> None:
        """Queue a message about range `number`."""
        if self.is_closed:
            return
        payload = payload_of(message)
        views: list[memoryview] = []
        if payload is not None:
            views = [view for view in self.endpoint.views(payload) if view.nbytes]
        size = sum(view.nbytes for view in views)
        # Views, not copies: until they are sent the payload must not change. A worker waits for its acknowledgement
        # first.
        self.queue.append(memoryview(write_frame(number, message, size)))
        self.queue.extend(views)
        self.queued_bytes += size
        if self.queued_bytes > MAX_QUEUE_BYTES:
            self.close(f"{self.queued_bytes >> 20} MiB wait to be taken")
        self._flush()

    def close(self, reason: str) -> None:
        """End the connection from here; what the kernel has not taken yet is dropped."""
        if not self.is_closed:
            self.reason = self.reason or reason
            self.is_closed = True
            # Not close(), which would wait until a peer that takes nothing has taken what is buffered.
            self.transport.abort()

    def pause_writing(self) -> None:
        """Stop writing: the kernel takes no more for now."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self.is_paused = False
        self._flush()

    @property
    def is_idle(self) -> bool:
        """True if everything has been handed to the kernel."""
        return not self.queue and not self.is_paused

    def _flush(self) -> None:
        while self.queue and not self.is_paused and not self.is_closed:
            view = self.queue.popleft()
            # transport.write may call pause_writing, so `is_paused` is looked at before each chunk.
            if view.nbytes > CHUNK_BYTES:
                if view.format != "B":  # slices count elements, not bytes
                    view = view.cast("B")
                self.queue.appendleft(view[CHUNK_BYTES:])
                view = view[:CHUNK_BYTES]
            self.bytes_sent += view.nbytes
            self.queued_bytes = max(0, self.queued_bytes - view.nbytes)
            self.transport.write(view)

    def _expect_prefix(self) -> None:
        self.prefix: Prefix | None = None
        self.message: Any = None
        self._expect(memoryview(bytearray(PREFIX.size)))

    def _expect(self, target: memoryview) -> None:
        """Receive the next bytes into `target`, until it is full."""
        self.target = target
        self.filled = 0

    def _take(self) -> None:
        """Handle what has filled the target: a prefix, then a header, then a payload where there is one."""
        if self.prefix is None:
            self.prefix = read_prefix(self.target)
            # With only the prefix: nothing is allocated for what this peer may not send.
            self.endpoint.check_may_send(self, FORMS[self.prefix.kind].kind, self.prefix.payload_bytes)
            self._expect(memoryview(bytearray(self.prefix.header_bytes)))
        elif self.message is None:
            self.message = read_header(self.prefix, self.target)
            if not self.prefix.payload_bytes and payload_of(self.message) is None:
                self._deliver(self.message)
                return
            nbytes = self.prefix.payload_bytes
            self.payload, target = self.endpoint.destination(self, self.prefix.key_range, self.message, nbytes)
            self._expect(target)
            # A target of another length would put the bytes of the next frame into this payload.
            if len(self.target) != nbytes:
                raise FrameError(f"a {type(self.message).__name__} with {nbytes} bytes, not {len(self.target)}")
        else:
            self._deliver(with_payload(self.message, self.payload))

    def _deliver(self, message: object) -> None:
        number = self.prefix.key_range if self.prefix is not None else 0
        # Before the message is handled: handling it may close the connection or raise.
        self._expect_prefix()
        self.endpoint.on_message(self, number, message)
