"""Keep the connections of one process: open them, and check which messages each peer may send.

Coordinator, server and worker are subclasses, with a state machine inside.
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

# How often workers and servers send a sign of life. The coordinator measures silence by the pauses that it sees.
HEARTBEAT_S = 0.5
WATCHERS = 32  # that may stay connected
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between attempts to connect
# Which messages each role may send; everybody may ask for the status. A worker or server speaks only for itself.
# Install comes from the coordinator and from workers: see `_may_send`.
_FROM_COORDINATOR = (messages.Configuration, setup.Welcome, setup.StartServers, setup.Addresses, setup.Refused)
_FROM_WORKER = (messages.Push, messages.Pull, messages.WorkerHeartbeat, setup.ReadState)
_FROM_SERVER = (
    *(messages.Forward, messages.Forwarded, messages.Missing, messages.State, messages.Partial, messages.Heartbeat),
    *(messages.Pushed, messages.Pulled, messages.Stale, setup.StateRead, setup.Installed),
)

# A segment has at least one element, and a state at least one segment. A length of 0 is a damaged prefix: such a
# message would be handled without its payload, before anything looks at the payload's length. `Install` is not here:
# the coordinator sends it to workers without content.
_NEVER_EMPTY = (messages.Push, messages.Forward, messages.Pulled, messages.State, setup.StateRead)


class Peers:
    """The connections of one process.

    Args:
        credentials: for whatever leaves the host.
    """

    takes_layouts = False  # whether a worker's hello may carry its layout

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

    def hello(self, to: object) -> setup.Hello:
        """Return the greeting that this process sends first to another."""
        raise NotImplementedError

    def take(self, peer: object, number: int, message: object) -> None:
        """Handle a message from a known peer about range `number`.

        Raises:
            FrameError: it is not what it should be: the connection is ended.
            Exception: any other error is this process's own, and ends it.
        """
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """Return this process's status, for `paceline server top`."""
        return {}

    def greet(self, connection: Connection, hello: setup.Hello) -> object:
        """Return the key of a new peer in `connections`.

        Raises:
            PacelineError: it is nobody that belongs here.
        """
        return hello.name if hello.role == "server" else (hello.name, hello.incarnation)

    def lost(self, peer: object) -> None:
        """Called when a known peer's connection has ended."""

    def connected(self, peer: object) -> None:
        """Called when a connection to a peer is there, opened from either side."""

    def destination(
        self, connection: Connection, number: int, message: object, nbytes: int
    ) -> tuple[object, memoryview]:
        """Return the memory for a payload: see `connection.Endpoint`."""
        if isinstance(message, setup.Hello):  # a short header says whose it is; what it brings is only now taken in
            most = LAYOUT_BYTES if message.role == "worker" else 0
        elif isinstance(message, setup.StartServers):
            most = LAYOUT_BYTES
        elif isinstance(message, setup.Status):
            most = STATUS_BYTES
        else:
            most = -1  # no payload is expected, not even an empty one
        if nbytes > most:
            raise FrameError(f"a {type(message).__name__} with {nbytes} bytes")
        content = bytearray(nbytes)
        return content, memoryview(content)

    def views(self, payload: Any) -> Sequence[memoryview]:
        """Return the bytes of a payload."""
        return [memoryview(payload)]

    # --- connections

    async def listen(self, address: Address) -> str:
        """Accept connections, and return the address where they come."""
        self.listener, bound_address = await listen(address, lambda: Connection(self), self.credentials)
        return bound_address

    def send(self, sent: Sent) -> None:
        """Hand messages to their connections.

        What is for a peer that is not connected is dropped: the protocol sends it again.
        """
        for addressee, number, message in sent:
            connection = self.connections.get(addressee)
            if connection is not None:
                # TCP keeps the order on one connection; between two connections there is none.
                connection.send(number, message)
            elif addressee in self.addresses:
                self.open(addressee)

    def open(self, peer: object) -> None:
        """Begin to connect to a peer, unless it is connected or that is under way."""
        if peer not in self.opening and peer not in self.connections and not self.is_closing:
            self.opening.add(peer)
            self.spawn(self._open(peer))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task; its error ends this process."""
        task = asyncio.get_running_loop().create_task(work)
        # asyncio keeps only weak references to tasks: without this one a task could be collected while it runs.
        self.tasks.add(task)
        task.add_done_callback(self._finish_task)

    def call(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call something from the event loop: its error ends this process, where asyncio would only log it."""
        try:
            work(*arguments)
        except Exception as error:
            self.failed(error)

    def _finish_task(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        # asyncio would only log the error, when the task is collected.
        if not task.cancelled() and task.exception() is not None:
            self.failed(task.exception())

    def failed(self, error: BaseException | None) -> None:
        """Handle the error of a task."""
        raise error or RuntimeError("failed")

    async def _open(self, peer: object) -> None:
        try:
            connection = await self._connect_with_retries(peer)
            if connection is None:
                return
            # A certificate names a role, not a host: it must be the role that belongs to this address.
            role = "coordinator" if peer == messages.COORDINATOR else "server"
            if connection.role not in (None, role):
                connection.close(f"its certificate is of a {connection.role}, where a {role} should be")
                return
            connection.peer = peer
            # The hello goes first: the other end refuses anything before it.
            self.connections[peer] = connection
            connection.send(0, self.hello(peer))
            self.connected(peer)
        finally:
            self.opening.discard(peer)

    async def _connect_with_retries(self, peer: object) -> Connection | None:
        """Connect to a peer; None if it does not answer, or has no address any more."""
        for wait_s in RETRY_S:
            address = self.addresses.get(peer)
            if address is None:
                return None
            try:
                return await connect(address, lambda: Connection(self), self.credentials)
            except PeerLostError:
                await asyncio.sleep(wait_s)
        return None

    def close(self) -> None:
        """End all tasks and connections."""
        # First, so that connections that end now are not opened again.
        self.is_closing = True
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.connections.values()):
            connection.close("the process ends")
        if self.listener is not None:
            self.listener.close()

    # --- Endpoint

    def on_open(self, connection: Connection) -> None:
        """Identify the other end before a byte is read: its user on a unix socket, its certificate's role elsewhere."""
        end = connection.transport.get_extra_info("socket")
        role = role_of(connection.transport)
        if role is None and user_of(end) not in (os.getuid(), None):
            connection.close("it is no process of this user")
            return
        connection.role, connection.process = role, process_of(end)

    def check_may_send(self, connection: Connection, kind: type, nbytes: int) -> None:
        """Raise FrameError if a message is not the peer's to send: see `connection.Endpoint`.

        Called with the first bytes of a frame, before memory is taken up for it: a stranger, or a watcher, could make
        this process take up LAYOUT_BYTES for each message otherwise.
        """
        if kind is setup.Hello:
            if connection.peer is not None:
                raise FrameError("a second hello")
            if nbytes and not (self.takes_layouts and connection.role in (None, "worker")):
                raise FrameError(f"a hello with {nbytes} bytes, which are not its to send")
        elif connection.peer is None or not _may_send(connection.peer, kind):
            raise FrameError(f"a {kind.__name__} is not its to send")
        elif not nbytes and kind in _NEVER_EMPTY:
            raise FrameError(f"a {kind.__name__} without its bytes")

    def on_message(self, connection: Connection, number: int, message: object) -> None:
        """Handle a message. A wrong one ends its connection, an error of this process's own the process."""
        try:
            # The class was checked with the prefix (`check_may_send`); `_on_message` checks in whose name it speaks.
            self._on_message(connection, number, message)
        except FrameError as error:
            connection.close(f"a wrong {type(message).__name__}: {error}")
        except Exception as error:  # the disk is full, parameters are lost: closing this connection would mend nothing
            self.failed(error)

    def _on_message(self, connection: Connection, number: int, message: object) -> None:
        if isinstance(message, setup.Hello):
            self._greet(connection, message)
        elif connection.peer is None or not _may_say(connection.peer, message):
            connection.close(f"a {type(message).__name__} is not its to send")
        elif isinstance(message, setup.AskStatus):
            connection.send(0, setup.Status(json.dumps(self.status()).encode()))
        else:
            self.take(connection.peer, number, message)

    def on_lost(self, connection: Connection, reason: str) -> None:
        """Forget a connection that has ended."""
        if self.listener is not None:
            self.listener.is_known(connection)
        if connection.reason and connection.reason != "the process ends":
            self.refused.append(reason)
        # Not where the peer has come again: its newer connection has the place.
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
        if hello.role == "watcher":
            self._close_oldest_watcher_if_full()
            # By its connection: several watchers may look on at once.
            peer: Any = ("watcher", id(connection))
        else:
            try:
                peer = self.greet(connection, hello)
            except PacelineError as error:
                refusal = setup.Refused(type(error).__name__, error.asked, error.found, error.fix)
                connection.send(0, refusal)
                # Closed later: closing drops what has not left yet, which may be the refusal.
                asyncio.get_running_loop().call_later(1.0, connection.close, str(error))
                return
        before = self.connections.get(peer)
        if before is not None:
            before.peer = None  # so that its end is not taken for the peer's
            before.close("it came again")
        connection.peer = peer
        if self.listener is not None:
            self.listener.is_known(connection)
        self.connections[peer] = connection
        self.connected(peer)

    def _close_oldest_watcher_if_full(self) -> None:
        watchers = [peer for peer in self.connections if is_watcher(peer)]
        if len(watchers) >= WATCHERS:
            self.connections[watchers[0]].close("too many look on")


