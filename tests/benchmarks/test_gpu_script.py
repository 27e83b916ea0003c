"""The script that measures steps on a GPU works, here on a CPU with a tiny model."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import pytest

from support.documented_commands import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu" / "run.py"


def run(*words):
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=600)


@pytest.mark.integration
@pytest.mark.complete  # half a minute for a script that is run by hand; test_host_time.py runs its like
def test_every_contestant_takes_the_same_steps(tmp_path):
    done = run("--device", "cpu", "--tiny", "--rounds", "2", "--steps", "7", "--json", str(tmp_path / "made.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "made.json").read_text())
    names = ["raw torch", "Paceline, Workload", "Paceline, own loop", "Accelerate", "Lightning Fabric"]
    assert [row["name"] for row in made["steps"]] == [*names, "transformers Trainer", "FSDP2 by hand"]
    predicted = {row["name"]: row["predicted_mib"] for row in made["steps"] if "predicted_mib" in row}
    assert list(predicted) == ["Paceline, Workload"]
    assert predicted["Paceline, Workload"] > 0
    assert "predicted MiB" in done.stdout
    first = made["steps"][0]["loss"]
    for row in made["steps"]:
        assert row["loss"] == pytest.approx(first, rel=1e-3), row
        assert len(row["step_ms"]) == 2
        assert row["name"] in done.stdout
    assert [row["option"] for row in made["same_as_cpu"] if row["equal"]] == [
        "plain", "clip_norm", "micro-batches", "checkpointing",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "there is no GPU here"),
        (("--device", "cpu", "--rounds", "1"), "needs at least 2 rounds"),
        (("--device", "cpu", "--steps", "3"), "needs at least 2 rounds of 7 steps"),
    ],
)
def test_what_it_cannot_measure_is_refused(words, says):
    done = run(*words)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize(("mib", "is_said"), [(40, False), (1899, True)])
def test_memory_that_another_contestant_left_is_said(capsys, mib, is_said):
    runpy.run_path(str(SCRIPT))["_check_is_free"]("raw torch", mib << 20)
    assert capsys.readouterr().err == "raw torch: its peak counts 1899 MiB that were there before it\n" * is_said
