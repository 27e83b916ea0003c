"""What `paceline plan` prints of a loop of the user's own, and what it refuses."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.jobs import paceline

LOOPS = Path(__file__).parents[2] / "examples" / "loops"
SLOW = pytest.mark.slow


def planned(folder, *words):
    ended = paceline(folder, "plan", *words)
    assert ended.code == 0, ended.err
    return ended


def left_in(folder):
    """The files in a folder, and in its `tmp`, where the command keeps what it does not leave."""
    return {path.name for path in folder.rglob("*") if not path.name.startswith(("tmp", "torchinductor"))}


@SLOW
def test_two_models_two_optimizers_and_steps_that_differ(tmp_path):
    ended = planned(tmp_path, "-n", "2", LOOPS / "gan.py")
    rows = [line.split() for line in ended.out.splitlines()]
    assert [row[0] for row in rows] == [
        *("mesh", "tried", "batch", "model", "model", "optimizer", "optimizer", "memory", "step", "step")
    ]
    assert "the loop's first 4 steps, on the CPU" in ended.out
    assert "32 samples, 16 on a rank" in ended.out
    assert rows[-2][1:6] == ["3", "all_reduce", "replicate", "4", "calls"]  # the critic alone
    # And the generator: three calls more, and no message at the end, as in the steps after the third.
    assert rows[-1][1:6] == ["4", "all_reduce", "replicate", "6", "calls"]
    assert "ran on real tensors on the CPU" in ended.err
    assert left_in(tmp_path) == set()


@SLOW
def test_as_json_with_memory_and_the_other_plans(tmp_path):
    ended = planned(tmp_path, "--plan", "shard=2,zero=1", "--explain-memory", "--json", LOOPS / "muon.py")
    facts = json.loads(ended.out)
    assert facts["is_loop"] is True
    assert (facts["mesh"], facts["zero"], facts["batch_size"], facts["samples_per_rank"]) == ("shard=2", 1, 16, 8)
    # Weights and biases of both; AdamW has four small ones, Muon the matrices.
    assert facts["parameters"] == 16 * 32 + 32 + 32 * 32 + 32 + 32 + 1
    muon, adamw = facts["optimizers"]
    assert (muon["name"], muon["state_bytes"]["0"]) == ("Muon", 4 * 32 * 32)
    assert (adamw["name"], adamw["parameters"]) == ("AdamW", 32 + 32 + 32 + 1)
    sent = {row["collective"]: row["payload_bytes"] for row in facts["traffic"]}
    assert sent["broadcast"] == facts["parameter_bytes"]
    assert facts["steps"][0]["backwards"] == 2
    plans = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]
    assert [plan["plan"] for plan in facts["plans"]] == plans
    assert facts["plans"][0]["memory"]["peak"] > facts["plans"][1]["memory"]["peak"]
    assert facts["plans"][0]["sent_bytes"] + facts["parameter_bytes"] == facts["plans"][1]["sent_bytes"]
    assert facts["memory"]["ranks"][0]["peak"] == facts["held"][0]["peak"]


LARGE = """
import sys
import torch
import paceline
width = int(sys.argv[1])
models = [torch.nn.Linear(width, width) for _ in range(4)]
optimizer = torch.optim.AdamW([parameter for model in models for parameter in model.parameters()])
job, *models, optimizer = paceline.prepare(*models, optimizer)
for _ in range(3):
    values = torch.ones(1, width)
    for model in models:
        values = model(values)
    optimizer.zero_grad()
    job.backward(values.mean(), 1)
    optimizer.step()
