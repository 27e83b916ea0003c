"""What `paceline profile --job` keeps in a run directory equals what the job measures, and is shown beside it."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from paceline.nouns.device import peak_flops
from paceline.run.prediction import FOLDER, Prediction, Rate, rates, read_predictions, write_prediction
from paceline.run.read.runs import read_run
from paceline.run.read.times import RankSplit
from paceline.train.memory_file import RankMemory, read_memory

from support.dashboards import dashboard, make_run
from support.jobs import paceline, write_workload


@pytest.fixture(scope="module", params=["replicate=2", "shard=2", "pipeline=2"])
def predicted(request, tmp_path_factory):
    """A run of four steps whose two ranks are both predicted, and its folder of runs."""
    folder = tmp_path_factory.mktemp("predicted")
    file = write_workload(folder)
    done = paceline(folder, "run", "-n", "2", "--plan", request.param, "--job", "a", file)
    assert done.code == 0, done.err
    for rank in ("0", "1"):
        done = paceline(folder, "profile", "--job", "a", "--rank", rank, file)
        assert done.code == 0, done.err
    return folder


def test_what_ranks_hold_is_as_predicted(predicted):
    run = read_run(predicted / "runs/a")
    predictions = read_predictions(run.folder, run.plan)
    memories = read_memory(run.folder, 2)
    assert [each.rank for each in predictions] == [memory.rank for memory in memories] == [0, 1]
    for prediction, memory in zip(predictions, memories, strict=True):
        for kind in ("parameters", "buffers", "optimizer state"):
            assert prediction.resident_bytes[kind] == memory.by_kind[kind] >= 0
        # The sums of a step's loss, weight and flags travel in the gradients' bucket.
        assert 0 <= prediction.resident_bytes["gradients"] - memory.by_kind["gradients"] <= 64
        assert prediction.resident_bytes["parameters"] > 0
        assert prediction.flops > 0


def test_runs_show_has_both(predicted):
    text = paceline(predicted, "runs", "show", "a").out
    assert re.search(r"rank 1, predicted +tensors of [\d.]+ KiB at the peak, in \w+; \S+ GFLOP and \S+ \w+ sent", text)
    assert re.search(r"rank 0 computes +[\d.]+ [kMG]FLOP/s$", text, re.MULTILINE), text
    found = json.loads(paceline(predicted, "runs", "show", "a", "--json").out)["predicted"]
    assert [each["rank"] for each in found] == [0, 1]


def test_the_dashboard_has_both(predicted):
    with dashboard(predicted / "runs") as server:
        assert "tensors at the peak" in server.ask("/run/a/memory").text
        assert re.search(r"Rank 0 computes [\d.]+ [kMG]FLOP/s; Rank 1", server.ask("/run/a/time").text)
        assert "a step, predicted: calls" in server.ask("/run/a/plan").text


def test_the_plan_page_says_why_weights_are_split(tmp_path):
    folder = make_run(tmp_path, "a", plan="tensor=2")
    line = {
        "name": "<b>first</b>.weight",
        "shape": [64, 32],
        "placement": "dim 0 in 2",
        "why": "columns: nothing is sent",
    }
    write_prediction(folder, dataclasses.replace(a_prediction(), plan="tensor=2", layout=[line]))
    with dashboard(tmp_path) as server:
        text = server.ask("/run/a/plan").text
    assert "<td>64x32</td><td>dim 0 in 2</td><td>columns: nothing is sent</td>" in text
    assert "&lt;b&gt;first&lt;/b&gt;.weight" in text


def test_without_a_prediction_pages_say_how_to_make_one(tmp_path):
    make_run(tmp_path, "a")
    with dashboard(tmp_path) as server:
        assert "paceline profile --job a FILE" in server.ask("/run/a/memory").text


def test_a_prediction_of_another_plan_is_left_out(tmp_path):
    folder = make_run(tmp_path, "a", plan="replicate=2")
    (folder / FOLDER).mkdir()
    whole = {
        "version": 1, "rank": 0, "plan": "replicate=2", "device": "cpu", "precision": "float32", "flops": 1, "peak": 2,
        "phase": "forward", "between": {}, "at_peak": {}, "traffic": [], "layout": [], "more": "of a later version",
    }  # fmt: skip
    contents = [whole, {**whole, "plan": "shard=2", "rank": 1}, {**whole, "version": 2}, {**whole, "flops": -1}, []]
    for number, content in enumerate(contents):
        (folder / FOLDER / f"{number}.json").write_text(json.dumps(content))
    (folder / FOLDER / "9.json").write_text(json.dumps(whole)[:-9])
    found = read_predictions(folder, "replicate=2")
    assert [(each.rank, each.flops) for each in found] == [(0, 1)]


REFUSED = {
    "plan": (["--job", "a", "--plan", "shard=2", "FILE"], "the run has a plan: replicate=2"),
    "ranks": (["--job", "a", "-n", "4", "FILE"], "the run has a plan: replicate=2"),
    "arguments": (["--job", "a", "FILE", "--lr", "1"], "the run has the arguments --lr 0.1"),
    "file": (["--job", "a", "OTHER"], "that run trains"),
    "rank": (["--job", "a", "--rank", "2", "FILE"], "its ranks are 0 to 1"),
    "no run": (["--job", "b", "FILE"], "there is no such run"),
    "no job": (["--runs", "runs", "FILE"], "--runs without --job"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_run_does_not_have_is_refused(name, tmp_path):
    words, found = REFUSED[name]
    file, other = tmp_path / "train.py", tmp_path / "other.py"
    for path in (file, other):
        path.write_text("import paceline\nworkload = None\n")
    folder = make_run(tmp_path / "runs", "a")
    (folder / "job.json").write_text(
        json.dumps({"version": 1, "script": str(file), "arguments": ["--lr", "0.1"], "ranks": 2})
    )
    done = paceline(tmp_path, "profile", *({"FILE": file, "OTHER": other}.get(word, word) for word in words))
    assert (done.code, found in done.err) == (2, True), done.err
    assert not (folder / FOLDER).exists()


def a_prediction(precision="bf16", flops=3 * 10**12):
    return Prediction(0, "replicate=1", "cuda", precision, flops, 1, "forward", {}, {}, [])


def split(rank, seconds):
    return RankSplit(rank, 10, 10, seconds, {}, median_s=seconds)


def test_the_share_of_a_gpu_that_is_used():
    memories = [RankMemory(0, 2, "cuda:0", {}, 1, "NVIDIA A100-SXM4-80GB")]
    (rate,) = rates([a_prediction()], [split(0, 0.02), split(1, 0.02)], memories)
    assert rate.mfu == pytest.approx(150 / 312)
    assert rate.text == "150.0 TFLOP/s, 48.1% of the 312 TFLOP/s of NVIDIA A100-SXM4-80GB"


def test_without_a_known_peak_there_is_a_rate_alone():
    (rate,) = rates([a_prediction()], [split(0, 0.02)], [])
    assert (rate.mfu, rate.text) == (None, "150.0 TFLOP/s")
    assert Rate(0, 2e3, None, "").text == "2.0 kFLOP/s"
    assert rates([a_prediction(flops=0)], [split(0, 0.02)], []) == []
    assert rates([a_prediction()], [split(0, 0.0)], []) == []


PEAKS = {
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "Tesla V100-SXM2-16GB": (125, 15.7),
    "Tesla V100-PCIE-32GB": (112, 14),
    "Tesla T4": (65, 8.1),
    "NVIDIA H100 80GB HBM3": (989, 66.9),
    "NVIDIA H100 PCIe": (756, 51),
    "NVIDIA H100 NVL": (835, 60),
    "NVIDIA H800 PCIe": (756, 51),
    "NVIDIA H200": (989, 66.9),
    "NVIDIA H200 NVL": (835, 60),
    "NVIDIA L40S": (362, 91.6),
    "NVIDIA L40": (181, 90.5),
    "NVIDIA L4": (121, 30.3),
    "NVIDIA A10": (125, 31.2),
    "AMD Instinct MI300X": (1307, 163.4),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_the_data_sheets(name):
    half, single = PEAKS[name]
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == half * 1e12
    assert peak_flops(name, "float32") == pytest.approx(single * 1e12)
    assert peak_flops(name, "float64") is None


@pytest.mark.parametrize(
    "name", ["", "NVIDIA GeForce RTX 4090", "NVIDIA A10G", "Tesla V100S-PCIE-32GB", "NVIDIA A4000", "NVIDIA T400"]
)
def test_other_names_have_none(name):
    assert peak_flops(name, "bf16") is None
