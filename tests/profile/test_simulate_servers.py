"""What workers and parameter servers hold, tried out and in a real job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from compare import planner_models, planner_peaks
from paceline.nouns.plan import Plan
from paceline.nouns.profile import COMMUNICATION, OPTIMIZER, Profile
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import servers_table
from paceline.profile.simulate import simulate

from support.benchmarks import ENVIRONMENT

LINE = "server=2,replicate=2"


def wide(**parts):
    """A model of more than one segment of 1 MiB."""
    usual = {
        "model": lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8)),
        "loss": lambda model, batch: (model(batch).square().sum(), len(batch)),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "data": list(torch.randn(32, 512)),
        "batch_size": 16,
    }
    return paceline.Workload(**{**usual, **parts})


SIZE = (512 * 1024 + 1024 + 1024 * 8 + 8) * 4


def test_servers_keep_what_workers_do_not():
    profile = simulate(wide(), Plan.parse("server=2,replicate=3,replicas=1"))
    assert OPTIMIZER not in memory_of(profile).between
    assert sum(held["parameters"] for held in profile.servers) == pytest.approx(SIZE, abs=512)  # segments are aligned
    state = sum(held["optimizer_state"] for held in profile.servers)
    assert 2 * SIZE <= state <= 2 * SIZE + 4 * 8  # and the number of steps of each piece
    assert sum(held["gradients"] for held in profile.servers) == pytest.approx(3 * SIZE, abs=3 * 512)


def test_replicas_hold_it_twice():
    one, two = (simulate(wide(), Plan.parse(f"{LINE},replicas={count}")).servers for count in (1, 2))
    assert sum(h["parameters"] for h in two) == 2 * sum(h["parameters"] for h in one)
    assert [h["gradients"] for h in two] == [h["gradients"] for h in one]


def test_a_gpus_worker_has_its_connection_on_the_host():
    memory = memory_of(simulate(wide(), Plan.parse(LINE), device="cuda"))
    assert COMMUNICATION not in memory.at_peak
    assert memory.peak < 3 * SIZE


def test_a_small_model_has_fewer_ranges_than_servers():
    held = simulate(wide(), Plan.parse("server=9,replicate=2")).servers
    assert len(held) == 9
    assert sum(one["parameters"] for one in held) == pytest.approx(2 * SIZE, abs=2 * 512)
    is_head = [one["gradients"] > 0 for one in held]
    assert is_head == sorted(is_head, reverse=True)
    assert sum(is_head) < 8
    assert not any(held[-1].values())


def test_they_are_written_and_shown(tmp_path):
    profile = simulate(wide(), Plan.parse(LINE))
    profile.write(tmp_path / "profile.json")
    again = Profile.read(tmp_path / "profile.json")
    assert again.servers == profile.servers
    lines = servers_table(again)
    assert [line[:8] for line in lines[1:3]] == ["server 0", "server 1"]
    assert servers_table(simulate(wide(), Plan())) == []


@pytest.mark.slow
def test_a_workers_step_is_that_of_a_real_job(tmp_path):
    """But for its connection's memory, which a thread takes that the profiler does not hear."""
    command = [sys.executable, "-m", "paceline.cli.main", "run", "--runs", str(tmp_path / "runs")]
    script = [planner_peaks.__file__, "bert", LINE, "{}", str(tmp_path)]
    done = subprocess.run(
        [*command, "--plan", LINE, *script],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    for rank in range(2):
        real = json.loads(Path(tmp_path, f"{rank}.json").read_text())
        profile = simulate(planner_models.workload("bert"), Plan.parse(LINE), rank)
        memory = memory_of(profile)
        own = memory.peak - memory.at_peak[COMMUNICATION]
        assert abs(own / real["peak"] - 1) < 0.005, (own, real["peak"])
        assert profile.traffic == real["ledger"]
