"""What others measured, from the programs that they ran, without anything fitted to it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from published import llm_foundry, predict, stage

from compare import published_table as published
from paceline.nouns.errors import UsageError

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "published_measurements.csv"
IS_HERE = pytest.mark.skipif(not PUBLISHED.exists(), reason="the table of published measurements is not here")
ROW = dict.fromkeys((*published.COLUMNS, "framework", "global_batch", "metric", "value", "unit", "note", "rev"), "")
KORTHIKANTI = {
    **ROW,
    "source": "Korthikanti 2022 (Megatron-LM)",
    "model": "GPT-22B",
    "hardware": "A100-80GB",
    "gpus": "8",
    "strategy": "tp8 pp1",
    "seq_len": "2048",
    "metric": "activation_memory",
    "unit": "GiB",
}


def write(path, rows, columns=tuple(ROW)):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows(**wanted):
    """Lines of the table on which these columns begin so."""
    if not PUBLISHED.exists():
        return []
    return [row for _, row in published.read(PUBLISHED) if all(row[k].startswith(v) for k, v in wanted.items())]


def error_of(row):
    """Of a row's prediction, relative, and whether it is too large."""
    nbytes, is_too_large = predict.predict(row)
    gpus = int(row["gpus"]) if row["metric"].endswith("_total") else 1
    return nbytes * gpus / (float(row["value"]) * published.UNITS[row["unit"]]) - 1, is_too_large


@pytest.mark.slow
@pytest.mark.parametrize(("how", "value", "fixed"), [("none", "59.25", 0), ("SP+selective", "9.5625", 0)])
def test_published_formula_matches_activations_of_a_layer(how, value, fixed):
    error, _ = error_of({**KORTHIKANTI, "act_ckpt": how, "value": value})
    assert abs(error) < 0.002


@pytest.mark.slow
def test_a_table_is_predicted_row_by_row(tmp_path):
    given = [
        {**KORTHIKANTI, "act_ckpt": "SP+selective", "value": "9.5625"},
        {**KORTHIKANTI, "act_ckpt": "SP+selective", "value": "12"},  # the same job, told otherwise
        {**KORTHIKANTI, "metric": "iter_time", "value": "1.1", "unit": "s", "global_batch": "4"},
        {**ROW, "source": "litgpt", "model": "nobody-1b", "strategy": "lora", "metric": "peak_memory", "value": "1"},
        {**ROW, "source": "nccl-tests", "metric": "latency", "value": "1202", "unit": "us"},
    ]
    told = []
    result = predict.predict_table(write(tmp_path / "t.csv", given), told.append)
    said = result["rows"]
    assert [row["number"] for row in said] == [2, 3, 4, 5]  # the last tells nothing of memory
    assert said[0]["error"] < 0.002
    assert said[1]["error"] == pytest.approx(-0.2, abs=0.005)
    assert "is not said" in said[2]["why_not"]
    assert "nobody-1b is not known" in said[3]["why_not"]
    assert result["ratios"]["published_memory_predicted"] == pytest.approx(2 / 3)
    assert len(told) == 1  # one job for both
    shown = "\n".join(published.table(result))
    assert "line 3: Korthikanti 2022" in shown
    assert "line 2: " not in shown


@pytest.mark.slow
def test_few_layers_tell_about_what_all_of_them_take():
    def run():
        return [llm_foundry.recorded(llm_foundry.SHAPES["MPT-125m"], (16, 2048), 8, (False, True))]

    about, exact = stage.extrapolated(run), stage.taken(run()[0]).reserved
    assert abs(about / exact - 1) < 0.05


def test_what_rows_tell():
    def claim(**more):
        return published.claim_of({**KORTHIKANTI, "micro_batch": "1", **more})

    assert claim(value="9") == "memory"
    assert claim(metric="iter_time", value="1.1") == "ran"
    assert claim(metric="fits", value="OOM") == "out of memory"
    assert claim(metric="max_batch", value="0") == "out of memory"
    assert claim(metric="max_batch", value="6") == "largest batch"
    assert claim(metric="autotuner_time", value="27") is None
    assert claim(source="vTrain NCCL all-reduce LUT") is None


def test_whether_it_fits_is_right_or_wrong():
    def said(claim, is_too_large):
        row = {**KORTHIKANTI, "metric": "fits", "value": claim, "micro_batch": "1"}
        return published.said_of(2, row, (1.0, is_too_large)).is_right

    assert said("OOM", True) is True
    assert said("OOM", False) is False
    assert said("fits", False) is True
    assert said("fits", True) is False


@pytest.mark.parametrize(
    ("hardware", "gib"),
    [
        ("8xH100-96GB HBM2e 500W/node, 400Gb/s", 96),
        ("a100_40gb", 40),
        ("Titan X 12GB", 12),
        ("8xH200/node", 141),
        ("8xA100/node (multi: 800Gb/s per node)", 80),
    ],
)
def test_a_rows_device(hardware, gib):
    assert published.device_of({**ROW, "hardware": hardware}).memory == int(gib * 2**30 * 0.985)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "can't be read"),
        ("", "lacks any row"),
        ("source,model\na,b\n", "lacks act_ckpt"),
        (b"\xff\xfe\x00", "read"),
    ],
)
def test_what_is_no_such_table(tmp_path, content, found):
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=found):
        published.read(path)


ALLOCATED = [("llama-3.2-1b", "lora"), ("llama-3.2-1b", "qlora"), ("stablelm-base-alpha-3b", "lora")]
ALLOCATED += [("stablelm-base-alpha-3b", "qlora"), ("tiny-llama", "full"), ("phi-2", "lora")]


@IS_HERE
@pytest.mark.integration
@pytest.mark.parametrize(("model", "method"), ALLOCATED)
def test_fine_tuning_within_one_percent(model, method):
    row = rows(source="litgpt", model=model, strategy=method)[0]
    assert abs(error_of(row)[0]) < 0.01


@IS_HERE
@pytest.mark.integration
def test_reserved_memory_of_llama_on_eight_gpus():
    (row,) = (row for row in rows(source="torchtitan", metric="peak_reserved") if row["strategy"] == "FSDP")
    assert abs(error_of(row)[0]) < 0.03


@IS_HERE
@pytest.mark.integration
def test_a_zero2_job_that_fills_half_a_gpu():
    row = rows(source="QwenLM", model="Qwen-1.8B", strategy="Full", seq_len="1024", metric="gpu_memory")[0]
    assert abs(error_of(row)[0]) < 0.02


@IS_HERE
@pytest.mark.integration
@pytest.mark.parametrize("metric", ["MFU", "fits"])
def test_what_ran_fits_and_what_did_not_does_not(metric):
    """A Llama-2-70B that ran out of memory, and a 13B that filled the GPU and ran."""
    row = next(
        row for row in rows(source="torchtitan", metric=metric) if row["model"] in ("Llama-2-13B", "Llama-2-70B")
    )
    _, is_too_large = predict.predict(row)
    assert is_too_large == (row["value"] == "OOM")
