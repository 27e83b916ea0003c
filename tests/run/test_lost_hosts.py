"""Jobs with parameter servers on several hosts of which some are lost: scripted hosts, the real supervisor."""

from __future__ import annotations

import io
import json
import os
import signal
import time

import pytest

from paceline.launch.rank_assignment import HostRanks, Rendezvous, with_servers
from paceline.run.failures import lost_host
from paceline.run.supervise import supervisor
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.supervisor import HostAssignment, JobRequest, Supervisor

# Two workers, two servers and the coordinator: 0, 2 and 4 are on h1, 1 and 3 on h2.
WORKER_0, WORKER_1, SERVER_0, SERVER_1, COORDINATOR = range(5)
MOST_TURNS = 150


class Host:
    """What a `RemoteBackend` tells, as the script wants it."""

    def __init__(self, name):
        self.host, self.is_lost, self.waiting = name, False, []
        self.reading, self.writing = os.pipe()
        self.alive, self.restarts, self.signalled = set(), [], []
        self.on_turn = lambda: None

    def start(self, settings):
        self.processes = settings.processes

    def listen(self, register, events):
        self.events = events
        register(self.reading, self._read)

    def _read(self):
        if not os.read(self.reading, 100):
            self.events.on_lost(self)
            return False
        return True

    def begin(self, *ranks):
        self.alive |= set(ranks or self.processes)
        self.events.on_started({rank: 1000 + rank for rank in ranks or self.processes})

    def end(self, rank, status=0):
        self.alive.discard(rank)
        self.events.on_ended(rank, status)

    def lose(self):
        self.is_lost = True
        self._hang_up()

    def _hang_up(self):
        if self.writing is not None:
            os.close(self.writing)
            self.writing = None

    def signal(self, ranks, number):
        self.signalled += ranks

    def kill(self):
        if not self.is_lost:
            self.waiting = sorted(self.alive)

    def turn(self):
        """What a kill has done by now."""
        for rank in self.waiting:
            self.end(rank, -signal.SIGKILL)
        self.waiting = []

    def restart(self, rank):
        self.restarts.append(rank)

    def finish(self):
        if not self.is_lost:
            self._hang_up()

    def heartbeat(self, now_s):
        self.turn()
        self.on_turn()

    def close(self):
        self._hang_up()
        return 255 if self.is_lost else 0

    def failure(self, status, at):
        return lost_host(self.host, "", at)


class Play:
    """A job of two hosts that follow a script, a line each turn of the supervisor."""

    def __init__(self, folder):
        self.folder, self.h1, self.h2, self.h3 = folder, Host("h1"), Host("h2"), Host("h3")
        (folder / "failures").mkdir()
        self.said = []

    def step(self, kind="step", number=1):
        event = {"event": kind, "step": number, "loss": 1.0, "samples": 8, "position": 8, "at": 1.0, "memory_bytes": 0}
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def run(self, script, size=2):
        host_ranks = with_servers([HostRanks(f"h{at + 1}", at, 1, at, size) for at in range(size)], 2)
        hosts = zip((self.h1, self.h2, self.h3)[:size], host_ranks, strict=True)
        assignments = [HostAssignment(host, own, Rendezvous(coordinator="h1:1")) for host, own in hosts]
        request = JobRequest(
            self.folder / "f.py", [], size, self.folder, servers=2, assignments=assignments, grace_s=1.0
        )
        lines = script(self)
        turns = iter(range(MOST_TURNS))

        def turn():
            assert next(turns, None) is not None, "it never ends"
            next(lines, None)

        screen = Screen(io.StringIO(), io.StringIO())
        screen.say = self.said.append
        screen.show_output = screen.show_progress = lambda *_: None
        screen.end = lambda: None
        self.h1.on_turn = turn
        self.supervisor = Supervisor(request, screen)
        try:
            ending, _ = self.supervisor.run()
        finally:
            self.supervisor.restore_signals()
        return ending


@pytest.fixture
def play(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_TICK_S", 0.01)
    monkeypatch.setattr(supervisor, "HELD_S", 0.2)
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.1)
    monkeypatch.setattr(supervisor, "OUTLIVED_S", 0.3)
    monkeypatch.setattr(supervisor, "LEFT_BEHIND_S", 0.3)
    return Play(tmp_path)


def begin(play):
    play.h1.begin()
    play.h2.begin()
    yield
    play.step()
    yield


def test_a_loss_before_the_first_step_ends_the_job(play):
    """Nobody would come in its place, and the coordinator waits for all before it begins."""

    def script(play):
        play.h1.begin()
        play.h2.begin()
        yield
        play.h2.lose()
        yield

    ending = play.run(script)
    assert (ending.status, ending.cause["host"]) == ("failed", "h2")
    assert not play.h1.alive


def test_a_loss_later_is_survived(play):
    def script(play):
        yield from begin(play)
        play.h2.lose()
        yield
        play.h1.end(WORKER_0)
        yield
        play.h1.end(COORDINATOR)

    ending = play.run(script)
    assert ending.status == "done"
    assert "h2 is lost; the others go on without worker 1, server 1" in "".join(play.said)
    assert not play.h1.alive, "its server was ended"


