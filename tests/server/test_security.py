"""Who may speak to a server: refused before a byte is parsed, or as soon as it claims to be another."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import stat
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from paceline.nouns.errors import CheckpointError, PeerLostError, UsageError
from paceline.nouns.plan import Plan
from paceline.server import setup
from paceline.server.coordinator.process import Coordination
from paceline.server.node import Server
from paceline.server.protocol import messages
from paceline.server.protocol.coordinator import Coordinator, Settings
from paceline.server.protocol.messages import COORDINATOR
from paceline.server.server_layout import Entry, ServerLayout
from paceline.server.settings import JobSettings
from paceline.server.status import look
from paceline.server.transport import address as addresses
from paceline.server.transport.accept import Waiting, bound
from paceline.server.transport.address import Address, Credentials, connect
from paceline.server.transport.connection import Connection
from paceline.server.transport.credentials import ROLES, make_credentials
from paceline.server.transport.frames import PREFIX, FrameError, write_frame
from paceline.server.transport.peers import Peers, addresses_of

from support.cluster import Cluster, train

pytestmark = pytest.mark.slow


class Listener(Peers):
    """Keeps what it takes."""

    def __init__(self, credentials):
        super().__init__(credentials)
        self.took = []

    def take(self, peer, number, message):
        self.took.append((peer, message))


def exchange(tmp_path, client, act, where="127.0.0.1:0", server="server"):
    """Start a listener, run `act(address, client's credentials)` in a thread, and give the listener some time."""
    folder = tmp_path / "job"
    if not folder.exists():
        make_credentials(folder)

    async def run():
        listener = Listener(Credentials(folder / server) if where.startswith("127") else None)
        at = await listener.listen(Address.parse(where))
        outcome = await asyncio.to_thread(act, Address.parse(at), client)
        await asyncio.sleep(0.2)
        listener.close()
        await asyncio.sleep(0.05)
        return listener, outcome

    return asyncio.run(run())


def raw(content):
    def act(at, _):
        with socket.create_connection((at.host, at.port), 5) as end:
            end.sendall(content)
            end.settimeout(2)
            try:
                return end.recv(100)
            except OSError as error:
                return error

    return act


def speak(*sent):
    """Connect with credentials, and send messages."""

    def act(at, credentials):
        async def run():
            own = Listener(credentials)
            connection = await connect(at, lambda: Connection(own), credentials)
            connection.peer = "server"
            for message in sent:
                connection.send(0, message)
            await asyncio.sleep(0.3)
            closed = connection.is_closed
            own.close()
            connection.close("done")
            await asyncio.sleep(0.05)
            return closed

        try:
            return asyncio.run(run())
        except PeerLostError as error:
            return error

    return act


HELLO = setup.Hello("worker", 1, 0, "", "")
PULL = messages.Pull(0, (1, 0), 0, 0)


def test_a_worker_of_the_job_is_heard(tmp_path):
    make_credentials(tmp_path / "job")
    listener, is_closed = exchange(tmp_path, Credentials(tmp_path / "job" / "worker"), speak(HELLO, PULL))
    assert listener.took == [((1, 0), PULL)]
    assert not is_closed


def test_without_a_certificate_nothing_is_parsed(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(
        "paceline.server.transport.connection.read_prefix", lambda content: parsed.append(bytes(content))
    )
    listener, _ = exchange(tmp_path, None, raw(write_frame(0, HELLO, 0)))
    assert (listener.took, parsed) == ([], [])


def test_the_certificate_of_another_job_is_refused(tmp_path):
    make_credentials(tmp_path / "other")
    listener, outcome = exchange(tmp_path, Credentials(tmp_path / "other" / "worker"), speak(HELLO, PULL))
    assert not listener.took
    assert isinstance(outcome, PeerLostError) or outcome is True
    assert "see whether it runs, and whether its credentials are of the same job" in str(outcome) or outcome is True


def test_an_older_tls_is_refused(tmp_path):
    make_credentials(tmp_path / "job")

    def act(at, credentials):
        context = credentials.context(is_server=False)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with socket.create_connection((at.host, at.port), 5) as end, pytest.raises(ssl.SSLError):
            context.wrap_socket(end)

    listener, _ = exchange(tmp_path, Credentials(tmp_path / "job" / "worker"), act)
    assert not listener.took


@pytest.mark.parametrize(
    "sent",
    [
        (PULL,),  # before it said who it is
        (setup.Hello("server", 1, 0, "unix:/x", ""), PULL),  # its certificate is a worker's
        (HELLO, messages.Pull(0, (2, 0), 0, 0)),  # in another's name
        (HELLO, messages.Configuration(9, (1,), {})),  # the coordinator's to say
        (HELLO, messages.Forwarded(0, 99)),  # a server's to say
        (HELLO, HELLO),
        (setup.Hello("king", 1, 0, "", ""), PULL),
    ],
)
def test_nobody_speaks_for_another(tmp_path, sent):
    make_credentials(tmp_path / "job")
    listener, is_closed = exchange(tmp_path, Credentials(tmp_path / "job" / "worker"), speak(*sent))
    assert is_closed
    assert not listener.took
    assert len(listener.refused) == 1


@pytest.mark.parametrize(
    "message",
    [PULL, messages.Configuration(9, (1,), {}), messages.Forwarded(0, 99), setup.Install((0,)), setup.ReadState(1)],
)
def test_a_watcher_may_only_ask(tmp_path, message):
    make_credentials(tmp_path / "job")
    hello, watcher = setup.Hello("watcher", -1, 0, "", ""), Credentials(tmp_path / "job" / "watcher")
    listener, is_closed = exchange(tmp_path, watcher, speak(hello, setup.AskStatus()))
    assert (is_closed, len(listener.refused)) == (False, 0)
    listener, is_closed = exchange(tmp_path, watcher, speak(hello, message))
    assert is_closed
    assert not listener.took
    assert len(listener.refused) == 1


LOST = CheckpointError("range 0 of the parameters", "all servers that had it have ended", "--resume")


@pytest.mark.parametrize(
    ("message", "raised", "is_fatal"),
    [
        (PULL, FrameError("no JSON"), False),
        (PULL, LOST, True),
        *[
            (message, raised, True)
            for message in (PULL, HELLO)
            for raised in (OSError(28, "full"), RuntimeError("bug"))
        ],
    ],
)
def test_security_only_a_wrong_message_ends_just_its_connection(message, raised, is_fatal, monkeypatch):
    """A full disk, parameters that are lost and bugs are no fault of whoever spoke last."""
    ends, failures = [], []
    one = Listener(None)
    peer = None if message is HELLO else PULL.worker
    connection = SimpleNamespace(peer=peer, role=None, close=ends.append)
    for name in ("take", "greet"):
        monkeypatch.setattr(one, name, lambda *_: (_ for _ in ()).throw(raised))
    monkeypatch.setattr(one, "failed", failures.append)
    one.on_message(connection, 0, message)
    assert failures == ([raised] if is_fatal else [])
    assert [end.startswith(f"a wrong {type(message).__name__}: ") for end in ends] == ([] if is_fatal else [True])


def test_parameters_found_lost_at_a_workers_goodbye_end_the_job(tmp_path, monkeypatch):
    """Not the connection of that worker."""
    job = JobSettings.of(Plan.parse("replicate=2,server=2"))
    process = Coordination(Address.parse(f"unix:{tmp_path}/c"), job, tmp_path / "log", lambda event: None)
    process.coordinator = one = Coordinator.first([(0, 1)], [(0, 0), (1, 0)], lambda entry: None, Settings())
    one.tick(time.monotonic() - 10.0)
    for node in (0, 1):
        one.forget(node, time.monotonic() - 5.0)
    ends, failures = [], []
    monkeypatch.setattr(process, "failed", failures.append)
    connection = SimpleNamespace(peer=(1, 0), close=ends.append)
    process.on_message(connection, 0, messages.WorkerHeartbeat((1, 0), 0, 3, is_done=True))
    process.log.close()
    assert [str(error).partition("\n  fix:")[0] for error in failures] == [
        "range 0 of the parameters should be on 2 servers\n  found: all servers that had it have ended"
    ]
    assert not ends


def test_security_coordinator_ends_if_its_log_is_unwritable(tmp_path, monkeypatch):
    job = JobSettings.of(Plan.parse("replicate=1,server=1"))
    process = Coordination(Address.parse(f"unix:{tmp_path}/c"), job, tmp_path / "log", lambda event: None)
    failures, full = [], OSError(28, "full")
    monkeypatch.setattr(process, "failed", failures.append)
    monkeypatch.setattr(process, "_start_if_all_are_here", lambda: (_ for _ in ()).throw(full))

    async def come():
        hello = setup.Hello("server", -1, 0, f"unix:{tmp_path}/s", "")
        process.on_message(SimpleNamespace(peer=None, role=None, send=lambda *_: None), 0, hello)
        await asyncio.sleep(0)

    asyncio.run(come())
    process.log.close()
    assert failures == [full]


def test_security_damaged_state_closes_its_connection(monkeypatch):
    layout = ServerLayout((Entry("w", (8,), "float32", 0),), "SGD", ({"lr": 0.1},), 24)
    server = Server(Address.parse("unix:/s"), Address.parse("unix:/c"))
    ends, failures = [], []
    monkeypatch.setattr(server, "failed", failures.append)
    connection = SimpleNamespace(peer=COORDINATOR, close=ends.append)
    server.on_message(connection, 0, setup.StartServers(JobSettings(1, 1).to_json(), layout.to_json().encode()))
    assert not ends
    connection.peer = (0, 0)
    server.on_message(connection, 0, setup.Install((0,), b"torn"))
    assert not failures
    assert [end.startswith("a wrong Install: ") for end in ends] == [True]


def test_security_install_without_content_closes_its_connection(monkeypatch):
    layout = ServerLayout((Entry("w", (8,), "float32", 0),), "SGD", ({"lr": 0.1},), 24)
    server = Server(Address.parse("unix:/s"), Address.parse("unix:/c"))
    ends, failures = [], []
    monkeypatch.setattr(server, "failed", failures.append)
    connection = SimpleNamespace(peer=COORDINATOR, close=ends.append)
    server.on_message(connection, 0, setup.StartServers(JobSettings(1, 1).to_json(), layout.to_json().encode()))
    connection.peer = (0, 0)
    server.on_message(connection, 0, setup.Install((0,)))
    assert not failures
    assert ends == ["a wrong Install: an Install without content"]


@pytest.mark.parametrize(
    ("peer", "kind"),
    [
        ((0, 0), messages.Push),
        *[(1, kind) for kind in (messages.Forward, messages.Pulled, messages.State, setup.StateRead)],
    ],
)
def test_security_message_announced_without_its_bytes_is_refused(peer, kind):
    server = Server(Address.parse("unix:/s"), Address.parse("unix:/c"))
    connection = SimpleNamespace(peer=peer)
    server.check_may_send(connection, kind, 1)
    with pytest.raises(FrameError, match=f"a {kind.__name__} without its bytes"):
        server.check_may_send(connection, kind, 0)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", '{"1": "nowhere"}', '{"a": "unix:/x"}', '{"1": 2}'])
def test_facts_and_addresses_that_are_none(content):
    with pytest.raises(FrameError):
        addresses_of(content)


@pytest.fixture
def short():
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as folder:
        yield folder


def says(role, frame, seconds=0.5):
    """Connect with a role's credentials, send bytes that end in the middle of a frame, and wait for the end."""

    def act(at, credentials):
        raw = socket.create_connection((at.host, at.port), 5)
        with credentials.context(is_server=False).wrap_socket(raw) as end:
            end.sendall(frame)
            end.settimeout(seconds)
            try:
                return end.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

    return act


