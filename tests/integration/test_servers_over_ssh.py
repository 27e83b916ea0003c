"""Parameter servers and workers on several hosts over ssh: the same bits as on one, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support import namespaces
from support.jobs import command, leftovers, losses, marked, paceline, wait_for
from support.server_jobs import SLOW, check_equal, saved

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not namespaces.can_make(), reason=namespaces.WHY_NOT),
]
PLAN = ("-H", "h1:1,h2:1", "--plan", "replicate=2,server=2")
STEPS = 60


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with namespaces.hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What a job on one host ends with."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "slow.py").write_text(SLOW.format(steps=STEPS))
    plan = ("-n", "2", "--plan", "server=2")
    ended = paceline(folder, "run", *plan, "--job", "calm", "slow.py", TEST_PAUSE="0", OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    return saved(folder, "calm")


@pytest.fixture(autouse=True)
def nothing_stays():
    """The hosts' private folders, with keys in them."""
    before = keys()
    yield
    assert wait_for(lambda: keys() <= before, 40), keys() - before


def keys():
    return set(Path("/tmp").glob("paceline-*/credentials"))  # where sshd's sessions have theirs


def line(hosts, *words):
    return command("run", "--on", "ssh", "--cluster", hosts.cluster_file(), *words)


@contextlib.contextmanager
def started(folder, hosts, *words, pause="0.5"):
    """A job that takes its time as long as there is a file `slow`."""
    (folder / "slow").touch()
    (folder / "slow.py").write_text(SLOW.format(steps=STEPS))
    named = ("--job", "wild", "-x", "TEST_PAUSE", "-x", "OMP_NUM_THREADS=1", *words, "slow.py")
    process = subprocess.Popen(
        hosts.inside("from", *line(hosts, *named)),
        cwd=folder,
        env=marked(folder, {"TEST_PAUSE": pause}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def top(folder, hosts):
    """What `paceline server top` says of the running job; None: nothing yet."""
    words = hosts.inside("from", *command("server", "top", "runs/wild", "--json"))
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def is_whole(folder, hosts, workers=2):
    facts = top(folder, hosts)
    if facts is None or facts["state"] != "training" or len(facts["nodes"]) < 2:
        return False
    here = [one for one in facts["workers"] if one["is_in"] and one["silent_s"] < 2]
    return len(here) >= workers and all(chain["is_whole"] for chain in facts["chains"])


def processes(hosts, name):
    """The job's processes on a host by what they are: the fork server's children in the order of their start."""
    agents = set(hosts.pids(name, "paceline.run.supervise.agent"))
    (server,) = [
        pid for pid in hosts.pids(name, "paceline.run.rank.forkserver") if psutil.Process(pid).ppid() in agents
    ]
    return [child.pid for child in psutil.Process(server).children()]


def test_they_end_where_a_job_on_one_host_does(tmp_path, hosts, expected):
    with started(tmp_path, hosts, *PLAN, pause="0") as job:
        out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    assert (tmp_path / "runs/wild/servers.json").is_file()
    assert not (tmp_path / "runs/wild/credentials").exists()
    ended = subprocess.run(
        hosts.inside("from", *command("server", "top", "runs/wild")), cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, "it has ended" in ended.stderr) == (2, True), ended
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)
    check_equal(saved(tmp_path, "wild"), expected)


@pytest.mark.parametrize(
    ("host", "number", "name"), [("h2", 0, "worker 1"), ("h2", 1, "server 1"), ("h1", 2, "the coordinator")]
)
def test_a_process_that_is_killed_is_replaced(tmp_path, hosts, expected, host, number, name):
    with started(tmp_path, hosts, *PLAN) as job:
        assert wait_for(lambda: is_whole(tmp_path, hosts), 60)
        os.kill(processes(hosts, host)[number], signal.SIGKILL)
        time.sleep(1.0)
        assert wait_for(lambda: is_whole(tmp_path, hosts), 60)
        (tmp_path / "slow").unlink()
        out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    assert f"paceline: {name}" in out
    assert out.count("another takes its place") == 1
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)
    check_equal(saved(tmp_path, "wild"), expected)


@pytest.mark.complete  # a stop with servers: tests/run/test_jobs.py; a resume: tests/server/test_whole_jobs.py
def test_a_stop_saves_and_goes_on(tmp_path, hosts, expected):
    with started(tmp_path, hosts, *PLAN) as job:
        assert wait_for(lambda: len(losses(tmp_path / "runs/wild")) > 3, 60)
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 130, out
    assert len(losses(tmp_path / "runs/wild")) < STEPS
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)
    with started(tmp_path, hosts, *PLAN, "--resume", pause="0") as job:
        out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    check_equal(saved(tmp_path, "wild"), expected)


