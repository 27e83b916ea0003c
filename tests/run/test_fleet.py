"""What hosts answer before any rank starts: programs of this host stand for ssh."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from paceline.launch.local import RankSettings
from paceline.launch.rank_assignment import HostRanks, with_servers
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.run.supervise import host_agents as fleet
from paceline.run.supervise.host_agents import FleetOptions, HostError, agent_request, open_posts
from paceline.server.transport.credentials import check_can_make, keep_credentials

READY = json.dumps({"address": "10.0.0.1", "port": 7, "interface": "eth0"})
ANSWERS = f"print('Welcome!'); print('{{}}'); print('{READY}', flush=True); sys.stdin.read()"
IN_PIECES = f"sys.stdout.write('{READY[:9]}'); sys.stdout.flush(); time.sleep(0.3); print('{READY[9:]}', flush=True)"
REFUSES = f"""print('{json.dumps({"error": {"asked": "to run /f.py", "found": "no such file", "fix": "copy it"}})}')"""
ENDS = "sys.exit('ssh: Permission denied (publickey).')"
ENDS_MUTE = "sys.exit(255)"
HANGS = "time.sleep(600)"


def is_asked(process):
    """True for a process of a host that is asked; one that has ended has no command line any more."""
    try:
        return "sys.stdin" in str(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return False


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks hosts that do such things; gives the posts."""

    def command(host, _):
        return [sys.executable, "-c", f"import sys, time; sys.stdin.readline(); {does[host]}"]

    def asked(*programs):
        does.update({f"h{number}": program for number, program in enumerate(programs)})
        host_ranks = [HostRanks(host, number, 1, number, len(does)) for number, host in enumerate(does)]
        assignments = open_posts(host_ranks, tmp_path / "f.py", tmp_path, FleetOptions())
        backends.extend(assignment.backend for assignment in assignments)
        return assignments

    does, backends = {}, []
    monkeypatch.setattr(fleet, "agent_command", command)
    yield asked
    for backend in backends:
        backend.close(0.5)
    assert not list(tmp_path.iterdir())
    assert not [one for one in psutil.Process().children(recursive=True) if is_asked(one)]


def test_all_answer(ask):
    assignments = ask(ANSWERS, IN_PIECES)
    assert [assignment.backend.host for assignment in assignments] == ["h0", "h1"]
    assert {(assignment.rendezvous.master, assignment.rendezvous.interface) for assignment in assignments} == {
        ("10.0.0.1:7", "eth0")
    }


@pytest.mark.parametrize(
    ("programs", "hosts", "found"),
    [
        ((ANSWERS, REFUSES), ("h1",), "no such file"),
        ((ENDS, ANSWERS), ("h0",), "Permission denied"),
        ((ANSWERS, ENDS_MUTE), ("h1",), "the agent ended without a message"),
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


def test_a_job_without_servers_touches_no_credentials(ask, tmp_path):
    """They may be somebody's own, in the run directory."""
    (kept := tmp_path / "credentials").mkdir()
    with pytest.raises(HostError):
        ask(ENDS)
    kept.rmdir()


def test_a_host_gets_the_certificates_of_what_it_has(monkeypatch, tmp_path):
    def command(host, _):
        keep = f"open({str(tmp_path / host)!r}, 'w').write(sys.stdin.read())"
        return [sys.executable, "-c", f"import sys; sys.stdin.readline(); print('{READY}', flush=True); {keep}"]

    monkeypatch.setattr(fleet, "agent_command", command)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    host_ranks = with_servers([HostRanks(f"h{number}", number, 1, number, 3) for number in range(3)], 2)
    assignments = open_posts(host_ranks, tmp_path / "f.py", run_dir, FleetOptions())
    for assignment in assignments:
        settings = RankSettings(
            "f.py", [], 3, assignment.host_ranks, assignment.rendezvous, str(run_dir), None, [], 2, ""
        )
        assignment.backend.start(settings)
        assignment.backend.close()
    assert {(assignment.rendezvous.coordinator, assignment.rendezvous.master) for assignment in assignments} == {
        ("10.0.0.1:7", "")
    }
    told = {host: (tmp_path / host).read_text().splitlines() for host in ("h0", "h1", "h2")}
    given = {host: json.loads(lines[0])["credentials"] for host, lines in told.items()}
    roles = {host: set(own) for host, own in given.items()}
    assert roles == {"h0": {"worker", "server", "coordinator"}, "h1": {"worker", "server"}, "h2": {"worker"}}
    (kept,) = (run_dir / "credentials").iterdir()
    assert kept.name == "watcher"
    assert {(file.name, file.stat().st_mode & 0o777) for file in kept.iterdir()} == {
        ("authority.pem", 0o600), ("certificate.pem", 0o600), ("key.pem", 0o600),
    }  # fmt: skip
    own = tmp_path / "private"
    own.mkdir()
    keep_credentials(own, given["h2"])
    assert (own / "credentials" / "worker" / "key.pem").read_text() == given["h2"]["worker"]["key.pem"]
    with pytest.raises(UsageError, match="no such role"):
        keep_credentials(own, {"../../../x": given["h2"]["worker"]})
    fleet.end_watch(run_dir)
    assert not list(run_dir.iterdir())


def test_agents_of_a_job_with_servers_end_with_the_supervisor(monkeypatch, tmp_path):
    """Their fork server waits for the word that nobody will be started again: the agent must say it, too."""

    def command(host, _):
        return ["env", f"TMPDIR={tmp_path / host}", sys.executable, "-m", "paceline.run.supervise.agent"]

    monkeypatch.setattr(fleet, "agent_command", command)
    (run_dir := tmp_path / "run").mkdir()
    Plan.parse("server=1").write(run_dir / "plan.json")
    (script := tmp_path / "f.py").write_text("import time\ntime.sleep(600)\n")
    host_ranks = with_servers([HostRanks("127.0.0.1", 0, 1, 0, 1)], 1)
    (tmp_path / "127.0.0.1").mkdir()
    (assignment,) = open_posts(host_ranks, script, run_dir, FleetOptions())
    settings = RankSettings(
        str(script), [], 1, assignment.host_ranks, assignment.rendezvous, str(run_dir), None, [], 1, ""
    )
    assignment.backend.start(settings)
    with assignment.backend.process as agent:
        said = []
        while not any(b'{"started"' in line for line in said):
            said.append(agent.stdout.readline())
            assert said[-1], (said, agent.stderr.read())
        everybody = psutil.Process(agent.pid).children(recursive=True)
        assert len(everybody) == 4, said  # the fork server and its three
        assert list((tmp_path / "127.0.0.1").glob("paceline-*/credentials"))
        agent.stdin.close()
        try:
            assert agent.wait(20) == 0
        finally:
            agent.kill()
    assert not psutil.wait_procs(everybody, 5)[1]
    assert not list((tmp_path / "127.0.0.1").iterdir())


def test_without_the_library_there_are_no_certificates(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="cryptography is not installed"):
        check_can_make()


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


def test_a_host_counts_silence_as_this_one_does(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_SILENCE_S", "600")
    request = agent_request([HostRanks("h", 0, 1, 0, 1)], 0, Path("train.py"), tmp_path, FleetOptions())
    assert request["environment"]["PACELINE_SILENCE_S"] == "600"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG"])
def test_what_torch_reads_goes_to_other_hosts(monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    request = agent_request([HostRanks("h", 0, 1, 0, 1)], 0, Path("train.py"), tmp_path, FleetOptions())
    assert request["environment"][name] == "expandable_segments:True"
