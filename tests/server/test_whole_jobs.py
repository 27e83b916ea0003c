"""A whole job with servers by its commands: what it trains, sends, saves and says."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from support.jobs import LOOP, STEPS, events, losses, paceline, write_workload

pytestmark = pytest.mark.slow


def test_a_job_with_servers_trains_as_one_without(tmp_path):
    """A model smaller than one server's part, as README's: the second server keeps a copy."""
    file = write_workload(tmp_path)
    plain = paceline(tmp_path, "run", "-n", "2", "--job", "plain", file)
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=2", "--job", "servers", "--json", file)
    assert (plain.code, ended.code) == (0, 0), ended.err
    assert "of 2 servers 1 takes gradients, 1 keeps a copy" in ended.err
    first, second = losses(tmp_path / "runs" / "plain"), losses(tmp_path / "runs" / "servers")
    assert list(second) == list(range(1, STEPS + 1))
    assert second == pytest.approx(first, rel=1e-9)
    planned = json.loads(paceline(tmp_path, "plan", "-n", "2", "--plan", "server=2", "--json", file).out)
    (end,) = events(tmp_path / "runs" / "servers", "end")
    counted = {(row["collective"], row["axis"]): (row["calls"], row["bytes"]) for row in end["ledger"]}
    expected = {
        (row["collective"], row["axis"]): (row["calls"] * STEPS, row["payload_bytes"] * STEPS)
        for row in planned["traffic"]
    }
    assert counted == expected
    assert set(counted) == {("push", "server"), ("pull", "server")}


def test_a_checkpoint_goes_from_servers_to_ranks_and_back(tmp_path):
    file = write_workload(tmp_path)
    whole = paceline(tmp_path, "run", "-n", "2", "--job", "whole", file)
    assert whole.code == 0
    stop = "    if job and job.step_number == {step} and job.model.training: raise KeyError('stop')\n"
    broken = write_workload(tmp_path, stop.format(step=7), name="tiny.py")
    every = ("--checkpoint-every", "3", "--job", "a")
    assert paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", *every, broken).code == 1
    broken = write_workload(tmp_path, stop.format(step=14), name="tiny.py")
    assert paceline(tmp_path, "run", "-n", "2", "--resume", *every, broken).code == 1
    file = write_workload(tmp_path, name="tiny.py")
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", "--resume", "--job", "a", file)
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "runs" / "a") == pytest.approx(losses(tmp_path / "runs" / "whole"), rel=1e-9)


def test_where_forking_is_unsafe_servers_are_fresh_interpreters(tmp_path, monkeypatch):
    from paceline.cli.main import main

    file = write_workload(tmp_path)
    monkeypatch.setattr("paceline.launch.local.can_fork", lambda: False)
    words = ("run", "-n", "2", "--plan", "server=1", "--runs", str(tmp_path / "runs"), "--job", "a", str(file))
    with tempfile.TemporaryDirectory(prefix="pl-", dir="/tmp") as folder:  # a short name: sockets are in it
        monkeypatch.setattr("tempfile.tempdir", folder)
        assert main([*words]) == 0
        assert not list(Path(folder).iterdir())
    assert len(losses(tmp_path / "runs" / "a")) == STEPS


def test_collectives_between_workers_are_refused(tmp_path):
    hook = "    if job: paceline.all_reduce(torch.ones(1))\n"
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", write_workload(tmp_path, hook))
    assert ended.code == 2
    assert "use a plan without server" in ended.err


def test_a_disk_that_is_full_at_a_checkpoint_ends_nothing(tmp_path):
    """Servers have nothing on a disk; worker 0's checkpoint fails, is told, and training goes on."""
    full = "    if job and job.rank == 0 and job.step_number == 2:\n        import resource\n"
    full += "        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 2**40))\n"
    clear = "    if job and job.rank == 0 and job.step_number == 8:\n        import resource\n"
    clear += "        resource.setrlimit(resource.RLIMIT_FSIZE, (2**40, 2**40))\n"
    file = write_workload(tmp_path, full + clear)
    plan = ("-n", "2", "--plan", "server=1", "--checkpoint-every", "5")
    ended = paceline(tmp_path, "run", *plan, "--job", "a", file)
    assert ended.code == 0, ended.err
    assert "checkpoint" in ended.out
    assert "File too large" in ended.out
    kept = sorted(path.name for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (10, 15, 20)]


