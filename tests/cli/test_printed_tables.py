"""Every aligned table, letter by letter: printed_tables.txt has them as commands print them."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare import jobs, planner, published_table, step, strategies
from paceline.cli import export_command as export
from paceline.cli import plan_command as plan
from paceline.cli import plan_memory
from paceline.cli import profile_command as profile
from paceline.demo import report as demo
from paceline.doctor import findings_report as doctor
from paceline.doctor.finding import Finding
from paceline.nouns.device import Device
from paceline.nouns.plan import Plan
from paceline.nouns.profile import Profile, Recording, Work
from paceline.nouns.schedule import make_schedule, picture
from paceline.plan import memory_table
from paceline.plan.memory import Holder, Memory
from paceline.server import status_table
from paceline.verify.judge.verdict import Check, Verdict

GOLDEN = Path(__file__).with_name("printed_tables.txt")
MIB, GIB = 2**20, 2**30
RATIOS = {"quiet_over_ddp": 1.25, "a_name_of_a_ratio_that_is_longer_than_its_column": 0.5}
MACHINE = {"cores": 2, "load_before": 0.25, "load_after": 12.0}


def status():
    row = {"range": 0, "role": "head", "updates": 90, "behind": 0, "duplicates": 1, "staleness": {"0": 4, "12": 81}}
    chains = [
        {"range": 0, "epoch": 4, "chain": [0, 1], "is_whole": True},
        {"range": 10, "epoch": 123, "chain": [2], "is_whole": False},
    ]
    worker = {"worker": 0, "incarnation": 0, "clock": 7, "is_in": True, "is_done": False, "silent_s": 0.2}
    more = {"waited_for_network_s": 1.0, "waited_for_others_s": 100.0, "bytes_sent": 2**33, "bytes_received": 5}
    workers = [worker, {**worker, "worker": 11, "incarnation": 2, "clock": 12, "is_in": False, **more}]
    job = {"workers": 2, "servers": 3, "replicas": 2, "mode": "deadline", "deadline": 0.5, "quorum": 0, "staleness": 0}
    nodes = [{"ranges": [{**row, "waits_for": [1, 11]}]}]
    facts = {"job": job, "state": "training", "workers": workers, "chains": chains, "nodes": nodes}
    return status_table.table(facts).splitlines()


def findings():
    several = [
        Finding("ok", "a", "python", "3.11.7"),
        Finding("ok", "a-host-with-a-name-that-is-longer-than-its-column", "python", "3.11.8"),
        Finding("warning", "a", "memory", "much of it is taken " * 5, "end the other job"),
        Finding("not checked", "a", "accelerators", ""),
    ]
    one = [Finding("error", "a", "/dev/shm", "it is missing", "mount it")]
    return [*doctor.table(several, width=90), "", *doctor.table(one), *doctor.table([])]


def memories():
    at_peak = {"parameters": 4 * GIB, "activations of the forward": 12 * GIB, "nothing": 0}
    holders = [Holder("encoder.layer.0", "activations", 12 * GIB), Holder("", "parameters", 5)]
    first = Memory(0, 16 * GIB, "backward", at_peak, {}, holders, 17 * GIB, True, shared=5 * MIB, host=GIB)
    second = Memory(1, MIB, "", {"parameters": MIB}, {}, [], 2 * MIB, False, shared=0)
    lines = memory_table.table([first, second], Device.parse("V100-16GB"), 2)
    lines += ["", *memory_table.table([second], Device.parse("cpu"), 0)]
    servers = [{"parameters": GIB, "optimizer_state": 20 * GIB, "gradients": 5}] * 11
    lines += ["", *memory_table.servers_table(SimpleNamespace(servers=servers))]
    return [*lines, *memory_table.holders(first), *memory_table.holders(second)]


def work():
    modules = {"encoder.layer.0": Work(2, 5 * 10**12, 3 * GIB), "": Work(1, 10**9, 5), "norm": Work(1, 0, 5)}
    operations = {"aten.mm": Work(1234, 6 * 10**12, 4 * GIB)}
    recording = Recording([], [], [], last_step=0)
    measured = Profile("replicate=1", 0, "cpu", 8, "float32", recording, operations, modules, [])
    return profile._work(measured)


def changes():
    several = []
    for text, needed, cost in (("checkpointing=full", 5 * GIB, "1.3 times the work"), ("shard=2", 123 * GIB, "")):
        several.append(SimpleNamespace(way=SimpleNamespace(text=text), needed=needed, cost=cost))
    return plan_memory._suggestion_lines(several, True, Device.parse("V100-16GB"))


def facts_of_a_plan(capsys):
    row = {"collective": "all_reduce", "axis": "replicate", "calls": 1, "payload_bytes": 5 * MIB, "stage": 0}
    longer = {**row, "collective": "reduce_scatter_longer", "calls": 123456, "stage": 1}
    facts = {
        "mesh": "replicate=2", "batch_size": 8, "samples_per_rank": 4, "micro_batch_size": 2, "parameters": 12345,
        "parameter_bytes": 5 * MIB, "buffer_bytes": 0, "parameter_bytes_per_rank": [MIB, 2 * MIB], "share": [0.5, 0.5],
        "coupled": "batch_norm", "traffic": [row, longer], "ranges": [],
    }  # fmt: skip
    plan.print_facts(Plan("replicate=2"), facts, make_schedule("1f1b", 2, 4))
    layout = [
        {"name": "encoder.weight", "shape": [128, 64], "placement": "Shard(0)", "why": "its output is cut"},
        {"name": "scale", "shape": [], "placement": "a placement longer than its column", "why": ""},
    ]
    plan.print_layout(layout)
    return capsys.readouterr().out.splitlines()


def exported(capsys, monkeypatch):
    tensors = {"a": SimpleNamespace(nbytes=5 * MIB), "b": SimpleNamespace(nbytes=1)}
    made = SimpleNamespace(
        files={"model.safetensors": ["a", "b"], "model-00001-of-00002-with-a-long-name.safetensors": []},
        tensors=tensors, texts=["config.json"], source="run", step=5,
    )  # fmt: skip
    monkeypatch.setattr("paceline.checkpoint.export.check_may_export", lambda folder: None)
    monkeypatch.setattr("paceline.checkpoint.export.plan_export", lambda *words: made)
    arguments = argparse.Namespace(to="hf", folder=Path("out"), checkpoint=Path("run"), dry_run=True, json=False)
    export.run(arguments)
    return capsys.readouterr().out.splitlines()


def benchmarks():
    row = {"name": "paceline", "ranks": 2, "samples_per_s": 123.456, "min": 100.0, "max": 2000.25}
    longer = {**row, "name": "a contestant with a very long name"}
    lines = step.table({"rows": [row, longer], "ratios": RATIOS}).split("\n")
    job = {"setting": "quiet", "library": "accelerate", **row, "whole_s": 12.345}
    lines += ["", *jobs.table({"rows": [job], "ratios": RATIOS, "machine": MACHINE, "busy": 4}).split("\n")]
    strategy = {"name": "shard_3", "ranks": 4, "step_s": 0.5, "min": 0.25, "max": 1.0}
    result = {"rows": [strategy], "ratios": RATIOS, "machine": MACHINE, "loss_differences": {"shard_3": 1e-7}}
    return [*lines, "", *strategies.table(result).split("\n")]


def planned():
    row = {"model": "mlp", "plan": "shard=2", "parts": {"precision": "bf16"}, "rank": 1, "error": 0.25}
    row |= {"predicted": 3 * MIB, "measured": 4 * MIB}
    on_gpu = {"model": "a model with a name longer than forty letters", "batch": 2, "length": 128, "parts": {}}
    on_gpu |= {"predicted": GIB, "measured": GIB, "error": 0.0}
    source = {
        "source": "Megatron", "rows": 12, "memory_rows": 5, "memory_error_median": 0.05, "memory_error_max": None,
        "fit_rows": 3, "fit_right": 2, "oom_rows": 1, "oom_right": 1, "not_predicted": 4,
    }  # fmt: skip
    published = {"sources": [source, {**source, "source": "a source with a name longer than its column"}], "rows": []}
    ratios = {"cpu_memory_error_max": 0.25, "published_fit_accuracy": None}
    result = {"rows": [row, on_gpu], "ratios": ratios, "profile_7b": {"resident_bytes": 2**29}, "published": published}
    assert published_table.table(published)
    return planner.table(result).split("\n")


def verdict():
    checks = [Check("order", True, "all ranks alike"), Check("gradients", False, ""), Check("loss", True, "equal")]
    return Verdict("replicate=2", checks).lines()


def demonstrated():
    return demo.table([("held-out loss, before", "5.000"), ("samples/s, 2 processes", "12.0")]).split("\n")


def schedule():
    several = [make_schedule("interleaved", 2, 4), make_schedule("gpipe", 11, 1)]
    return "\n\n".join(map(picture, several)).split("\n")


TABLES = [status, findings, memories, work, changes, benchmarks, planned, verdict, demonstrated, schedule]


def sections():
    """The expected lines by name; a line `=== NAME` begins each."""
    expected = {}
    for line in GOLDEN.read_text().split("\n")[:-1]:
        if line.startswith("=== "):
            lines = expected[line.removeprefix("=== ")] = []
        else:
            lines.append(line.removesuffix("$"))  # it shows where a line with blanks at its end stops
    return expected


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_a_table_is_printed_as_ever(table):
    assert table() == sections()[table.__name__]


def test_facts_of_a_plan_are_printed_as_ever(capsys):
    assert facts_of_a_plan(capsys) == sections()["facts_of_a_plan"]


def test_an_export_is_printed_as_ever(capsys, monkeypatch):
    assert exported(capsys, monkeypatch) == sections()["exported"]