def test_a_loss_of_the_coordinator_is_waited_out(play, monkeypatch):
    def script(play):
        yield from begin(play)
        began.append(time.monotonic())
        play.h1.lose()
        yield

    began = []
    monkeypatch.setattr(supervisor, "OUTLIVED_S", 1.5)
    ending = play.run(script)
    assert time.monotonic() - began[0] >= 1.4
    assert (ending.status, ending.cause["host"]) == ("failed", "h1")
    assert "a lost host that still runs ends its processes in that time" in play.said[-1]
    assert not play.h2.alive


def test_a_host_whose_worker_is_done_may_go_while_another_saves(play):
    def script(play):
        yield from begin(play)
        play.h2.end(WORKER_1)
        yield
        play.h2.lose()
        yield
        yield
        assert WORKER_0 in play.h1.alive
        play.h1.end(WORKER_0)
        yield

    assert play.run(script).status == "done"


@pytest.mark.parametrize("is_stopping", [False, True])
def test_lost_hosts_second_loss_is_told_if_it_ended_the_job(play, is_stopping):
    def script(play):
        play.h3.begin()
        yield from begin(play)
        play.h3.lose()
        yield
        if is_stopping:
            play.supervisor.asked_to_stop.append(signal.SIGTERM)
            yield
        play.h1.lose()
        yield

    ending = play.run(script, size=3)
    assert "h3 is lost; the others go on without worker 2" in "".join(play.said)
    assert (ending.status, ending.exit_code, ending.cause["host"]) == ("failed", 1, "h1")
    assert ending.lost_hosts == ("h1", "h3")


def test_what_failed_later_is_told(play):
    def script(play):
        yield from begin(play)
        play.h2.lose()
        yield
        failure = {"rank": 0, "step": 2, "at": 1e12, "type": "ValueError", "message": "oh", "is_peer_loss": False}
        more = {"is_paceline": False, "where": None, "traceback": "", "exit_code": 1, "parts": None}
        (play.folder / "failures" / "0.json").write_text(json.dumps({**failure, **more}))
        play.h1.end(WORKER_0, 1)
        yield

    ending = play.run(script)
    assert (ending.status, ending.cause["type"]) == ("failed", "ValueError")


def test_a_stop_after_a_loss_is_a_stop(play):
    def script(play):
        yield from begin(play)
        play.h2.lose()
        yield
        play.supervisor.asked_to_stop += [signal.SIGINT, signal.SIGINT]
        yield

    ending = play.run(script)
    assert (ending.status, ending.exit_code) == ("stopped", 130)


@pytest.mark.parametrize("is_piece_by_piece", [False, True])
def test_a_loss_while_others_save_lets_them_save(play, is_piece_by_piece):
    """Also of a host that is taken away: its processes are killed, then its connection ends."""

    def script(play):
        yield from begin(play)
        play.supervisor.asked_to_stop.append(signal.SIGINT)
        yield
        yield
        assert play.h1.signalled == [WORKER_0]
        if is_piece_by_piece:
            play.h2.end(WORKER_1, -signal.SIGKILL)
        play.h2.lose()
        yield
        assert WORKER_0 in play.h1.alive
        play.step("stopped")
        play.h1.end(WORKER_0)
        yield

    ending = play.run(script)
    assert (ending.status, ending.exit_code) == ("stopped", 130)


def test_a_loss_that_is_heard_of_when_training_is_over(play):
    def script(play):
        yield from begin(play)
        play.h1.end(COORDINATOR)
        play.h1.end(WORKER_0)
        play.h2.lose()
        yield

    assert play.run(script).status == "done"


def test_a_server_that_comes_back_when_all_is_over_is_ended(play):
    def script(play):
        yield from begin(play)
        play.h2.end(SERVER_1, -signal.SIGKILL)
        yield
        assert play.h2.restarts == [SERVER_1]
        play.h2.end(WORKER_1)
        play.h1.end(WORKER_0)
        yield
        yield
        play.h2.begin(SERVER_1)
        yield

    assert play.run(script).status == "done"
    assert not play.h2.alive


def test_a_coordinator_that_is_given_up_is_called_so(play):
    def script(play):
        yield from begin(play)
        for _ in range(9):
            play.h1.end(COORDINATOR, -signal.SIGKILL)
            play.h1.begin(COORDINATOR)
            yield

    ending = play.run(script)
    assert ending.status == "failed"
    assert "the coordinator's process was ended by SIGKILL" in ending.cause["message"]


@pytest.mark.parametrize(
    ("given_up", "ended"),
    [
        ({"worker": WORKER_0}, [WORKER_0]),
        ({"node": 7, "rank": SERVER_1}, [SERVER_1]),
        ({"node": 7}, []),  # it may be either
        ({"worker": WORKER_1}, []),  # another has taken its place
    ],
)
def test_lost_hosts_silent_process_is_known_by_host_and_number(play, given_up, ended):
    def script(play):
        play.h1.begin()
        play.h2.begin()
        yield
        play.h1.events.on_started({WORKER_0: 500})
        play.h2.events.on_started({SERVER_1: 500})
        play.step()
        event = {"event": "given_up", "pid": 500, "silent_s": 61.0, **given_up}
        (play.folder / "servers.jsonl").write_text(json.dumps(event) + "\n")
        yield
        yield
        for rank in (WORKER_0, WORKER_1):
            (play.h1 if rank == WORKER_0 else play.h2).end(rank)
            yield

    assert play.run(script).status == "done"
    assert [*play.h1.signalled, *play.h2.signalled] == ended