def begun(message, header_bytes, payload_bytes):
    """A frame's prefix, with the lengths given, and its message's header where that may follow."""
    frame = write_frame(0, message, payload_bytes)
    kind = frame[5]
    header = frame[PREFIX.size :]
    return PREFIX.pack(b"PCLN", 1, kind, 0, header_bytes or len(header), payload_bytes) + header * (not header_bytes)


@pytest.mark.parametrize(
    ("role", "before", "frame"),
    [
        ("watcher", b"", begun(setup.Hello("watcher", -1, 0, "", ""), 0, 2**26)),
        ("server", b"", begun(setup.Hello("server", 1, 0, "unix:/x", ""), 0, 2**26)),
        ("worker", b"", begun(setup.Hello("server", 1, 0, "unix:/x", ""), 0, 2**26)),
        ("worker", b"", begun(messages.Configuration(1, (), {}), 2**24, 0)),
        ("worker", write_frame(0, HELLO, 0), begun(messages.Configuration(1, (), {}), 2**24, 0)),
        ("worker", write_frame(0, HELLO, 0), begun(messages.State(1, 0, {}, {}, {}, None, b""), 0, 2**26)),
        ("worker", write_frame(0, HELLO, 0), begun(HELLO, 0, 2**26)),
        ("watcher", write_frame(0, setup.Hello("watcher", -1, 0, "", ""), 0), begun(setup.Status(b""), 0, 2**26)),
    ],
    ids=[
        "a watcher's hello with a layout",
        "a server's hello with a layout",
        "another role's hello with a layout",
        "a long header before a hello",
        "a long header of the coordinator's",
        "a server's state",
        "a second hello",
        "a watcher's status",
    ],
)
def test_nothing_is_allocated_for_what_its_sender_may_not_send(tmp_path, monkeypatch, role, before, frame):
    """The connection ends at the frame's first bytes: a length is no reason to take up memory."""
    make_credentials(tmp_path / "job")
    largest, plain = [0], Connection.get_buffer

    def get_buffer(connection, hint):
        largest.append(len(connection.target))
        return plain(connection, hint)

    monkeypatch.setattr(Connection, "get_buffer", get_buffer)
    monkeypatch.setattr(Listener, "takes_layouts", True)
    own = Credentials(tmp_path / "job" / role)
    listener, is_closed = exchange(tmp_path, own, says(role, before + frame))
    assert is_closed
    assert max(largest) <= 2**16
    assert len(listener.refused) == 1


