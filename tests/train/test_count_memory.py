"""What a rank's memory holds: by kind, under plans, and what is read of files that others wrote."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.train.count_memory import count_memory
from paceline.train.memory_file import read_memory, write_memory

from support.jobs import paceline, write_workload

CPU = torch.device("cpu")
# Of the workload's model: Linear(4, 8) and Linear(8, 1) in float64.
PARAMETERS = 8 * (4 * 8 + 8 + 8 + 1)


def test_each_storage_counts_once_as_the_first_kind():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.BatchNorm1d(64, affine=False))
    tied = torch.nn.Linear(64, 64, bias=False)
    tied.weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).pow(2).sum().backward()
    optimizer.step()
    found = count_memory([model, tied], optimizer, CPU)
    assert found["parameters"] == 4 * 64 * 64
    assert found["gradients"] == 4 * 64 * 64
    assert found["buffers"] == 4 * 64 * 2 + 8
    assert found["optimizer state"] == 2 * 4 * 64 * 64 + 4
    assert found["device"] == "cpu"
    assert found["peak"] > 50 * 2**20


def test_what_lies_on_another_device_is_not_of_this_one():
    model = torch.nn.Linear(4, 4, device="meta")
    found = count_memory([model], torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    assert (found["parameters"], found["optimizer state"]) == (0, 0)


class Wrapper(torch.Tensor):
    """A tensor without a storage of its own, as those of quantization libraries."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(args[0].shape)


def test_a_tensor_without_a_storage_ends_no_job():
    model = torch.nn.Linear(4, 4)
    model.register_buffer("wrapped", Wrapper((8, 8)))
    found = count_memory([model], torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    assert (found["parameters"], found["buffers"]) == (4 * 20, 0)


# What two ranks hold together between two steps. Under every ZeRO stage parameters are gathered within a step alone.
PLANS = {"replicate=2": 2, "shard=2,zero=1": 1, "shard=2": 1}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_hold_what_the_plan_leaves_them(plan, tmp_path):
    assert paceline(tmp_path, "run", "--plan", plan, "--job", "a", write_workload(tmp_path)).code == 0
    rows = read_memory(tmp_path / "runs/a", 2)
    assert [(row.rank, row.step, row.device) for row in rows] == [(0, 2, "cpu"), (1, 2, "cpu")]
    held = sum(row.by_kind["parameters"] for row in rows)
    padding = 2 * 8 * 9  # rows that no rank needs, so that all have equally many
    assert PLANS[plan] * PARAMETERS <= held <= PLANS[plan] * PARAMETERS + padding
    moments = sum(row.by_kind["optimizer state"] for row in rows)
    counters = 2 * 4 * 8
    assert 2 * PLANS[plan] * PARAMETERS <= moments <= 2 * PLANS[plan] * PARAMETERS + 2 * padding + counters
    assert all(row.by_kind["gradients"] > 0 for row in rows)
    assert all(row.peak == sum(row.by_kind.values()) for row in rows)


GOOD = {"version": 1, "step": 2, "device": "cpu", "parameters": 1, "buffers": 2, "gradients": 3, "optimizer state": 4}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 1}', json.dumps({**GOOD, "rank": 0, "peak": -1}),
     json.dumps({**GOOD, "rank": 0, "peak": 20, "version": 2}), json.dumps({**GOOD, "rank": 0, "peak": "20"})],
)  # fmt: skip
def test_a_damaged_file_is_passed_over(content, tmp_path):
    write_memory(tmp_path, 1, {**GOOD, "peak": 20})
    (tmp_path / "memory/0.json").write_text(content)
    (tmp_path / "memory/x.json").write_text(content)
    assert [(row.rank, row.by_kind["rest"]) for row in read_memory(tmp_path, 2)] == [(1, 10)]


def test_memory_of_ranks_of_an_earlier_larger_start_is_left_out(tmp_path):
    for rank in range(4):
        write_memory(tmp_path, rank, {**GOOD, "peak": 20})
    assert [row.rank for row in read_memory(tmp_path, 2)] == [0, 1]


def test_a_folder_that_cant_be_written_is_no_fault(tmp_path):
    (tmp_path / "memory").write_text("")
    write_memory(tmp_path, 0, {**GOOD, "peak": 20})
    assert read_memory(tmp_path, 1) == []
