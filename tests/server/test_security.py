"""Who may speak to a server: refused before a byte is parsed, or as soon as it claims to be another."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import threading
from types import SimpleNamespace

import pytest
from cluster import Cluster, train

from paceline.nouns.errors import CheckpointError, PeerLostError, UsageError
from paceline.server import address as addresses
from paceline.server import messages, setup
from paceline.server.address import Address, Credentials, connect
from paceline.server.connection import Connection
from paceline.server.credentials import ROLES, make_credentials
from paceline.server.frames import FrameError, write_frame
from paceline.server.peers import Peers, addresses_of
from paceline.server.watch import look

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
    monkeypatch.setattr("paceline.server.connection.read_prefix", lambda content: parsed.append(bytes(content)))
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


@pytest.mark.parametrize(
    ("raised", "is_fatal"),
    [(FrameError("no JSON"), False), (CheckpointError("a state", "torn", "-"), False), (OSError(28, "full"), True)],
)
def test_what_can_not_be_read_ends_that_connection_alone(raised, is_fatal, monkeypatch):
    """A full disk is this process's own trouble: that ends it."""
    ends, failures = [], []
    one = Listener(None)
    connection = SimpleNamespace(peer=PULL.worker, close=ends.append)
    monkeypatch.setattr(one, "take", lambda *_: (_ for _ in ()).throw(raised))
    monkeypatch.setattr(one, "failed", failures.append)
    one.on_message(connection, 0, PULL)
    assert failures == ([raised] if is_fatal else [])
    assert [end.startswith("a wrong Pull: ") for end in ends] == ([] if is_fatal else [True])


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", '{"1": "nowhere"}', '{"a": "unix:/x"}', '{"1": 2}'])
def test_facts_and_addresses_that_are_none(content):
    with pytest.raises(FrameError):
        addresses_of(content)


def test_another_user_is_refused_on_a_unix_socket(tmp_path, monkeypatch):
    path = f"/tmp/pl-test-{os.getpid()}"
    modes = []

    def act(at, _):
        modes.append(stat.S_IMODE(os.stat(at.host).st_mode))
        return speak(HELLO, PULL)(at, None)

    listener, _ = exchange(tmp_path, None, act, where=f"unix:{path}")
    assert [message for _, message in listener.took] == [PULL]
    monkeypatch.setattr("paceline.server.peers.user_of", lambda end: os.getuid() + 1)
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
