"""`paceline run` as one of torchrun's ranks: the plan it was asked for is the one that is kept, or it is refused."""

from __future__ import annotations

import os

import pytest

from paceline.cli.main import main
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.train.prepare import read_plan

from support.jobs import write_workload


@pytest.fixture
def torchrun(monkeypatch, tmp_path):
    """The environment of one of torchrun's two ranks; the process that `exec` would start is returned instead."""
    torchs = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h1", "MASTER_PORT": "29500", **torchs}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PACELINE_PLAN", "")
    monkeypatch.delenv("PACELINE_PLAN")
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    started = []

    def execv(path, words):
        started.append(words)
        raise Replaced

    monkeypatch.setattr("os.execv", execv)
    return started


class Replaced(Exception):
    """In place of what exec does: it does not come back, so there is no exit code."""


def run(*words):
    try:
        return main(["run", *map(str, words)])
    except Replaced:
        return None


def test_the_plan_reaches_the_rank(torchrun, tmp_path):
    file = write_workload(tmp_path)
    run("--plan", "transport=gloo,compression=bf16,bucket_bytes=1024", file, "--own", "word")
    assert torchrun[0][1:] == [str(file), "--own", "word"]
    expected = Plan(mesh="replicate=2", transport="gloo", compression="bf16", bucket_bytes=1024)
    assert read_plan(os.environ, 2) == expected


def test_a_plan_file_reaches_the_rank(torchrun, tmp_path):
    Plan(mesh="replicate=2", compression="fp16").write(tmp_path / "plan.json")
    run("--plan", "plan.json", write_workload(tmp_path))
    assert read_plan(os.environ, 2).compression == "fp16"


@pytest.mark.parametrize(
    "words",
    [
        ["--resume"],
        ["--json"],
        ["--checkpoint-every", "5"],
        ["--keep", "2"],
        ["--runs", "elsewhere"],
        ["--grace", "5"],
    ],
    ids=lambda words: words[0],
)
def test_what_torchrun_leaves_no_room_for_is_refused(torchrun, tmp_path, words, capsys):
    assert run(*words, write_workload(tmp_path)) == 2
    error = capsys.readouterr().err
    assert f"{words[0]} under torchrun\n  found: " in error
    assert "\n  fix: " in error
    assert not torchrun


def test_a_plan_of_another_size_is_refused(torchrun, tmp_path, capsys):
    assert run("--plan", "replicate=3", write_workload(tmp_path)) == 2
    assert not torchrun


@pytest.mark.parametrize("text", ["{", "7", '{"bucketbytes": 3}'])
def test_a_plan_in_the_environment_that_is_none_is_one_error(monkeypatch, text):
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    with pytest.raises(PlanError, match="PACELINE_PLAN"):
        read_plan({"PACELINE_PLAN": text}, 2)