print("a person's own line")
"""


@SLOW
@pytest.mark.complete
def test_what_does_not_fit_fits_with_its_state_in_parts(tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    # 64 MiB of parameters, of gradients and of AdamW's temporaries, and 128 of its state; 768 of CUDA and NCCL.
    device = ("--explain-oom", "--device", "1.06GB", "large.py", "2048")
    ended = planned(tmp_path, "-n", "2", *device)
    assert "OUT OF MEMORY" in ended.out
    ways, table = ended.out.split("The cheapest changes that fit:\n")[1].split("\n\n")
    tensor, shard, *others = ways.splitlines()
    if find_spec("torchao"):
        (moments,) = others
        assert re.fullmatch(
            r"optimizer_states=8bit in the plan +needs .* cost: Adam's moments rounded to 8 bits", moments
        )
    assert re.fullmatch(r"tensor=2 as the plan +needs +[\d,.]+ MiB +cost: layers send activations, and .*", tensor)
    assert re.fullmatch(r"shard=2,zero=1 as the plan +needs +[\d,.]+ MiB +cost: updated parameters are sent", shard)
    plans = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]
    assert [line.split()[0] for line in table.splitlines()] == ["plan", *plans]
    assert "made by the loop" in ended.out
    ended = planned(tmp_path, "--plan", "shard=2,zero=1", *device)
    assert "It fits 1.06GB: nothing needs to change." in ended.out
    assert "shard=2,zero=1 (asked for)" in ended.out


@SLOW
@pytest.mark.complete  # which ways there are: tests/plan/test_memory_report.py
def test_moments_that_can_not_be_had_in_fewer_bits_are_told_once(tmp_path):
    (tmp_path / "large.py").write_text(LARGE.replace("torch.optim.AdamW(", "torch.optim.SGD(lr=0.1, params="))
    ended = planned(tmp_path, "--explain-oom", "--device", "0.6GB", "large.py", "2048")
    assert "OUT OF MEMORY" in ended.out
    assert ended.err.count("was not tried") == ended.err.count("optimizer_states=8bit was not tried") == 1


@SLOW
def test_the_rank_that_updates_most_is_recorded_too(tmp_path):
    file = tmp_path / "uneven.py"
    sizes = LARGE.replace("torch.nn.Linear(width, width) for _ in range(4)", "torch.nn.Linear(n, 1) for n in SIZES")
    sizes = sizes.replace("SIZES", "(100, 60, 59)").replace("values = model(values)", "0")
    sizes = sizes.replace("values.mean()", "sum(model(torch.ones(1, model.in_features)).mean() for model in models)")
    file.write_text(sizes)
    facts = json.loads(planned(tmp_path, "--plan", "shard=2,zero=1", "--json", file, "1").out)
    (adamw,) = facts["optimizers"]
    assert set(adamw["state_bytes"]) == {"0", "1"}
    assert [held["rank"] for held in facts["held"]] == [0, 1]
    assert adamw["state_bytes"]["1"] > adamw["state_bytes"]["0"]


MINIMAL = """
import torch, paceline
model = torch.nn.Linear(2, 1)
job, model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(STEPS):
    job.backward(model(torch.ones(1, 2)).mean(), 1)
    optimizer.step()
"""
PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--size', required=True)\n"
BAD = [
    # Found in the source or the plan, before the loop runs.
    (["--plan", "pipeline=2"], MINIMAL, "pipeline needs the loss as a function"),
    (["--plan", "pipeline=2"], MINIMAL, "pipeline needs the loss as a function"),
    (["--plan", "server=2"], MINIMAL, "server needs the loss as a function"),
    (["--plan", "shard=2,tensor=2"], MINIMAL, "tensor gives each rank pieces"),
    (["--plan", "replicate=2,checkpointing=full"], MINIMAL, "used as they are"),
    (["--plan", "replicate=2,compile=on"], MINIMAL, "used as they are"),
    (["--explain-layout"], MINIMAL, "no tensor axis"),
    (["--schedule-picture"], MINIMAL, "has no pipeline"),
    (["--explain-oom"], MINIMAL, "has no memory of a known size"),
    (["--explain-memory", "--device", "tpu"], MINIMAL, "its memory is not known"),
    (["-n", "0"], MINIMAL, "a job has at least one"),
    ([], "model = (", "line 1"),
    # Found by the loop.
    pytest.param([], "import torch\n", "it ended before one", marks=SLOW),
    pytest.param([], "import paceline\nworkload = 3\n", "no variable `workload`", marks=SLOW),
    pytest.param([], MINIMAL.replace("STEPS", "0"), "it ended before one", marks=SLOW),
    pytest.param([], MINIMAL.replace("STEPS", "2 / 0"), "it raised ZeroDivisionError in line 5", marks=SLOW),
    pytest.param([], f"{PARSER}parser.parse_args()\n{MINIMAL}", "arguments are required: --size", marks=SLOW),
    pytest.param([], MINIMAL.replace("range(STEPS)", "iter(exit, 5)"), "it ended before one", marks=SLOW),
    pytest.param([], f"import os\nos._exit(9)\n{MINIMAL}", "it printed nothing", marks=SLOW),
    pytest.param(["-n", "2", "--plan", "compression=topk"], MINIMAL, "compression=topk", marks=SLOW),
]


@pytest.mark.parametrize(("flags", "text", "found"), BAD)
def test_bad_input(tmp_path, flags, text, found):
    (tmp_path / "loop.py").write_text(text)
    ended = paceline(tmp_path, "plan", *flags, "loop.py")
    assert ended.code == 2, ended.out + ended.err
    assert found in ended.err
    assert "  fix: " in ended.err
    assert "Traceback" not in ended.err
    assert left_in(tmp_path) == {"loop.py"}


@SLOW
@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "nowhere"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},
        {"PACELINE_RUN_DIR": "runs/other", "PACELINE_RENDEZVOUS": "nowhere", "PACELINE_PLAN": "{}"},
    ],
    ids=["torchrun", "slurm", "rank"],
)
def test_another_job_of_the_environment_is_none_of_the_loop(tmp_path, environment):
    (tmp_path / "loop.py").write_text(MINIMAL.replace("STEPS", "2"))
    ended = paceline(tmp_path, "plan", "-n", "2", "loop.py", **environment)
    assert ended.code == 0, ended.err
    assert "all_reduce" in ended.out
    assert left_in(tmp_path) == {"loop.py"}


@SLOW
def test_a_profile_of_a_loop_is_refused_and_plan_named(tmp_path):
    (tmp_path / "loop.py").write_text(MINIMAL)
    ended = paceline(tmp_path, "profile", "loop.py")
    assert ended.code == 2
    assert "paceline plan" in ended.err
