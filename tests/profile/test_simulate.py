"""A step without values holds what a real one holds, computes what it computes and sends what it sends."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from compare import planner, planner_models
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.profile import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS
from paceline.plan.memory import memory_of
from paceline.profile.simulate import simulate

from support.benchmarks import ENVIRONMENT
from support.simulated import check_simulation

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "mlp" else SLOW) for name in planner_models.MODELS]
)
def test_one_process(name):
    check_simulation(planner_models.workload, name, "replicate=1", {})


@SLOW
@pytest.mark.parametrize(
    "parts",
    [
        {"precision": "bf16"},
        {"precision": "float64", "optimizer": "sgd"},
        {"micro_batch_size": 2, "clip_norm": 1.0, "optimizer": "sgd", "precision": "fp16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["bert", "cnn"])
def test_one_process_in_other_ways(name, parts):
    check_simulation(planner_models.workload, name, "replicate=1", parts)


@SLOW
@pytest.mark.parametrize(
    "line", ["replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2", "replicate=1,checkpointing=full"]
)
def test_several_ranks(line):
    check_simulation(planner_models.workload, "bert", line, {})


@SLOW
def test_weights_are_not_gathered_for_half_precision():
    """A graph captured under autocast held casts of weights, which no rule splits: each step gathered them."""
    check_simulation(planner_models.workload, "mlp", "tensor=2", {"precision": "bf16", "optimizer": "sgd"})


PLANS = [
    *("replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2", "pipeline=2"),
    *("replicate=4", "shard=4", "tensor=4", "pipeline=4", "replicate=2,shard=2", "shard=2,tensor=2"),
    *("pipeline=2,tensor=2", "replicate=2,pipeline=2", "pipeline=2,schedule=zero_bubble"),
    *("tensor=2,sequence=on", "shard=2,checkpointing=full", "shard=2,checkpointing=selective"),
    *("pipeline=2,checkpointing=full", "shard=4,zero=1"),
]
HAS_BLOCKS = ("bert", "gpt2", "llama", "t5")
OTHERWISE = {"precision": "bf16", "optimizer": "sgd"}
# Every second plan with one model in turn, in one of two ways; PACELINE_MODELS=7 takes all plans, models and ways.
MODELS = int(os.environ.get("PACELINE_MODELS", "1"))
TAKEN = range(0, len(PLANS), 2 if MODELS == 1 else 1)


@pytest.mark.integration
@pytest.mark.parametrize("number", TAKEN, ids=[PLANS[number] for number in TAKEN])
def test_models_under_plans(number):
    line = PLANS[number]
    names = HAS_BLOCKS if "checkpointing" in line or "4" in line else list(planner_models.MODELS)
    for turn in range(min(MODELS, len(names))):
        name = names[(number + turn) % len(names)]
        ways = [{}, OTHERWISE] if MODELS > 1 else [{} if number % 4 else OTHERWISE]
        for parts in ways:
            check_simulation(planner_models.workload, name, line, parts)


def small(**parts):
    usual = {
        "model": lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)),
        "loss": lambda model, batch: (model(batch).square().sum(), len(batch)),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "data": list(torch.randn(32, 64)),
        "batch_size": 16,
    }
    return paceline.Workload(**{**usual, **parts})


def test_whose_memory_it_is():
    memory = memory_of(simulate(small(data=list(torch.randn(512, 64)), batch_size=512), Plan()))
    size = (64 * 256 + 256 + 256 * 8 + 8) * 4
    held = dict(memory.between)
    assert held[PARAMETERS] == held[GRADIENTS] == size
    assert 2 * size <= held[OPTIMIZER] <= 2 * size + 4 * 4  # and the number of steps of each parameter
    names = {holder.name for holder in memory.holders}
    assert "0.weight" in names
    assert memory.at_peak[ACTIVATIONS] >= 512 * 256 * 4


@pytest.mark.parametrize(
    ("line", "transport", "times"), [("replicate=2", "auto", 4), ("replicate=2", "gloo", 0), ("replicate=1", "auto", 0)]
)
def test_what_ranks_of_a_host_share(line, transport, times):
    """Two halves of each rank's gradients, and little more."""
    shared = simulate(small(), Plan.parse(line, transport=transport)).shared_bytes
    size = (64 * 256 + 256 + 256 * 8 + 8) * 4
    assert times * size <= shared <= times * (size + 200)


def test_operations_are_counted():
    """Forward, and twice as much backward; but nobody wants the first layer's gradient of its input."""
    profile = simulate(small(), Plan())
    forward = 2 * 16 * (64 * 256 + 256 * 8)
    assert profile.flops == 3 * forward - 2 * 16 * 64 * 256
    assert sum(work.flops for work in profile.modules.values()) == profile.flops
    assert profile.modules["2"].flops == 3 * 2 * 16 * 256 * 8


def test_of_many_micro_batches_two_are_enough():
    workload = small(micro_batch_size=2)
    whole, brief = simulate(workload, Plan()), simulate(workload, Plan(), is_brief=True)
    assert memory_of(brief).peak == memory_of(whole).peak
    assert brief.flops == whole.flops
    assert len(brief.recording.events) < len(whole.recording.events)


@pytest.mark.parametrize(
    ("device", "parts", "batches"),
    [("cpu", {}, 1), ("cuda", {}, 2), ("cuda", {"micro_batch_size": 2}, 2), ("cuda", {"precision": "float64"}, 1)],
    ids=str,
)
def test_a_gpu_has_the_next_batch_too(device, parts, batches):
    workload = small(**parts)
    memory = memory_of(simulate(workload, Plan(), device=device))
    item_size = 8 if parts.get("precision") == "float64" else 4
    assert memory.at_peak[INPUTS] == batches * 16 * 64 * item_size