def test_a_worker_may_bring_its_layout_to_who_takes_layouts(tmp_path, monkeypatch):
    make_credentials(tmp_path / "job")
    own, hello = Credentials(tmp_path / "job" / "worker"), setup.Hello("worker", 1, 0, "", "", bytes(2**20))
    for takes_layouts in (True, False):
        monkeypatch.setattr(Listener, "takes_layouts", takes_layouts)
        _, is_closed = exchange(tmp_path, own, speak(hello))
        assert is_closed is not takes_layouts


def is_closed(end):
    end.settimeout(0.0)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("where", ["127.0.0.1:0", "unix"])
def test_connections_that_say_nothing_keep_nobody_out(tmp_path, short, monkeypatch, where):
    """They are capped for each peer and in all, end after a short time, and one of the job's still comes in."""
    where = f"unix:{short}/s" if where == "unix" else where
    monkeypatch.setattr("paceline.server.transport.accept.SAY_S", 1.5)
    monkeypatch.setattr("paceline.server.transport.accept.PER_PEER", 8)
    make_credentials(tmp_path / "job")

    def act(at, credentials):
        family = socket.AF_UNIX if at.is_unix else socket.AF_INET
        idle = [socket.socket(family) for _ in range(60)]
        for end in idle:
            end.connect(at.host if at.is_unix else (at.host, at.port))
        time.sleep(0.5)
        open_ones = sum(not is_closed(end) for end in idle)
        outcome = speak(HELLO, PULL)(at, credentials)
        time.sleep(1.5)
        later = sum(not is_closed(end) for end in idle)
        for end in idle:
            end.close()
        return open_ones, outcome, later

    own = Credentials(tmp_path / "job" / "worker")
    listener, (open_ones, outcome, later) = exchange(tmp_path, own, act, where=where)
    assert (open_ones, outcome, later) == (8, False, 0)
    assert [message for _, message in listener.took] == [PULL]


