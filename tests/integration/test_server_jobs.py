"""Whole jobs with parameter servers: real processes, killed and stopped at any moment, end where one process does."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from paceline.demo.corpus import VOCABULARY
from paceline.nouns.errors import PacelineError
from paceline.server.status import look
from paceline.server.transport.address import Address

from support.cluster import alone
from support.jobs import leftovers, losses, paceline, start, wait_for
from support.sample import COMPLETE
from support.server_jobs import SLOW, check_equal, saved

pytestmark = pytest.mark.integration

KILLS = int(os.environ.get("PACELINE_KILLS", "6"))
BERT = """
import sys
from pathlib import Path
from paceline.demo.demo_workload import make_workload
workload = make_workload(Path({folder!r}), 14, 8, deterministic=True, micro_batch_size=8 // int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    rows = np.random.default_rng(0).integers(5, VOCABULARY, (96, 32)).astype(np.uint16)  # whole batches
    np.save(folder / "train.npy", rows)
    np.save(folder / "held_out.npy", rows[:8])
    (folder / "corpus.json").write_text(json.dumps({"most_frequent_id": 5}))
    (folder / "bert.py").write_text(BERT.format(folder=str(folder)))
    return folder


@pytest.mark.parametrize("workers", [pytest.param(1, marks=COMPLETE), 2, pytest.param(4, marks=COMPLETE)])
def test_bert_ends_bit_for_bit_where_one_process_does(bert, workers):
    """14 steps of two epochs with AdamW, a schedule and clipping; the one process takes the same micro-batches.

    (One thread: torch's kernels share a sum out over their threads, with others one process does not equal itself.)
    """
    alone, one = f"alone{workers}", {"OMP_NUM_THREADS": "1"}
    assert paceline(bert, "run", "--job", alone, "bert.py", str(workers), **one).code == 0
    expected = saved(bert, alone)
    for servers in (1, 3):
        job = f"servers{workers}{servers}"
        plan = f"server={servers}"
        ended = paceline(bert, "run", "-n", str(workers), "--plan", plan, "--job", job, "bert.py", str(workers), **one)
        assert ended.code == 0, ended.err
        check_equal(saved(bert, job), expected)


def slow_job(folder, steps, *flags, plan="server=3", workers=2, pause="0.05"):
    (folder / "slow").touch()
    (folder / "slow.py").write_text(SLOW.format(steps=steps))
    words = ("-n", str(workers), "--plan", plan, "--job", "wild", *flags, "slow.py")
    return start(folder, "run", *words, TEST_PAUSE=pause)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """What an undisturbed job of so many steps ends with."""

    @functools.cache
    def ends_with(steps):
        folder = tmp_path_factory.mktemp("calm")
        (folder / "slow.py").write_text(SLOW.format(steps=steps))
        ended = paceline(folder, "run", "-n", "2", "--plan", "server=3", "--job", "calm", "slow.py")
        assert ended.code == 0, ended.err
        return saved(folder, "calm")

    return ends_with


def facts_of(folder, job="wild"):
    """What the servers of a running job say; None before they are there."""
    try:
        where = json.loads((folder / "runs" / job / "servers.json").read_text())["coordinator"]
        return asyncio.run(look(Address.parse(where)))
    except (OSError, PacelineError):
        return None


def is_whole(facts, workers=0):
    """Every range has its replicas, and so many workers are in and alive."""
    if facts is None or facts["state"] != "training":
        return False
    here = [one for one in facts["workers"] if one["is_in"] and one["silent_s"] < 2]
    return len(here) >= workers and all(chain["is_whole"] for chain in facts["chains"])


def members(process):
    """The processes of a job: workers, servers, coordinator."""
    (server,) = psutil.Process(process.pid).children()
    return server.children()


def pids_by_kind(process, facts):
    """The processes of a job by what they are."""
    servers = [node["pid"] for node in facts["nodes"]]
    others = {*servers, facts["pid"]}
    workers = [member.pid for member in members(process) if member.pid not in others]
    return {"worker": workers, "server": servers, "coordinator": [facts["pid"]]}


def test_any_process_killed_at_any_moment_changes_nothing(tmp_path, calm):
    """k = 2: one at a time, the next when every range is whole again and two more steps are done.

    The second of these has a gradient of every worker that was sent after the kill.

    (A process that is killed again and again before it has begun is given up: see run/supervise/supervise_servers.py.)
    """
    steps = 4 * KILLS + 40
    process, draws, kills = slow_job(tmp_path, steps, pause="0.3"), random.Random(0), 0
    kinds = ["worker", "server", "coordinator"]
    draws.shuffle(kinds)
    after = 0  # the step that must be done before the next kill
    while kills < KILLS:
        assert process.poll() is None, f"ended after {kills} kills: {process.communicate()}"
        time.sleep(draws.uniform(0.0, 0.5))
        step = max(losses(tmp_path / "runs" / "wild"), default=0)
        if steps - step < 2 * (KILLS - kills) + 20:
            (tmp_path / "slow").write_text("3")  # the job must not end before the last kill
        facts = facts_of(tmp_path)
        if step >= after and is_whole(facts, workers=2):
            after = step + 2
            pid = draws.choice(pids_by_kind(process, facts)[kinds[kills % len(kinds)]])
            os.kill(pid, signal.SIGKILL)
            assert wait_for(lambda pid=pid: not psutil.pid_exists(pid), 20)  # one that is dead can't be killed again
            kills += 1
    (tmp_path / "slow").unlink()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("another takes its place") + err.count("another takes its place") == KILLS
    assert wait_for(lambda: not leftovers(tmp_path))
    check_equal(saved(tmp_path, "wild"), calm(steps))


def told(folder, kind, job="wild"):
    """What the coordinator of a job has told, of one kind."""
    path = folder / "runs" / job / "servers.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def fewest_servers(folder):
    """The fewest servers of a range that an epoch of this job has had."""
    return min(len(chain) for event in told(folder, "epoch") for chain in event["chains"])


def result_of(folder, job="wild"):
    return json.loads((folder / "runs" / job / "result.json").read_text())


@pytest.mark.parametrize("who", ["server", "coordinator", "worker"])
def test_a_process_that_is_stopped_and_goes_on(tmp_path, calm, who):
    """Beyond the deadline: a server is fenced and comes back, a worker is waited for."""
    process = slow_job(tmp_path, 60, pause="0.5")
    assert wait_for(lambda: is_whole(facts_of(tmp_path), workers=2), 60)
    facts = facts_of(tmp_path)
    pids = {"coordinator": facts["pid"], "server": facts["nodes"][0]["pid"]}
    pid = pids.get(who) or members(process)[1].pid
    os.kill(pid, signal.SIGSTOP)
    if who == "coordinator":
        time.sleep(8)
    elif who == "server":  # the deadline follows the load of the machine
        assert wait_for(lambda: fewest_servers(tmp_path) == 1, 50)
    else:
        assert wait_for(lambda: told(tmp_path, "waiting"), 50)
    os.kill(pid, signal.SIGCONT)
    (tmp_path / "slow").unlink()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert fewest_servers(tmp_path) == (1 if who == "server" else 2)
    assert result_of(tmp_path)["left_out"] == {"gradients": 0, "of": 120}
    if who == "worker":
        assert "waits for worker 1, which has been silent for" in err
        assert "paceline: worker 1 is back after" in err
    check_equal(saved(tmp_path, "wild"), calm(60))


@pytest.mark.complete
def test_a_worker_that_is_stopped_for_good_is_replaced(tmp_path, calm, monkeypatch):
    monkeypatch.setenv("PACELINE_SILENCE_S", "7")
    process = slow_job(tmp_path, 60, pause="0.2")
    assert wait_for(lambda: is_whole(facts_of(tmp_path), workers=2), 60)
    os.kill(members(process)[1].pid, signal.SIGSTOP)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "paceline: worker 1 has been silent for" in err
    assert err.count("worker 1 was ended by SIGKILL; another takes its place") == 1
    assert result_of(tmp_path)["left_out"] == {"gradients": 0, "of": 120}
    assert wait_for(lambda: not leftovers(tmp_path))
    check_equal(saved(tmp_path, "wild"), calm(60))


@pytest.mark.complete
def test_quorum_job_continues_without_a_stopped_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_SILENCE_S", "1000")  # nobody takes its place
    process = slow_job(tmp_path, 300, plan="server=1,mode=quorum,quorum=2", workers=3)
    assert wait_for(lambda: is_whole(facts_of(tmp_path)), 60)
    os.kill(members(process)[2].pid, signal.SIGSTOP)
    began = time.monotonic()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert time.monotonic() - began < 150  # 300 steps of 0.05 s and more, not a deadline of 5 s for each
    last = result_of(tmp_path)
    assert (last["status"], last["steps"]) == ("done", 300)
    missing = last["left_out"]["gradients"]
    assert (200 < missing <= 300, last["left_out"]["of"]) == (True, 900)
    assert f"mode=quorum left out {missing} of 900 gradients" in err
    assert "worker 2 is silent or lost; the others go on without it" in err


@pytest.mark.parametrize("mode", ["mode=quorum,quorum=1", "mode=async"])
def test_a_job_is_not_done_before_worker_0_has_saved(tmp_path, monkeypatch, mode):
    """The others are at the end without it; another in its place saves what they have trained."""
    monkeypatch.setenv("PACELINE_SILENCE_S", "10")
    process = slow_job(tmp_path, 60, plan=f"server=2,{mode}", pause="0.1")
    assert wait_for(lambda: is_whole(facts_of(tmp_path), workers=2), 60)
    os.kill(members(process)[0].pid, signal.SIGSTOP)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("worker 0 was ended by SIGKILL; another takes its place") == 1
    last = result_of(tmp_path)
    assert (last["status"], last["steps"]) == ("done", 60)
    assert last["checkpoint"].endswith("step-00000060")
    missing = last["left_out"]["gradients"]
    assert f"left out {missing} of 120 gradients" in err
    if "quorum" in mode:  # under async another in worker 0's place may make up for all that was missing
        assert missing > 0
    assert wait_for(lambda: not leftovers(tmp_path))


@COMPLETE
def test_kills_and_stops_at_random_moments():
    """A few of the trials of benchmarks/trials/server_faults.py."""
    script = Path(__file__).parents[2] / "benchmarks" / "trials" / "server_faults.py"
    done = subprocess.run(
        [sys.executable, str(script), "--count", "4", "--seed", "7"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "4 trials, 0 wrong"


def test_server_job_that_lost_a_range_resumes_from_checkpoint(tmp_path, calm):
    process = slow_job(tmp_path, 60, "--checkpoint-every", "20", plan="server=1", pause="0.2")
    job = tmp_path / "runs" / "wild"
    assert wait_for(lambda: list((job / "checkpoints").glob("step-*")), 90)
    os.kill(facts_of(tmp_path)["nodes"][0]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "the server that had it has ended" in err
    (tmp_path / "slow").unlink()
    plan = ("-n", "2", "--plan", "server=1")
    ended = paceline(tmp_path, "run", *plan, "--resume", "--job", "wild", "slow.py", TEST_PAUSE="0")
    assert ended.code == 0, ended.err
    check_equal(saved(tmp_path, "wild"), calm(60))


TLS_WORKER = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.cluster import gradient, small_model
from support.sample import COMPLETE
from paceline.server.handle import connect
model = small_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
where, worker, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
handle = connect(where, worker, model, optimizer, 5, is_deterministic=True, credentials=folder)
while not handle.is_done:
    gradient(model, worker, handle.clock)
    handle.push(1.0, 2.0)
handle.close()
torch.save([p.detach() for p in model.parameters()], sys.argv[4])
"""


def test_servers_started_alone_over_mutual_tls(tmp_path):
    """The commands of docs/parameter-server.md, over TCP."""
    assert paceline(tmp_path, "server", "credentials", "creds").code == 0
    plan = ("--plan", "replicate=2,server=2", "--log", "log", "--credentials", "creds/coordinator")
    coordinator = start(tmp_path, "server", "coordinate", "--listen", "127.0.0.1:0", *plan)
    where = json.loads(coordinator.stdout.readline())["at"]
    serve = ("server", "serve", "--listen", "127.0.0.1:0", "--coordinator", where, "--credentials", "creds/server")
    servers = [start(tmp_path, *serve) for _ in range(2)]
    (tmp_path / "worker.py").write_text(TLS_WORKER.format(tests=str(Path(__file__).parents[1])))
    workers = [
        subprocess.Popen([sys.executable, "worker.py", where, str(n), "creds/worker", f"out{n}"], cwd=tmp_path)
        for n in range(2)
    ]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    assert coordinator.wait(20) == 0
    for server in servers:
        server.kill()
        server.communicate()
    coordinator.communicate()
    expected = alone(2, 5, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    for number in range(2):
        own = torch.load(tmp_path / f"out{number}", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


BLOCKS = """
import torch, paceline

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

    def forward(self, x):
        gain = 1.125 if torch.compiler.is_compiling() else 1.0  # shows in the losses
        return x + gain * self.down(torch.relu(self.up(x)))

torch.manual_seed(0)
workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(*[Block() for _ in range(4)], torch.nn.Linear(256, 16)),
    loss=lambda model, batch: ((model(batch) - 1).square().sum(), len(batch)),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    data=torch.randn(64, 256),
    batch_size=16,
    steps=4,
)
"""


@pytest.mark.parametrize("option", ["compile=blocks", pytest.param("float8=rowwise", marks=COMPLETE)])
def test_options_of_the_model_go_with_servers(tmp_path, option):
    """Workers compute as ranks of replicate do."""
    if option.startswith("float8"):
        pytest.importorskip("torchao")
    (tmp_path / "blocks.py").write_text(BLOCKS)
    plans = {"plain": "server=1", "servers": f"server=1,{option}", "replicas": f"replicate=2,{option}"}
    for job, plan in plans.items():
        ended = paceline(tmp_path, "run", "-n", "2", "--plan", plan, "--job", job, "blocks.py")
        assert ended.code == 0, ended.err
    plain, servers, replicas = (losses(tmp_path / "runs" / job) for job in plans)
    assert len(servers) == 4
    assert servers == pytest.approx(replicas, rel=1e-5)
    assert servers != plain