DIES = """
from paceline.train.server_steps import ServerSteps
plain = ServerSteps.end_step
def end_step(self, batch):
    job = self.job
    if job.rank == 0 and job.step_number == 6 and "PACELINE_TAKES_OVER" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)  # the servers have the step, and nobody has written its line
    return plain(self, batch)
ServerSteps.end_step = end_step
"""


def test_server_job_writes_the_step_in_which_worker_0_dies(tmp_path):
    plan = ("-n", "2", "--plan", "server=2", "--checkpoint-every", "7")
    calm = paceline(tmp_path, "run", *plan, "--job", "calm", write_workload(tmp_path))
    file = write_workload(tmp_path, loop=DIES + LOOP, name="dies.py")
    ended = paceline(tmp_path, "run", *plan, "--job", "a", file)
    assert (calm.code, ended.code) == (0, 0), ended.err
    assert "worker 0 was ended by SIGKILL; another takes its place" in ended.err
    ours, theirs = (events(tmp_path / "runs" / job, "step") for job in ("a", "calm"))
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for name in ("loss", "weight", "position", "samples", "gradient_norm"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    kept = [sorted(path.name for path in (tmp_path / "runs" / job / "checkpoints").iterdir()) for job in ("a", "calm")]
    assert kept[0] == kept[1]
    assert json.loads((tmp_path / "runs/a/result.json").read_text())["left_out"] == {"gradients": 0, "of": 2 * STEPS}


def test_server_job_replaces_a_worker_stopped_before_connecting(tmp_path):
    stop = "if os.environ['PACELINE_RANK'] == '1' and not os.path.exists('was_stopped'):\n"
    stop += "    open('was_stopped', 'w').close()\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    file = write_workload(tmp_path)
    file.write_text(f"import os, signal\n{stop}{file.read_text()}")
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", "--job", "a", file, PACELINE_SILENCE_S="5")
    assert ended.code == 0, ended.err
    assert "worker 1 has been silent for" in ended.err
    assert len(losses(tmp_path / "runs" / "a")) == STEPS


OWN_BATCHES = """
import os, signal
import torch, paceline

def loss(model, batch):
    return (model(batch) - 1).square().sum(), len(batch)

workload = paceline.Workload(
    model=lambda: torch.nn.Linear(4, 1),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    data=None,
    steps=int(os.environ["STEPS"]),
)
job = paceline.distribute(workload)
while job.step_number < job.total_steps:
    batch = torch.randn(8, 4)
    print("draws", job.step_number + 1, repr(float(batch.sum())), flush=True)
    job.step(batch)
    if job.rank == 1 and job.step_number == 3 and os.environ.get("MARK") and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def drawn(ended, rank=0):
    """What a rank drew for each step."""
    assert ended.code == 0, ended.err
    return dict(re.findall(rf"^\[{rank}\] draws (\d+) (\S+)$", ended.out, re.MULTILINE))


def test_server_job_own_batches_are_the_same_after_a_resume(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_BATCHES)
    plan = ("-n", "2", "--plan", "server=1,mode=async")
    whole = drawn(paceline(tmp_path, "run", *plan, file, STEPS="5"))
    assert len({*whole.values()}) == 5
    first = drawn(paceline(tmp_path, "run", *plan, "--job", "a", file, STEPS="3"))
    then = drawn(paceline(tmp_path, "run", *plan, "--job", "a", "--resume", file, STEPS="5"))
    assert sorted(then) == ["4", "5"]
    assert {**first, **then} == whole


@pytest.mark.parametrize("mode", ["stale,staleness=2", "async"])
def test_server_job_own_batches_continue_after_a_lost_worker(tmp_path, mode):
    """It learns its step before its loop begins, also where none is left."""
    file = tmp_path / "own.py"
    file.write_text(OWN_BATCHES)
    plan = ("-n", "2", "--plan", f"server=1,mode={mode}", "--job", "a")
    ended = paceline(tmp_path, "run", *plan, file, STEPS="6", MARK=str(tmp_path / "mark"))
    assert ended.code == 0, ended.err
    assert "another takes its place" in ended.err
    assert json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["steps"] == 6
