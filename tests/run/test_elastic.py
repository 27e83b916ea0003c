"""A job that has no hosts between two generations: its result is written all the same."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest

from paceline.launch.hosts import parse_hosts
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.run.supervise.elastic import Elastic
from paceline.run.supervise.host_agents import FleetOptions
from paceline.run.supervise.interrupts import interruptible
from paceline.run.supervise.membership import Rules
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.supervisor import Ending, JobRequest

STEP = {"event": "step", "step": 3, "position": 24, "loss": 0.5, "at": 1.0, "samples": 8, "memory_bytes": 0}


@pytest.fixture
def one_generation(tmp_path, monkeypatch):
    """Makes a job with one host, which goes after one generation of three steps; `then` is what is asked next."""
    monkeypatch.setattr("paceline.run.supervise.elastic.DISCOVER_S", 0.01)
    events = tmp_path / "events.jsonl"

    def generation(job, members, start):
        progress = Progress(tmp_path)
        events.write_text(json.dumps(STEP) + "\n")
        progress.read()
        job.progress = progress
        return Ending("stopped", 0, is_regroup=True), progress, members

    monkeypatch.setattr(Elastic, "_generation", generation)

    def make(then, first="a:1"):
        request = JobRequest(tmp_path / "file.py", (), 1, tmp_path)
        screen = Screen(io.StringIO(), io.StringIO())
        discover = lambda: then() if events.exists() else parse_hosts(first)  # noqa: E731
        return Elastic(Rules(1, 2), discover, FleetOptions(), Plan(), request, screen, wait_s=0.1)

    return make


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_hosts_that_do_not_come_back(tmp_path, one_generation):
    ending, _, told = one_generation(lambda: ()).run()
    assert (ending.status, ending.exit_code) == ("failed", 2)
    assert told == result(tmp_path)
    assert told["steps"] == 3
    assert "lower --min-hosts" in told["failure"]["message"]


def test_a_signal_while_it_waits_for_hosts(tmp_path, one_generation):
    def nobody():
        os.kill(os.getpid(), signal.SIGTERM)
        return ()

    with interruptible() as seen:
        ending, _, told = one_generation(nobody).run()
    assert seen == [signal.SIGTERM]
    assert (ending.status, ending.exit_code, told["status"]) == ("stopped", 143, "stopped")
    assert result(tmp_path)["steps"] == 3


def test_no_host_for_the_first_generation_leaves_no_result(tmp_path, one_generation):
    job = one_generation(lambda: (), first="")
    job.discover = lambda: ()
    with pytest.raises(UsageError, match="start hosts"):
        job.run()
    assert not (tmp_path / "result.json").exists()
