"""`scripts/bench planner`: what it measures, and what it refuses before it measures anything."""

from __future__ import annotations

import pytest
import torch

from compare import planner
from compare.command import main


@pytest.fixture
def no_work(monkeypatch):
    """Nothing may be measured."""

    def work(*arguments, **named):
        raise AssertionError(f"it began: {arguments}")

    monkeypatch.setattr(planner, "check_cell", work)
    monkeypatch.setattr(planner, "time_7b", work)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("nothing.csv", None, "can't be read"),
        ("empty.csv", "", "it lacks any row"),
        ("other.csv", "city,people\nBerne,1\n", "it lacks act_ckpt"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_a_table_that_is_none(tmp_path, monkeypatch, capsys, name, content, found):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["planner", "--published", name]) == 2
    error = capsys.readouterr().err
    assert found in error
    assert "fix: " in error


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("no_work")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["planner", "--device", "cuda"]) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        ("mlp", "replicate=2", {}),
        pytest.param(("vit", "replicate=1", planner.OTHERWISE), marks=pytest.mark.complete),
    ],
    ids=str,
)
def test_a_cell_is_simulated_and_measured(tmp_path, cell):
    rows = planner.check_cell(tmp_path, cell)
    assert [row["rank"] for row in rows] == list(range(len(rows)))
    assert all(row["predicted"] > 2**20 and row["error"] < 0.005 for row in rows)


def test_the_error_is_of_the_measured_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "_simulate", lambda words: [{"peak": 90}, {"peak": 105}])
    monkeypatch.setattr(planner, "_measure", lambda folder, cell, ranks: [{"peak": 100}, {"peak": 100}])
    rows = planner.check_cell(tmp_path, ("mlp", "replicate=2", {}))
    assert [round(row["error"], 3) for row in rows] == [0.1, 0.05]


def test_of_several_tries_the_lowest_counts(tmp_path, monkeypatch):
    tries = iter([[{"peak": 103}], [{"peak": 100}], [{"peak": 999}]])
    monkeypatch.setattr(planner, "_simulate", lambda words: [{"peak": 100}])
    monkeypatch.setattr(planner, "_measure", lambda folder, cell, ranks: next(tries))
    (row,) = planner.check_cell(tmp_path, ("mlp", "replicate=1", {}))
    assert row["error"] == 0
    assert next(tries) == [{"peak": 999}]  # nobody asked a third time


def test_what_a_person_sees():
    row = {"device": "cpu", "model": "mlp", "plan": "shard=2", "parts": {"precision": "bf16"}, "rank": 1}
    row |= {"predicted": 3 * 2**20, "measured": 4 * 2**20, "error": 0.25}
    ratios = {"cpu_memory_error_max": 0.25, "published_fit_accuracy": None}
    result = {"rows": [row], "ratios": ratios, "profile_7b": {"seconds": 7.0, "resident_bytes": 2**29}}
    lines = planner.table(result).splitlines()
    assert lines[1].split() == ["mlp,", "shard=2,", "bf16", "1", "3.00", "4.00", "25.000%"]
    assert lines[3] == "a profile of 7 billion parameters held 0.50 GiB"
    assert lines[-1].split() == ["published_fit_accuracy", "-"]
