"""`paceline.integrations.accelerate.Accelerator` ends where Accelerate's own does, on as many data ranks."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from paceline.integrations.accelerate import Accelerator
from paceline.nouns.errors import CheckpointError, PlanError, UsageError
from paceline.nouns.plan import Plan

from support.accelerate_scripts import SCRIPTS, checkpointing, forget, join_by_torch
from support.ranks import preload, run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
preload("paceline.integrations.accelerate", "support.accelerate_scripts")
PLANS = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]


def theirs(rank, names):
    join_by_torch(rank)
    return run_scripts(rank, accelerate.Accelerator, names)


def run_scripts(rank, kind, names):
    found = {}
    for name in names:
        folder = Path(os.environ["PACELINE_RENDEZVOUS"]).parent / name  # all ranks write to one
        folder.mkdir(exist_ok=True)
        forget()
        accelerator, model, numbers = SCRIPTS[name](kind, folder)
        state = accelerator.get_state_dict(model)
        found[name] = numbers, {key: value.cpu() for key, value in state.items()}
        accelerator.free_memory(model)
    return found


@functools.cache
def expected(size):
    return run_ranks(size, theirs, list(SCRIPTS), timeout_s=100)[0]


def ours(rank, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    return run_scripts(rank, Accelerator, list(SCRIPTS))


@functools.cache
def results(plan):
    return run_ranks(2, ours, plan, timeout_s=150)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_script_ends_as_with_accelerate(plan, name):
    wanted, state = expected(1 if plan == "tensor=2" else 2)[name]
    answers = results(plan)
    for numbers, _ in (answer[name] for answer in answers):
        assert numbers == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    found = answers[0][name][1]
    assert found.keys() == state.keys()
    for key, value in state.items():
        if "running" not in key:  # of batch norms it is the mean of the ranks', and with Accelerate rank 0's
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def resumed(rank, plan, after, folder):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    found = []
    for settings in ({}, {"resume": 9}):
        forget()
        accelerator, model, numbers = checkpointing(Accelerator, folder, **settings)
        found.append((numbers, accelerator.get_state_dict(model)))
        accelerator.free_memory(model)
        os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(after)))
    return found


@pytest.mark.parametrize(
    ("plan", "after"),
    [("replicate=2", "replicate=2"), ("shard=2", "shard=2"), ("shard=2", "shard=2,zero=1"), ("tensor=2", "tensor=2")],
)
def test_a_resumed_script_ends_as_the_whole(plan, after, tmp_path):
    whole, rest = run_ranks(2, resumed, plan, after, tmp_path, timeout_s=100)[0]
    assert rest[0] == pytest.approx(whole[0][9:], rel=1e-9)
    for name, value in whole[1].items():
        torch.testing.assert_close(rest[1][name], value, rtol=1e-9, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, len(whole[0]) + 1), *range(10, len(whole[0]) + 1)]


def other_plan(rank, plan, after, folder):
    with pytest.raises(CheckpointError) as failure:
        resumed(rank, plan, after, folder)
    return failure.value.found


def test_a_checkpoint_of_another_kind_of_plan_is_refused(tmp_path):
    for number, plans in enumerate((("replicate=2", "shard=2"), ("shard=2", "replicate=2"))):
        (tmp_path / str(number)).mkdir()
        (found, _) = run_ranks(2, other_plan, *plans, tmp_path / str(number))
        assert "in a folder of their own" in found


def states(rank, plan):
    accelerator = Accelerator(plan=plan)
    Accelerator()  # another one is of the same ranks
    state = PartialState()
    return {
        "processes": (state.num_processes, accelerator.num_processes, AcceleratorState().num_processes),
        "index": (state.process_index, accelerator.process_index),
        "main": (state.is_main_process, accelerator.is_main_process, accelerator.is_last_process),
        "type": str(accelerator.distributed_type),
        "device": accelerator.device.type,
    }


@pytest.mark.parametrize(("plan", "size"), [("replicate=2", 2), ("shard=2", 2), ("tensor=2", 1)])
def test_the_process_state_is_that_of_the_data_ranks(plan, size):
    for rank, found in enumerate(run_ranks(2, states, plan)):
        assert found == {
            "processes": (size, size, size),
            "index": (rank, rank),
            "main": (rank == 0, rank == 0, rank == size - 1),
            "type": "DistributedType.MULTI_CPU",
            "device": "cpu",
        }


BAD = {
    "deepspeed": ({"deepspeed_plugin": object()}, UsageError, "deepspeed_plugin"),
    "fsdp": ({"fsdp_plugin": object()}, UsageError, "fsdp_plugin"),
    "megatron": ({"megatron_lm_plugin": object()}, UsageError, "megatron_lm_plugin"),
    "parallelism": ({"parallelism_config": object()}, UsageError, "parallelism_config"),
    "compiler": ({"dynamo_backend": "inductor"}, UsageError, "dynamo_backend"),
    "fp8": ({"mixed_precision": "fp8"}, UsageError, "fp8"),
    "buckets": ({"kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=1)]}, UsageError, "bucket_cap_mb"),
    "group": ({"kwargs_handlers": [InitProcessGroupKwargs(backend="mpi")]}, UsageError, "backend"),
    "size": ({"plan": "shard=2"}, PlanError, "2 ranks"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_met_is_refused_by_name(case):
    arguments, kind, word = BAD[case]
    with pytest.raises(kind) as failure:
        Accelerator(**arguments)
    assert word in failure.value.asked + failure.value.found


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_variables_that_cannot_be_met_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "true")
    with pytest.raises(UsageError):
        Accelerator()


def test_a_plan_beside_another_is_refused(monkeypatch):
    monkeypatch.setenv("PACELINE_PLAN", json.dumps(asdict(Plan.parse("shard=2"))))
    with pytest.raises(PlanError, match="same plan"):
        Accelerator(plan="replicate=2")


def test_a_second_model_is_refused_while_the_first_trains():
    forget()
    accelerator = Accelerator(cpu=True)
    first, second = (torch.nn.Linear(2, 1) for _ in range(2))
    accelerator.prepare(first, torch.optim.SGD(first.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="in one call"):
        accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))


def test_objects_may_come_one_after_another():
    forget()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    assert accelerator.job is None
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    assert torch.equal(model.weight, before - 0.4)
    assert accelerator.job.step_number == 1
    accelerator.save_model(model, Path(tempfile.mkdtemp()))