def _may_send(peer: object, kind: type) -> bool:
    """Return True if a peer may send messages of this class."""
    if is_watcher(peer):
        return kind is setup.AskStatus
    if kind in (setup.AskStatus, setup.Status):
        return True
    if kind is setup.Install:
        return peer == COORDINATOR or isinstance(peer, tuple)
    if peer == COORDINATOR:
        return kind in _FROM_COORDINATOR
    if isinstance(peer, int):
        return kind in _FROM_SERVER
    return kind in _FROM_WORKER


def _may_say(peer: object, message: object) -> bool:
    """Return True if a message is its sender's to send: nobody speaks in another's name."""
    if not _may_send(peer, type(message)):
        return False
    if isinstance(message, setup.AskStatus | setup.Install):
        return True
    # Messages that don't name their sender are the connection's peer's.
    field_of_sender = "node" if isinstance(peer, int) else "worker"
    return bool(getattr(message, field_of_sender, peer) == peer)


def facts_of(content: Any) -> dict[str, Any]:
    """Read a JSON object that a peer has sent.

    Raises:
        FrameError: it is none.
    """
    try:
        return dict(parse_json(content, "a peer's message", dict))
    except ReadError as error:
        raise FrameError(f"it can't be read ({error.found})") from None


def addresses_of(content: str) -> dict[Node, Address]:
    """Read where the servers are, by their number.

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


def is_watcher(peer: object) -> bool:
    """Return True if a peer only asks for the status: it takes no part in the job."""
    return isinstance(peer, tuple) and peer[0] == "watcher"


async def every(seconds: float, work: Callable[[], None]) -> None:
    """Call `work` again and again, until the task is cancelled."""
    while True:
        work()
        await asyncio.sleep(seconds)
