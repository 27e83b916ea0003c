"""Accept connections: a bounded number may wait to identify themselves, each for a short time.

A connection that has shown a certificate and sent a hello no longer counts. Where too many others wait, the oldest one
of the peer that has most of them is ended: a process of the job identifies itself within milliseconds, so that it is
not kept out by connections that send nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.server.transport.connection import Connection

SAY_S = 10.0  # for a connection to say who it is, TLS handshake included
PER_PEER = 64  # that have not: of one host, or of one process on this host
IN_ALL = 256
# Waits in the kernel, which caps it at net.core.somaxconn without an error (listen(2)).
_BACKLOG = 512
_ABSENT = {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EADDRNOTAVAIL}  # the host has no such address
_NO_DESCRIPTORS_S = 0.1  # before the next attempt where this process may open no more


@dataclass(slots=True)
class Waiting:
    """The connections that have not identified themselves.

    Args:
        per_peer: the most of one peer.
        in_all: the most of all.
    """

    per_peer: int
    in_all: int
    ends: dict[Any, tuple[Any, Callable[[], None]]] = field(default_factory=dict)  # the oldest first

    def __len__(self) -> int:
        return len(self.ends)

    def add(self, connection: object, peer: object, end: Callable[[], None]) -> None:
        """Add a connection; where it is one too many, end an older one.

        Args:
            connection: the name of the connection.
            peer: the peer that it comes from.
            end: a function that ends the connection.
        """
        if sum(counted_peer == peer for counted_peer, _ in self.ends.values()) >= self.per_peer:
            self.end_oldest(peer)
        elif len(self.ends) >= self.in_all:
            self.end_oldest()
        self.ends[connection] = peer, end

    def remove(self, connection: object) -> None:
        """Forget a connection that has identified itself, or has ended."""
        self.ends.pop(connection, None)

    def end_oldest(self, peer: object = None) -> None:
        """End the oldest connection of a peer; without one, of the peer that has most."""
        if not self.ends:
            return
        if peer is None:
            counts = Counter(counted_peer for counted_peer, _ in self.ends.values())
            peer, _ = counts.most_common(1)[0]
        connection = next(name for name, (counted_peer, _) in self.ends.items() if counted_peer == peer)
        _, end = self.ends.pop(connection)
        end()


class Acceptor:
    """The listening sockets of one process, which accept until they are closed.

    Args:
        listeners: the bound sockets that listen.
        make: a function that makes a connection's protocol.
        context: the context of TLS; None for a unix socket.
        peer_of: a function that returns the peer of a new connection.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        make: Callable[[], Connection],
        context: ssl.SSLContext | None,
        peer_of: Callable[[socket.socket], object],
    ) -> None:
        self.listeners = listeners
        self.make = make
        self.context = context
        self.peer_of = peer_of
        self.waiting = Waiting(PER_PEER, IN_ALL)
        self.tasks: set[asyncio.Task[None]] = set()
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
            self._spawn(self._accept(listener))

    def is_known(self, connection: Connection) -> None:
        """Note that a connection has identified itself, or has ended."""
        self.waiting.remove(connection.accepted)

    def close(self) -> None:
        """Accept no more."""
        for task in list(self.tasks):
            task.cancel()
        for listener in self.listeners:
            listener.close()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the other has gone
                # Ending one frees a descriptor. The pause keeps this from a busy loop: the connection that could not be
                # accepted is still waiting in the kernel.
                self.waiting.end_oldest()
                await asyncio.sleep(_NO_DESCRIPTORS_S)
                continue
            self._spawn(self._open(end))

    async def _open(self, end: socket.socket) -> None:
        """Open a connection, and end it unless it soon identifies itself."""
        connection = self.make()
        name = object()
        connection.accepted = name
        task = asyncio.current_task()
        assert task is not None
        self.waiting.add(name, self.peer_of(end), lambda: _end(connection, task))
        seconds = SAY_S if self.context is not None else None
        try:
            # Each of the three steps has SAY_S: its first bytes, the TLS handshake, its hello.
            async with asyncio.timeout(SAY_S):
                await _has_something(end)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, end, ssl=self.context, ssl_handshake_timeout=seconds
            )
            await asyncio.sleep(SAY_S)
            if name in self.waiting.ends:
                connection.close("it did not identify itself in time")
        except (OSError, TimeoutError, ssl.SSLError):
            pass  # it is none of the job's, says nothing, or has gone
        finally:
            self.waiting.remove(name)
            # Once there is a transport, it owns the socket.
            if connection.transport is None:
                end.close()


def _end(connection: Connection, task: asyncio.Task[None]) -> None:
    """End a connection that has not identified itself: in its TLS handshake, or after it."""
    if connection.transport is not None:
        connection.close("too many connections have not identified themselves")
    task.cancel()


async def _has_something(end: socket.socket) -> None:
    """Wait for the first bytes: until then a connection takes up no buffers, which TLS has a quarter of a MiB of."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(end.fileno(), came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(end.fileno())


async def bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to one port of those addresses of a host name that this host has.

    A name may have others: an IPv6 address, for example, where the kernel has no IPv6.

    Raises:
        OSError: none can be had, or one is in use.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    absent: list[str] = []
    try:
        for family, kind, _, _, address in dict.fromkeys(addresses):
            if listeners:  # port 0 became a free one with the first: the others have the same
                port = listeners[0].getsockname()[1]
            try:
                listeners.append(_bound_at(family, kind, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent.append(f"{address[0]} ({os.strerror(error.errno)})")
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, f"none of its addresses is of this host: {', '.join(absent)}")
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _bound_at(family: int, kind: int, address: Any) -> socket.socket:
    listener = socket.socket(family, kind)
    try:
        # A coordinator that is started again needs its port while old connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # On Linux an IPv6 socket takes IPv4 connections too by default: the IPv4 address of the same port could not
            # be bound.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def bound_unix(path: str) -> socket.socket:
    """Return a socket in the file system that only this user may open, in the place of one that a process left.

    Raises:
        OSError: it can't be had.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Connecting takes write permission on the socket's file (unix(7)). By umask, as a chmod after bind would leave a
    # moment.
    before = os.umask(0o177)
    try:
        with contextlib.suppress(FileNotFoundError):
            # bind fails where the file exists, and a killed process leaves it. Any other file is somebody's.
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.remove(path)
        listener.bind(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