def test_watchers_that_stay_make_room_for_others(tmp_path, short, monkeypatch):
    monkeypatch.setattr("paceline.server.transport.peers.WATCHERS", 3)
    hello = write_frame(0, setup.Hello("watcher", -1, 0, "", ""), 0)

    def act(at, _):
        ends = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        for end in ends:
            end.connect(at.host)
            end.sendall(hello)
            time.sleep(0.1)
        closed = [is_closed(end) for end in ends]
        for end in ends:
            end.close()
        return closed

    _, closed = exchange(tmp_path, None, act, where=f"unix:{short}/s")
    assert closed == [True, True, False, False, False]


def test_who_has_most_connections_waiting_makes_room_for_others():
    ended = []
    waiting = Waiting(per_peer=3, in_all=5)
    for number, peer in enumerate(["a", "a", "a", "b", "c"]):
        waiting.add(number, peer, lambda number=number: ended.append(number))
    waiting.add(5, "d", lambda: ended.append(5))
    assert ended == [0]  # the oldest of who has most
    waiting.add(6, "a", lambda: ended.append(6))
    assert ended == [0, 1]
    waiting.remove(2)
    waiting.remove(2)
    waiting.add(7, "a", lambda: ended.append(7))
    waiting.add(8, "a", lambda: ended.append(8))
    assert ended == [0, 1, 6]
    assert len(waiting) == 5


