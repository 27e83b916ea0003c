"""What hosts answer before any rank starts: programs of this host stand for ssh."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time

import psutil
import pytest

from paceline.launch.seats import Seats
from paceline.run import fleet
from paceline.run.fleet import FleetOptions, HostError, open_posts

READY = json.dumps({"address": "10.0.0.1", "port": 7, "interface": "eth0"})
ANSWERS = f"print('Welcome!'); print('{{}}'); print('{READY}', flush=True); sys.stdin.read()"
IN_PIECES = f"sys.stdout.write('{READY[:9]}'); sys.stdout.flush(); time.sleep(0.3); print('{READY[9:]}', flush=True)"
REFUSES = f"""print('{json.dumps({"error": {"asked": "to run /f.py", "found": "no such file", "fix": "copy it"}})}')"""
ENDS = "sys.exit('ssh: Permission denied (publickey).')"
ENDS_MUTE = "sys.exit(255)"
HANGS = "time.sleep(600)"


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks hosts that do such things; gives the posts."""

    def command(host, _):
        return [sys.executable, "-c", f"import sys, time; sys.stdin.readline(); {does[host]}"]

    def asked(*programs):
        does.update({f"h{number}": program for number, program in enumerate(programs)})
        seats = [Seats(host, number, 1, number, len(does)) for number, host in enumerate(does)]
        posts = open_posts(seats, tmp_path / "f.py", tmp_path, FleetOptions())
        stations.extend(post.station for post in posts)
        return posts

    does, stations = {}, []
    monkeypatch.setattr(fleet, "agent_command", command)
    yield asked
    for station in stations:
        station.close(0.5)
    assert not list(tmp_path.iterdir())
    assert not [one for one in psutil.Process().children(recursive=True) if "sys.stdin" in str(one.cmdline())]


def test_all_answer(ask):
    posts = ask(ANSWERS, IN_PIECES)
    assert [post.station.host for post in posts] == ["h0", "h1"]
    assert {(post.meeting.master, post.meeting.interface) for post in posts} == {("10.0.0.1:7", "eth0")}


@pytest.mark.parametrize(
    ("programs", "hosts", "found"),
    [
        ((ANSWERS, REFUSES), ("h1",), "no such file"),
        ((ENDS, ANSWERS), ("h0",), "Permission denied"),
        ((ANSWERS, ENDS_MUTE), ("h1",), "the agent ended without a word"),
        ((ANSWERS, HANGS), ("h1",), "it has not answered for 2 s"),
        ((HANGS, ENDS, REFUSES), ("h0", "h1", "h2"), "it has not answered for 2 s; 2 more: h1, h2"),
    ],
)
def test_hosts_that_are_not_ready(ask, monkeypatch, programs, hosts, found):
    monkeypatch.setattr(fleet, "ANSWER_S", 2.0)
    with pytest.raises(HostError) as caught:
        ask(*programs)
    assert caught.value.hosts == hosts
    assert found in caught.value.found


def test_a_signal_while_hosts_are_asked(ask):
    class StopError(BaseException):
        pass

    def stop(*_):
        # What another thread reads can't be closed here: it would complain, or read what is opened next.
        readers.extend(set(threading.enumerate()) - threads)
        raise StopError

    threads, readers = set(threading.enumerate()), []
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        start = time.monotonic()
        with pytest.raises(StopError):
            ask(HANGS, HANGS)
        assert time.monotonic() - start < 20
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not readers
