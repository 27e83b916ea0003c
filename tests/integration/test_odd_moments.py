"""Hosts over ssh when something happens at an odd moment: at the start, at the end, while others save."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from support import namespaces
from support.jobs import STEPS, command, leftovers, losses, marked, wait_for, write_workload

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not namespaces.can_make(), reason=namespaces.WHY_NOT),
]
SLOW_END = """
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        time.sleep(float(os.environ.get("TEST_PAUSE", "0")))
    if job.rank == 0:
        time.sleep(4)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with namespaces.hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@contextlib.contextmanager
def started(folder, hosts, *words, options=(), **environment):
    line = ["run", "--on", "ssh", "--cluster", hosts.cluster_file(*options), "--job", "a", "-x", "TEST_PAUSE"]
    env = marked(folder, {"TEST_PAUSE": "0", **environment})
    process = subprocess.Popen(
        hosts.inside("from", *command(*line, *words)),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_first_host_to_finish_does_not_end_the_others(tmp_path, hosts):
    file = write_workload(tmp_path, loop=SLOW_END)
    with started(tmp_path, hosts, "-H", "h1:1,h2:1", file) as job:
        out, _ = job.communicate(timeout=90)
    assert job.returncode == 0, out
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", STEPS)
    assert (tmp_path / "runs/a/checkpoints" / f"step-{STEPS:08d}").is_dir()


def test_a_supervisor_that_dies_while_hosts_import(tmp_path, hosts):
    with started(tmp_path, hosts, "-H", "h1:1,h2:1", write_workload(tmp_path), TEST_PAUSE="1") as job:
        assert wait_for(lambda: hosts.pids("h2", "paceline.run.rank.forkserver"), 60)
        job.kill()
        assert wait_for(hosts.has_nothing_of_paceline, 20)
    assert not losses(tmp_path / "runs" / "a")
    assert wait_for(lambda: not leftovers(tmp_path), 10)


@pytest.mark.parametrize("moment", ["fork server", "first step"])
def test_a_stop_in_the_first_seconds(tmp_path, hosts, moment):
    with started(tmp_path, hosts, "-H", "h1:1,h2:1", write_workload(tmp_path), TEST_PAUSE="1") as job:
        assert wait_for(lambda: hosts.pids("h2", "paceline.run.rank.forkserver"), 60)
        if moment == "first step":
            assert wait_for(lambda: losses(tmp_path / "runs" / "a"), 60)
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=25)
    assert job.returncode == 130, out
    assert len(losses(tmp_path / "runs" / "a")) < STEPS
    assert wait_for(hosts.has_nothing_of_paceline, 10)


def test_ctrl_c_while_hosts_are_asked(tmp_path, hosts):
    file = write_workload(tmp_path)
    with started(tmp_path, hosts, "-H", "h1:1,h2:1", file, options=["-oProxyCommand=sleep 60"]) as job:
        assert wait_for(lambda: "ssh" in [one.name() for one in psutil.Process(job.pid).children()], 60)
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=45)  # ssh would be there for 60
    assert job.returncode == 143, out
    assert "Traceback" not in out
    assert not list((tmp_path / "runs" / "a").glob(".token*"))


def discovery(folder):
    """A program that prints the file of hosts that are known."""
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\ncat {folder}/known\n")
    script.chmod(0o755)
    return script


def test_ctrl_c_during_a_change_of_hosts_saves_and_stops(tmp_path, hosts):
    (tmp_path / "known").write_text("h1:1\n")
    words = ["--host-discovery-script", discovery(tmp_path), "--max-hosts", "2", write_workload(tmp_path)]
    with started(tmp_path, hosts, *words, TEST_PAUSE="3") as job:
        assert wait_for(lambda: losses(tmp_path / "runs" / "a"), 60)
        (tmp_path / "known").write_text("h1:1\nh2:1\n")
        time.sleep(1.8)  # it has been seen, and the step of three seconds is under way
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=40)
    assert job.returncode == 130, out
    assert "generation 2" not in out
    steps = max(losses(tmp_path / "runs" / "a"))
    assert (tmp_path / "runs/a/checkpoints" / f"step-{steps:08d}").is_dir()


@pytest.mark.parametrize("wait_s", [3, 30])  # within a lost host's lease, and after it
def test_a_stop_while_too_few_hosts_are_left_writes_a_result(tmp_path, hosts, wait_s):
    (tmp_path / "known").write_text("h1:1\nh2:1\n")
    words = ["--host-discovery-script", discovery(tmp_path), "--min-hosts", "2", write_workload(tmp_path)]
    with started(tmp_path, hosts, *words, TEST_PAUSE="0.5") as job:
        assert wait_for(lambda: losses(tmp_path / "runs" / "a"), 60)
        (tmp_path / "known").write_text("h1:1\n")
        pid, *_ = hosts.pids("h2", "paceline.run.supervise.agent")
        os.kill(pid, signal.SIGKILL)
        assert wait_for(hosts.has_nothing_of_paceline, 60)
        time.sleep(wait_s)
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 143, out
    assert ("waiting for hosts: 1 of at least 2" in out) == (wait_s > 20)
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("stopped", 143)
    assert result["steps"] == max(losses(tmp_path / "runs" / "a"))


@pytest.mark.complete
def test_the_lease_ends_ranks_that_write_without_end(tmp_path):
    """A host that is cut off while its ranks fill every pipe: they are gone before others may start."""
    noisy = '    print("x" * 100000, flush=True)'
    file = write_workload(tmp_path, noisy)
    with (
        namespaces.hosts(tmp_path / "net", ("h1", "h2")) as own,
        started(tmp_path, own, "-H", "h1:1,h2:1", file, TEST_PAUSE="0.05") as job,
    ):
        assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 1, 60)
        own.cut("h2")
        cut_at = time.monotonic()
        assert wait_for(lambda: not own.pids("h2", "paceline.run"), 30), "still there after its lease"
        assert time.monotonic() - cut_at < 28
        job.communicate(timeout=60)
    assert job.returncode == 1


@pytest.mark.parametrize(
    "words", [["--on", "ssh", "--max-hosts", "3", "-H", "h1:1,h2:1"], ["-H", "h1:1", "--on", "ssh"]]
)
def test_a_dry_run_of_hosts_reaches_nobody(tmp_path, words):
    file = write_workload(tmp_path)
    (tmp_path / "cluster.toml").write_text('[ssh]\nprogram = "false"\n')
    line = command("run", *words, "--cluster", "cluster.toml", "--dry-run", file)
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "h1" in done.stdout
    assert not (tmp_path / "runs").exists()