class Cubes(nn.Module):
    """A block with a function that a GPU's autocast widens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.pow(self.layer(x), 3.0) + x


def test_what_a_gpu_computes_again_is_widened_as_it_was():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList([Cubes(), Cubes(), Cubes()]), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    whole, again = (
        simulate(small(model=Stack, precision="bf16"), Plan(checkpointing=mode), device="cuda")
        for mode in ("none", "full")
    )
    assert again.flops > whole.flops


@pytest.mark.slow
def test_simulate_gpu_updates_all_at_once_and_keeps_small_masks():
    workload = planner_models.workload("bert")
    cpu, gpu = simulate(workload, Plan()), simulate(workload, Plan(), device="cuda")
    memory = memory_of(gpu)
    assert memory.reserved >= memory.peak
    assert memory.at_peak[ACTIVATIONS] < memory_of(cpu).at_peak[ACTIVATIONS]
    assert any("_foreach" in name for name in gpu.operations)
    assert not any("_foreach" in name for name in cpu.operations)


class Tied(nn.Module):
    """Tied weights, a frozen part, an integer and a complex parameter, and no layer at all in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.back = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.back.weight = self.words.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.none = nn.ModuleList()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        turned = Cube.apply(self.frozen(self.words(words))) * self.turn
        return self.back(turned.real)


class Cube(torch.autograd.Function):
    """Custom autograd."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values**3

    @staticmethod
    def backward(ctx, gradient):
        (values,) = ctx.saved_tensors
        return gradient * 3 * values**2


def test_an_unusual_model():
    data = list(torch.randint(0, 50, (32, 6)))
    workload = small(model=Tied, data=data, loss=lambda m, b: (F.cross_entropy(m(b).flatten(0, 1), b.flatten()), 1))
    held = memory_of(simulate(workload, Plan())).between
    assert held[PARAMETERS] == 50 * 16 * 4 + (16 * 16 + 16) * 4 + 3 * 8 + 16 * 8
    assert held[GRADIENTS] == 50 * 16 * 4 + 16 * 8


def test_a_step_that_does_not_fit_is_not_taken_to_its_end():
    data = list(torch.randn(512, 64))
    asked = []

    def loss(model, batch):
        asked.append(len(batch))
        return model(batch).square().sum(), len(batch)

    workload = small(data=data, batch_size=512, loss=loss)
    peak = memory_of(simulate(workload, Plan(), device="cuda")).peak
    taken = len(asked)
    assert memory_of(simulate(workload, Plan(), device="cuda", capacity=peak)).peak == peak
    with pytest.raises(WorkloadError, match=f"more than {peak - 1} bytes live at once"):
        simulate(workload, Plan(), device="cuda", capacity=peak - 1)
    asked.clear()
    with pytest.raises(WorkloadError, match="more than 1 bytes live at once"):
        simulate(workload, Plan(), device="cuda", capacity=1)
    assert len(asked) < taken


def test_simulate_refuses_a_large_step_even_if_error_is_caught():
    def loss(model, batch):
        try:
            many = batch.new_zeros(10**9)
        except Exception:
            many = batch
        return model(batch).square().sum() + 0 * many[0].sum(), len(batch)

    with pytest.raises(WorkloadError, match="live at once"):
        simulate(small(loss=loss), Plan(), device="cuda", capacity=10**9)


class Sparse(nn.Module):
    """Rows of an embedding, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows(words).mean(1))


def test_sparse_gradients_alone_and_on_several_ranks():
    words = list(torch.randint(0, 100, (32, 5)))
    workload = small(model=Sparse, data=words, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert memory_of(simulate(workload, Plan())).between[PARAMETERS] == (100 * 8 + 8 * 8 + 8) * 4
    with pytest.raises(WorkloadError, match=r"exchange the rows of rows\.weight"):
        simulate(workload, Plan.parse("replicate=2"))


def asks(model, batch):
    hidden = model(batch)
    rows = hidden[hidden.sum(1) > 0]  # how many rows depends on the values
    return rows.square().sum() + hidden.sum() * 0, len(batch)


def test_a_model_that_asks_for_values_is_measured_or_refused():
    profile = simulate(small(loss=asks), Plan())
    assert "a real step was measured" in profile.notices[0]
    assert memory_of(profile).peak > 0
    with pytest.raises(WorkloadError, match="the model asks for values"):
        simulate(small(loss=asks), Plan.parse("replicate=2"))


def test_a_branch_on_a_value_is_a_guess_and_says_so():
    def branches(model, batch):
        hidden = model(batch)
        return (hidden if bool(hidden.sum() > 0) else hidden * 2).square().sum(), len(batch)

    assert "is a guess" in simulate(small(loss=branches), Plan()).notices[0]


def test_a_loop_that_waits_for_a_value_ends():
    def waits(model, batch):
        hidden = model(batch)
        while bool((hidden == hidden).all()):
            if hidden.sum().item() != 1.0:
                break
        return hidden.square().sum(), len(batch)

    assert "a real step was measured" in simulate(small(loss=waits), Plan()).notices[0]


@pytest.mark.parametrize(
    ("line", "more", "device", "found"),
    [
        ("replicate=1,compile=on", {}, "cpu", "compile=on"),
        ("replicate=1,compile=blocks", {}, "cpu", "compile=blocks"),
        ("replicate=2", {"compression": "topk"}, "cpu", "compression=topk"),
    ],
)
def test_what_can_not_be_tried_out(line, more, device, found):
    with pytest.raises(PlanError, match=found):
        simulate(small(), Plan.parse(line, **more), device=device)


@SLOW
def test_seven_billion_parameters_take_seconds_and_little_memory(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    taken = planner.time_7b()
    assert taken["seconds"] < 60
    assert taken["resident_bytes"] < 4 * 2**30