def test_security_process_without_descriptors_drops_silent_ones(tmp_path, monkeypatch):
    plain, failures = asyncio.selector_events.BaseSelectorEventLoop.sock_accept, []

    async def sock_accept(self, listener):
        if len(failures) < 2:
            failures.append(listener)
            raise OSError(24, "Too many open files")
        return await plain(self, listener)

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_accept", sock_accept)
    make_credentials(tmp_path / "job")
    listener, outcome = exchange(tmp_path, Credentials(tmp_path / "job" / "worker"), speak(HELLO, PULL))
    assert (outcome, len(failures)) == (False, 2)
    assert [message for _, message in listener.took] == [PULL]


def test_another_user_is_refused_on_a_unix_socket(tmp_path, short, monkeypatch):
    path = f"{short}/s"
    modes = []

    def act(at, _):
        modes.append(stat.S_IMODE(os.stat(at.host).st_mode))
        return speak(HELLO, PULL)(at, None)

    listener, _ = exchange(tmp_path, None, act, where=f"unix:{path}")
    assert [message for _, message in listener.took] == [PULL]
    monkeypatch.setattr("paceline.server.transport.peers.user_of", lambda end: os.getuid() + 1)
    listener, is_closed = exchange(tmp_path, None, act, where=f"unix:{path}")
    assert is_closed
    assert not listener.took
    assert modes == [0o600, 0o600]


def test_keys_are_this_users_alone(tmp_path):
    folders = make_credentials(tmp_path / "job")
    assert [folder.name for folder in folders] == list(ROLES)
    for path in [tmp_path / "job", *(tmp_path / "job").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    keys = [path for path in (tmp_path / "job").rglob("*.pem") if b"PRIVATE KEY" in path.read_bytes()]
    assert len(keys) == len(ROLES)  # none of them the authority's


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda folder: Address.parse("nowhere"), "neither unix:PATH nor HOST:PORT"),
        (lambda folder: Address.parse("host:99999"), "neither unix:PATH nor HOST:PORT"),
        (lambda folder: Address.parse("unix:/" + "x" * 120), "the path has 121 characters of 107"),
        (lambda folder: make_credentials(folder), "name a new one"),
        (lambda folder: Credentials(folder).context(True), "paceline server credentials FOLDER"),
        (lambda folder: asyncio.run(Listener(None).listen(Address.parse("0.0.0.0:0"))), "there are no credentials"),
        (lambda folder: asyncio.run(Listener(None).listen(Address.parse("unix:/nowhere/x"))), "name another with"),
    ],
)
def test_what_can_t_be_had(tmp_path, act, says):
    with pytest.raises(UsageError) as error:
        act(tmp_path)
    assert says in str(error.value)