def test_servers_over_ssh_continue_without_a_host_under_quorum(tmp_path):
    """The one that is cut off had a worker and a server; each range has a replica elsewhere."""
    plan = ("-H", "h1:1,h2:1", "--plan", "replicate=2,server=2,mode=quorum,quorum=1")
    with namespaces.hosts(tmp_path / "hosts") as hosts, started(tmp_path, hosts, *plan, pause="0.3") as job:
        assert wait_for(lambda: is_whole(tmp_path, hosts), 60)
        assert len(losses(tmp_path / "runs/wild")) < STEPS // 2
        assert keys()
        hosts.cut("h2")
        out, _ = job.communicate(timeout=200)
        assert wait_for(hosts.has_nothing_of_paceline, 40)  # its own end, without a word from anybody
    assert job.returncode == 0, out
    assert "h2 is lost; the others go on without worker 1, server 1" in out
    result = json.loads((tmp_path / "runs/wild/result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", STEPS)
    assert 0 < result["left_out"]["gradients"] < result["left_out"]["of"] == 2 * STEPS
    assert f"mode=quorum left out {result['left_out']['gradients']} of {2 * STEPS} gradients" in out


@pytest.mark.complete
def test_servers_over_ssh_end_with_a_sync_worker_host_and_resume(tmp_path, expected):
    """Without its samples nobody goes on."""
    every = ("--checkpoint-every", "5")
    with namespaces.hosts(tmp_path / "hosts") as hosts, started(tmp_path, hosts, *PLAN, *every, pause="0.5") as job:
        assert wait_for(lambda: list((tmp_path / "runs/wild/checkpoints").glob("step-*")), 60)
        hosts.cut("h2")
        out, _ = job.communicate(timeout=100)
        assert wait_for(hosts.has_nothing_of_paceline, 40)
    assert job.returncode == 1, out
    assert "go on with --resume --job wild" in out
    assert "the others go on" not in out
    assert len(losses(tmp_path / "runs/wild")) < STEPS
    with namespaces.hosts(tmp_path / "more") as hosts:
        with started(tmp_path, hosts, *PLAN, "--resume", pause="0") as job:
            out, _ = job.communicate(timeout=120)
        assert job.returncode == 0, out
    check_equal(saved(tmp_path, "wild"), expected)


@pytest.mark.complete
def test_servers_over_ssh_end_with_coordinator_host_and_resume(tmp_path):
    """Until its agent knows, the host that is cut off takes the other for dead, and may go on by itself."""
    with namespaces.hosts(tmp_path / "hosts") as hosts:
        with started(tmp_path, hosts, *PLAN, "--checkpoint-every", "5", pause="0.5") as job:
            assert wait_for(lambda: list((tmp_path / "runs/wild/checkpoints").glob("step-*")), 60)
            hosts.cut("h1")
            out, _ = job.communicate(timeout=100)
        assert job.returncode == 1, out
        assert "h1" in out
        assert "go on with --resume --job wild" in out
        assert hosts.has_nothing_of_paceline()  # it has waited for that
        assert len(losses(tmp_path / "runs/wild")) < STEPS
    with namespaces.hosts(tmp_path / "more") as hosts:
        with started(tmp_path, hosts, *PLAN, "--resume", pause="0") as job:
            out, _ = job.communicate(timeout=120)
        assert job.returncode == 0, out
    result = json.loads((tmp_path / "runs/wild/result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", STEPS)


@pytest.mark.complete  # a host that is lost: the test above
def test_a_host_that_is_lost_before_the_first_step_ends_the_job(tmp_path):
    """Nobody comes in its worker's place, and servers begin when all are there."""
    with namespaces.hosts(tmp_path / "hosts") as hosts, started(tmp_path, hosts, *PLAN) as job:
        (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(8)\n{SLOW.format(steps=STEPS)}")
        assert wait_for(lambda: hosts.pids("h2", "paceline.run.rank.forkserver"), 60)
        hosts.cut("h2")
        out, _ = job.communicate(timeout=100)
        assert wait_for(hosts.has_nothing_of_paceline, 40)
    assert job.returncode == 1, out
    assert "(h2)" in out or "h2 " in out, out
    assert "the others go on" not in out
    assert not losses(tmp_path / "runs/wild")


def test_the_supervisors_sudden_death_leaves_nothing(tmp_path, hosts):
    with started(tmp_path, hosts, *PLAN) as job:
        assert wait_for(lambda: is_whole(tmp_path, hosts), 60)
        assert keys()
        job.kill()
        assert wait_for(hosts.has_nothing_of_paceline, 20)
    assert wait_for(lambda: not leftovers(tmp_path)), leftovers(tmp_path)


ASK = """
import json, socket, ssl, sys
found = {}
for name in sys.argv[1:]:
    host, _, port = name.rpartition(":")
    plain = socket.create_connection((host, int(port)), 5)
    plain.sendall(bytes(64))
    plain.settimeout(5)
    try:
        said = plain.recv(64)
    except OSError:
        said = b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(socket.create_connection((host, int(port)), 5)) as end:
            end.sendall(bytes(64))
            answer = end.recv(64)
    except (ssl.SSLError, ConnectionError) as error:
        answer = b""
    found[name] = [said.hex(), answer.hex()]
print(json.dumps(found))
"""


def test_nobody_without_a_certificate_is_answered(tmp_path, hosts):
    with started(tmp_path, hosts, *PLAN) as job:
        assert wait_for(lambda: is_whole(tmp_path, hosts), 60)
        facts = top(tmp_path, hosts)
        where = json.loads((tmp_path / "runs/wild/servers.json").read_text())["coordinator"]
        at = [where, *facts["servers"].values()]
        assert sorted({one.rpartition(":")[0] for one in at}) == [hosts.address("h1"), hosts.address("h2")]
        done = subprocess.run(hosts.inside("from", sys.executable, "-c", ASK, *at), capture_output=True, text=True)
        assert wait_for(lambda: is_whole(tmp_path, hosts), 20)  # and nobody was disturbed
        listening = {one for name in hosts.names for one in hosts.listening(name)}
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
    answers = json.loads(done.stdout)
    assert len(answers) == 3
    # To plain bytes a TLS alert and nothing more, to a handshake without a certificate the end.
    assert all(said in ("",) or said.startswith("15") for said, _ in answers.values()), answers
    assert not any(answer for _, answer in answers.values()), answers
    assert listening == {*at, *(f"{hosts.address(name)}:22" for name in hosts.names)}
