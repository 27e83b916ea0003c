"""Linear layers that multiply in float8: how a batch is split does not matter, and what can't be is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError, PlanError, WorkloadError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.parallel import float8
from paceline.parallel.float8 import multiply_as_gpu, use_float8
from paceline.profile.simulate import simulate
from paceline.train.job import Job
from paceline.verify.prove import check_plan

from support.ranks import preload, run_ranks

pytest.importorskip("torchao.float8", reason="torchao is not installed")
preload("paceline.train.job", "paceline.parallel.shard.fsdp_adapter")
CPU = torch.device("cpu")
ROWWISE = Plan(float8="rowwise")


class Net(nn.Module):
    """Blocks of two linear layers, and a head that has the embedding's weight."""

    def __init__(self, words=64, width=32):
        super().__init__()
        self.words = nn.Embedding(words, width)
        blocks = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        hidden = self.words(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def loss(model, words):
    scores, targets = model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten()
    return F.cross_entropy(scores, targets, reduction="sum"), targets.numel()


def workload(precision="float32"):
    data = list(torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(0)))
    sgd = torch.optim.SGD
    return paceline.Workload(
        model=Net,
        loss=loss,
        optimizer=lambda m: sgd(m.parameters(), 1e-3),
        data=data,
        batch_size=6,
        precision=precision,
    )


def trained(rank, lines, precision="float32"):
    api.init()
    losses = []
    for line in lines:
        job = Job(workload(precision), Plan.parse(line))
        losses.append([job.step(batch) for batch in job.batches()])
    return losses


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_ranks_end_where_one_does(recipe):
    wide, alone = run_ranks(1, trained, ["replicate=1", f"replicate=1,float8={recipe}"])[0]
    axes = ("replicate=2", "shard=2", "shard=2,zero=1", "replicate=2,checkpointing=selective")
    for losses in run_ranks(2, trained, [f"{axis},float8={recipe}" for axis in axes])[0]:
        torch.testing.assert_close(losses[0], alone[0], rtol=1e-6, atol=0)
        # Sums in another order differ in their last bits, and then some numbers are rounded to the next float8.
        torch.testing.assert_close(losses, alone, rtol=1e-3, atol=0)
    assert abs(wide[0] - alone[0]) > 1e-4 * wide[0]  # it is rounded at all


def test_the_largest_number_of_a_batch_is_not_looked_at():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    use_float8(model, ROWWISE, CPU, is_real=True)
    rows = torch.randn(4, 32)
    others = torch.cat([rows, 1000 * torch.randn(4, 32)])
    assert torch.equal(model(rows), model(others)[:4])


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_it_goes_with_bf16(recipe):
    (losses,) = run_ranks(1, trained, [f"replicate=1,float8={recipe}"], "bf16")[0]
    (wide,) = run_ranks(1, trained, ["replicate=1"])[0]
    torch.testing.assert_close(losses, wide, rtol=0.02, atol=0)
    assert losses != wide


def test_parameters_keep_their_names_and_stay_tied():
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    notices = use_float8(model, ROWWISE, CPU, is_real=True)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is model.words.weight
    assert {type(layer).__name__ for layer in (model.head, model.blocks[0][1])} == {"Float8Linear"}
    assert notices == ["float8=rowwise is only emulated on a CPU: the same rounding, and more time"]


def test_layers_that_do_not_fit_are_left_and_said():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10))
    (notice,) = use_float8(model, ROWWISE, torch.device("cpu"), is_real=False)
    assert type(model[1]) is nn.Linear
    assert "leaves 1 of 2 linear layers as they are, 1: sizes are no multiples of 16" in notice


@pytest.mark.parametrize("is_gpus", [False, True])
def test_a_step_that_is_predicted_has_a_gpus_products(is_gpus, monkeypatch):
    called = []
    product = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **named: called.append(1) or product(*args, **named))
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(32, 32))
        use_float8(model, ROWWISE, CPU, is_real=False)
        if is_gpus:
            multiply_as_gpu(model)
        model(torch.randn(16, 32)).sum().backward()
    assert len(called) == (3 if is_gpus else 0)


def test_a_gpus_step_is_predicted():
    """As many operations, and what a product's backward pass needs is kept as it was."""
    found = [simulate(workload("bf16"), Plan(float8=recipe), device="cuda") for recipe in ("off", "rowwise")]
    assert found[0].flops == found[1].flops
    assert found[1].notices == []


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))


def without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    use_float8(nn.Sequential(nn.Linear(32, 32)), ROWWISE, CPU, is_real=True)


def on_an_older_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    use_float8(nn.Sequential(nn.Linear(32, 32)), ROWWISE, torch.device("cuda"), is_real=True)


def on_amd(monkeypatch, architecture, name):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=architecture))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    float8._check_device("asked", torch.device("cuda"))


def on_an_older_amd_gpu(monkeypatch):
    on_amd(monkeypatch, "gfx90a:sramecc+:xnack-", "AMD Instinct MI250X")


def of_model(model):
    return lambda monkeypatch: use_float8(model(), ROWWISE, CPU, is_real=True)


@pytest.mark.parametrize(
    ("ask", "kind", "found", "fix"),
    [
        (without_torchao, PlanError, "it needs torchao", "pip install 'paceline[lowbits]'"),
        (on_an_older_gpu, PlanError, "A100 has no float8: its compute capability is 8.0, below 8.9", "bf16"),
        (on_an_older_amd_gpu, PlanError, "AMD Instinct MI250X has no float8: it is gfx90a\n", "bf16"),
        (of_model(lambda: nn.Sequential(nn.Linear(10, 10))), WorkloadError, "no nn.Linear whose sizes", "leave float8"),
        (of_model(lambda: nn.Linear(32, 32)), WorkloadError, "no nn.Linear whose sizes", "leave float8 out"),
        (of_model(lambda: nn.Sequential(Conv1D())), WorkloadError, "Conv1D, as in its GPT-2, is none", "leave float8"),
        (of_model(lambda: nn.Sequential(nn.Linear(32, 32)).double()), PlanError, "0.weight is of float64", "'bf16'"),
        (lambda _: Plan.parse("tensor=2,float8=rowwise"), PlanError, "the model runs as a graph", "in place of tensor"),
        (lambda _: Plan.parse("pp=2,float8=rowwise"), PlanError, "the model runs as a graph", "in place of pipeline"),
        (lambda _: Plan.parse("float8=tensorwise"), PlanError, "off, rowwise, rowwise_with_gw_hp", "write one"),
        (lambda _: check_plan_of_loop(ROWWISE), PlanError, "used as they are", "convert_to_float8_training"),
        (lambda _: check_plan(ROWWISE), PlanError, "verify computes in float64", "without float8"),
    ],
)
def test_what_can_not_be_is_refused(ask, kind, found, fix, monkeypatch):
    with pytest.raises(PacelineError) as caught:
        ask(monkeypatch)
    assert type(caught.value) is kind
    assert found in str(caught.value)
    assert fix in str(caught.value)


def test_a_new_gpu_is_not_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    float8._check_device("asked", torch.device("cuda"))
    on_amd(monkeypatch, "gfx942:sramecc+:xnack-", "AMD Instinct MI300X")