def test_a_port_in_use(tmp_path):
    make_credentials(tmp_path / "job")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UsageError, match="in use"):
            asyncio.run(Listener(Credentials(tmp_path / "job" / "server")).listen(where))


NO_IPV6 = OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
NOT_HERE = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


class Kernel(socket.socket):
    """Sockets of a kernel on which some addresses can't be had."""

    at_once: OSError | None = None  # at the making of an IPv6 socket
    errors: ClassVar[dict[str, OSError]] = {}  # by address, at bind

    def __init__(self, family=socket.AF_INET, *more, **options):
        if family == socket.AF_INET6:
            if self.at_once is not None:
                raise self.at_once
            family = socket.AF_INET  # so that the test needs no IPv6
        super().__init__(family, *more, **options)

    def setsockopt(self, level, *more):
        if level != socket.IPPROTO_IPV6:
            super().setsockopt(level, *more)

    def bind(self, address):
        if address[0] in self.errors:
            raise self.errors[address[0]]
        super().bind(("127.0.0.2" if address[0] == "::1" else address[0], address[1]))


def bound_on(monkeypatch, found, at_once=None, errors=None):
    """The addresses that `bound` listens at, where a host's name stands for the addresses `found`."""
    monkeypatch.setattr(Kernel, "at_once", at_once)
    monkeypatch.setattr(Kernel, "errors", errors or {})
    monkeypatch.setattr(
        "paceline.server.transport.accept.socket", SimpleNamespace(**{**vars(socket), "socket": Kernel})
    )
    family = {":": socket.AF_INET6, ".": socket.AF_INET}

    async def run():
        async def resolved(host, port, **_):
            rest = {":": (0, 0), ".": ()}
            kinds = [(one, ":" if ":" in one else ".") for one in found]
            return [(family[k], socket.SOCK_STREAM, 6, "", (one, port, *rest[k])) for one, k in kinds]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
        return await bound("h1", 0)

    listeners = asyncio.run(run())
    names = [listener.getsockname() for listener in listeners]
    for listener in listeners:
        listener.close()
    assert len({port for _, port in names}) == 1
    return [host for host, _ in names]


@pytest.mark.parametrize(
    ("at_once", "errors", "at"),
    [
        (None, {}, ["127.0.0.2", "127.0.0.1"]),
        (NO_IPV6, {}, ["127.0.0.1"]),
        (None, {"::1": NOT_HERE}, ["127.0.0.1"]),
        (None, {"127.0.0.1": NOT_HERE}, ["127.0.0.2"]),
    ],
)
def test_a_host_listens_at_those_of_its_addresses_that_it_has(monkeypatch, at_once, errors, at):
    """A name may stand for an IPv6 address where the kernel has no IPv6."""
    assert bound_on(monkeypatch, ["::1", "127.0.0.1"], at_once, errors) == at


def test_a_host_none_of_whose_addresses_can_be_had(monkeypatch):
    with pytest.raises(OSError, match=r"none of its addresses is of this host: ::1 .*, 127\.0\.0\.1 ") as caught:
        bound_on(monkeypatch, ["::1", "127.0.0.1"], NO_IPV6, {"127.0.0.1": NOT_HERE})
    assert caught.value.strerror.count("\n") == 0


def test_a_port_in_use_at_one_address_is_not_passed_over(monkeypatch):
    """Whoever connects to that address would reach another program."""
    taken = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    with pytest.raises(OSError, match="in use"):
        bound_on(monkeypatch, ["::1", "127.0.0.1"], None, {"127.0.0.1": taken})


def test_secrets_are_not_in_the_status():
    seen = []

    def work(handle, model):
        train(handle, model)
        seen.append(asyncio.run(look(Address.parse(cluster.where))))  # while the job is not over

    with Cluster("replicate=1,server=1") as cluster:
        cluster.worker(0, 3, work).ended()
    (facts,) = seen
    assert "PRIVATE" not in str(facts)
    assert facts["state"] == "training"
    assert addresses.UNIX in str(facts["servers"])
    assert threading.active_count() < 50
