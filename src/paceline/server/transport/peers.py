"""A process among others: who is connected, who may say what, and how to reach those who are not.

Coordinator, server and worker are each one of these, with a state machine inside.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from paceline.nouns.errors import PacelineError, PeerLostError, ReadError
from paceline.nouns.reading import parse_json, parse_whole, shown
from paceline.server import setup
from paceline.server.protocol import messages
from paceline.server.protocol.messages import COORDINATOR, Node, Sent
from paceline.server.transport.address import Address, Credentials, connect, listen, process_of, role_of, user_of
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import LAYOUT_BYTES, STATUS_BYTES, FrameError

HEARTBEAT_S = 0.5
WATCHERS = 32  # that may stay connected
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between attempts to connect
# Who may say what; everybody may ask for the status. A worker or server may speak for itself alone.
_FROM_COORDINATOR = (messages.Configuration, setup.Welcome, setup.StartServers, setup.Addresses, setup.Refused)
_FROM_WORKER = (messages.Push, messages.Pull, messages.WorkerHeartbeat, setup.ReadState)
_FROM_SERVER = (
    *(messages.Forward, messages.Forwarded, messages.Missing, messages.State, messages.Partial, messages.Heartbeat),
    *(messages.Pushed, messages.Pulled, messages.Stale, setup.StateRead, setup.Installed),
)


class Peers:
    """The connections of one process.

    Args:
        credentials: for whatever leaves the host.
    """

    takes_layouts = False  # from workers, with their hello

    def __init__(self, credentials: Credentials | None) -> None:
        self.credentials = credentials
        self.connections: dict[Any, Connection] = {}  # by who is at the other end
        self.addresses: dict[Any, Address] = {}
        self.opening: set[Any] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.listener: Any = None
        self.is_closing = False
        self.refused: deque[str] = deque(maxlen=5)  # what was turned away, newest last

    # --- what each process adds

    def hello(self, to: Any) -> setup.Hello:
        """What this process says first to another."""
        raise NotImplementedError

    def take(self, peer: Any, number: int, message: Any) -> None:
        """A message from a known peer about range `number`.

        Raises:
            FrameError: it is not what it should be: the connection is ended.
            Exception: any other error is this process's own, and ends it.
        """
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """What a person may want to know."""
        return {}

    def greet(self, connection: Connection, hello: setup.Hello) -> Any:
        """Who that is, in the terms of this process.

        Raises:
            PacelineError: it is nobody that belongs here.
        """
        return hello.name if hello.role == "server" else (hello.name, hello.incarnation)

    def lost(self, peer: Any) -> None:
        """A known peer's connection has ended."""

    def connected(self, peer: Any) -> None:
        """A connection to a peer is there, from either side."""

    def destination(self, connection: Connection, number: int, message: Any, nbytes: int) -> tuple[Any, memoryview]:
        """Where a payload goes: see `connection.Endpoint`."""
        most = STATUS_BYTES if isinstance(message, setup.Status) else LAYOUT_BYTES
        is_known = isinstance(message, setup.Hello | setup.StartServers | setup.Status)
        if isinstance(message, setup.Hello):  # a short header says whose it is; what it brings is only now taken in
            is_known = message.role == "worker" or not nbytes
        if is_known and nbytes <= most:
            content = bytearray(nbytes)
            return content, memoryview(content)
        raise FrameError(f"a {type(message).__name__} with {nbytes} bytes")

    def views(self, payload: Any) -> Sequence[memoryview]:
        """The bytes of a payload."""
        return [memoryview(payload)]

    # --- connections

    async def listen(self, address: Address) -> str:
        """Accept connections; where they come."""
        self.listener, where = await listen(address, lambda: Connection(self), self.credentials)
        return where

    def send(self, sent: Sent) -> None:
        """Hand messages to their connections; one that must be opened first will say again what it missed."""
        for addressee, number, message in sent:
            connection = self.connections.get(addressee)
            if connection is not None:
                connection.send(number, message)
            elif addressee in self.addresses:
                self.open(addressee)

    def open(self, peer: Any) -> None:
        """Begin to connect to a peer, unless that is under way."""
        if peer not in self.opening and peer not in self.connections and not self.is_closing:
            self.opening.add(peer)
            self.spawn(self._open(peer))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def call(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do something that the event loop was asked to do: its errors end this process, where asyncio logs them."""
        try:
            work(*arguments)
        except Exception as error:
            self.failed(error)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failed(task.exception())

    def failed(self, error: BaseException | None) -> None:
        """Something that ran beside has failed."""
        raise error or RuntimeError("failed")

    async def _open(self, peer: Any) -> None:
        try:
            for wait_s in RETRY_S:
                address = self.addresses.get(peer)
                if address is None:
                    return
                try:
                    connection = await connect(address, lambda: Connection(self), self.credentials)
                except PeerLostError:
                    await asyncio.sleep(wait_s)
                    continue
                role = "coordinator" if peer == messages.COORDINATOR else "server"
                if connection.role not in (None, role):
                    connection.close(f"its certificate is of a {connection.role}, where a {role} should be")
                    return
                connection.peer = peer
                self.connections[peer] = connection
                connection.send(0, self.hello(peer))
                self.connected(peer)
                return
        finally:
            self.opening.discard(peer)

    def close(self) -> None:
        """End everything."""
        self.is_closing = True
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.connections.values()):
            connection.close("the process ends")
        if self.listener is not None:
            self.listener.close()

    # --- Endpoint

    def on_open(self, connection: Connection) -> None:
        """Look who it is before a byte is read: this user on a unix socket, the job's certificate on any other."""
        end = connection.transport.get_extra_info("socket")
        role = role_of(connection.transport)
        if role is None and user_of(end) not in (os.getuid(), None):
            connection.close("it is no process of this user")
            return
        connection.role, connection.process = role, process_of(end)

    def check_may_send(self, connection: Connection, kind: type, nbytes: int) -> None:
        """Before a byte of memory is taken up for a message: see `connection.Endpoint`."""
        if kind is setup.Hello:
            if connection.peer is not None:
                raise FrameError("a second hello")
            if nbytes and not (self.takes_layouts and connection.role in (None, "worker")):
                raise FrameError(f"a hello with {nbytes} bytes, which are not its to send")
        elif connection.peer is None or not _may_send(connection.peer, kind):
            raise FrameError(f"a {kind.__name__} is not its to send")

    def on_message(self, connection: Connection, number: int, message: Any) -> None:
        """A message has come: is it its sender's to send? A wrong one ends its connection, an own error the process."""
        try:
            self._on_message(connection, number, message)
        except FrameError as error:
            connection.close(f"a wrong {type(message).__name__}: {error}")
        except Exception as error:  # the disk is full, parameters are lost: closing this connection would mend nothing
            self.failed(error)

    def _on_message(self, connection: Connection, number: int, message: Any) -> None:
        if isinstance(message, setup.Hello):
            self._greet(connection, message)
        elif connection.peer is None or not _may_say(connection.peer, message):
            connection.close(f"a {type(message).__name__} is not its to send")
        elif isinstance(message, setup.AskStatus):
            connection.send(0, setup.Status(json.dumps(self.status()).encode()))
        else:
            self.take(connection.peer, number, message)

    def on_lost(self, connection: Connection, why: str) -> None:
        """A connection has ended."""
        if self.listener is not None:
            self.listener.is_known(connection)
        if connection.why and connection.why != "the process ends":
            self.refused.append(why)
        if connection.peer is not None and self.connections.get(connection.peer) is connection:
            del self.connections[connection.peer]
            self.lost(connection.peer)

    def _greet(self, connection: Connection, hello: setup.Hello) -> None:
        if connection.peer is not None or hello.role not in ("server", "worker", "watcher"):
            connection.close(f"a second hello, or one as {hello.role!r}")
            return
        if connection.role not in (None, hello.role):
            connection.close(f"its certificate is of a {connection.role}, it says that it is a {hello.role}")
            return
        try:
            peer = ("watcher", id(connection)) if hello.role == "watcher" else self.greet(connection, hello)
        except PacelineError as error:
            refusal = setup.Refused(type(error).__name__, error.asked, error.found, error.fix)
            connection.send(0, refusal)
            asyncio.get_running_loop().call_later(1.0, connection.close, str(error))
            return
        watchers = [other for other in self.connections if isinstance(other, tuple) and other[0] == "watcher"]
        if hello.role == "watcher" and len(watchers) >= WATCHERS:
            self.connections[watchers[0]].close("too many look on")
        if (old := self.connections.get(peer)) is not None:
            old.peer = None
            old.close("it came again")
        connection.peer = peer
        if self.listener is not None:
            self.listener.is_known(connection)
        self.connections[peer] = connection
        self.connected(peer)


def _may_send(peer: Any, kind: type) -> bool:
    """Whether a peer may send such messages."""
    if isinstance(peer, tuple) and peer[0] == "watcher":
        return kind is setup.AskStatus
    if kind in (setup.AskStatus, setup.Status):
        return True
    if kind is setup.Install:
        return peer == COORDINATOR or isinstance(peer, tuple)
    if peer == COORDINATOR:
        return kind in _FROM_COORDINATOR
    return kind in (_FROM_SERVER if isinstance(peer, int) else _FROM_WORKER)


def _may_say(peer: Any, message: Any) -> bool:
    """Whether a message is its sender's to send: nobody speaks in another's name."""
    name = "node" if isinstance(peer, int) else "worker"
    is_own = isinstance(message, setup.AskStatus | setup.Install) or getattr(message, name, peer) == peer
    return _may_send(peer, type(message)) and is_own


def facts_of(content: Any) -> dict[str, Any]:
    """A JSON object that a peer has sent.

    Raises:
        FrameError: it is none.
    """
    try:
        return dict(parse_json(content, "a peer's message", dict))
    except ReadError as error:
        raise FrameError(f"it can't be read ({error.found})") from None


def addresses_of(content: str) -> dict[Node, Address]:
    """Where the servers are.

    Raises:
        FrameError: that is not what it says.
    """
    addresses = {}
    for node, text in facts_of(content).items():
        number = parse_whole(node)
        if number is None or not isinstance(text, str):
            raise FrameError(f"no address of a server: {shown(node)}, {shown(text)}")
        try:
            addresses[number] = Address.parse(text)
        except PacelineError as error:
            raise FrameError(f"no addresses ({error.found})") from None
    return addresses


async def every(seconds: float, work: Callable[[], None]) -> None:
    """Call `work` again and again."""
    while True:
        work()
        await asyncio.sleep(seconds)
