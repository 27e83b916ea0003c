"""An optimizer made of others is saved whole, or refused before the first step."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.manifest import read_manifest, sealed
from paceline.comm import api
from paceline.nouns.errors import CheckpointError, PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.ranks import run_ranks


class Muon(torch.optim.Muon):
    """As people write it: AdamW for what is no matrix is kept inside, and stepped with it."""

    def __init__(self, model):
        parameters = list(model.parameters())
        super().__init__([p for p in parameters if p.dim() == 2], lr=0.01)
        self.others = torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.02)

    def step(self, closure=None):
        super().step()
        self.others.step()


class Chain(torch.optim.Optimizer):
    """Several as one, which shares their groups, so that a scheduler finds them."""

    def __init__(self, model):
        first, second = model[0].parameters(), model[2].parameters()
        self.chained = [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(second, lr=0.1, momentum=0.9)]
        super().__init__(self.chained[0].param_groups + self.chained[1].param_groups, {})
        self.param_groups = self.chained[0].param_groups + self.chained[1].param_groups

    def step(self, closure=None):
        for one in self.chained:
            one.step()


class Lookahead(torch.optim.Optimizer):
    """Has state of its own for the parameters of another."""

    def __init__(self, model):
        self.fast = torch.optim.AdamW(model.parameters(), lr=0.01)
        super().__init__(model.parameters(), {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        self.fast.step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("slow", p.detach().clone())
                state["count"] = state.get("count", 0) + 1
                if state["count"] % 2 == 0:
                    state["slow"] += 0.5 * (p - state["slow"])
                    p.copy_(state["slow"])


class Wrapped(torch.optim.Optimizer):
    """Shows the groups and the state of the one inside as its own."""

    def __init__(self, model):
        self.base = torch.optim.AdamW(model.parameters(), lr=0.01)
        super().__init__(model.parameters(), {"lr": 0.01})
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure=None):
        self.base.step()


class Twice(torch.optim.AdamW):
    """Two that keep the same of the same parameters."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.01)
        self.again = torch.optim.AdamW(model.parameters(), lr=0.02)

    def step(self, closure=None):
        super().step()
        self.again.step()


class Delegating(torch.optim.Optimizer):
    """Has no state of its own, and says that it does."""

    def __init__(self, model):
        self.inner = torch.optim.AdamW(model.parameters())

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        self.inner.step()


def make(optimizer, **parts):
    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    return paceline.Workload(
        model=model,
        loss=lambda model, batch: ((model(batch) - 1).square().sum(), len(batch)),
        optimizer=optimizer,
        data=list(torch.randn(24, 4, generator=torch.Generator().manual_seed(1))),
        batch_size=8,
        epochs=4,
        precision="float64",
        **parts,
    )


def job_of(optimizer, mesh=None, **parts):
    api.init()
    return Job(make(optimizer, **parts), Plan(mesh=mesh or f"replicate={api.size()}"))


def train(job, count):
    batches = job.batches()
    return [job.step(next(batches)) for _ in range(count)]


def save_and_go_on(rank, folder, optimizer, parts):
    job = job_of(optimizer, **parts)
    train(job, 5)
    job.save(folder)
    return train(job, 4), job.model[0].weight.detach()


def load_and_go_on(rank, folder, optimizer, parts, is_back):
    job = job_of(optimizer, **parts)
    if is_back:
        train(job, 7)
    job.load(folder)
    return train(job, 4), job.model[0].weight.detach()


def without(key):
    """Take a key of the state of every parameter out of a manifest."""

    def change(manifest):
        for content in (manifest["tensors"], manifest["optimizer"]["numbers"], manifest["optimizer"]["owners"]):
            for name in [name for name in content if name.startswith(f"optimizer/{key}/")]:
                del content[name]

    return change


def owned_by_the_first(manifest):
    manifest["optimizer"]["owners"] = dict.fromkeys(manifest["optimizer"]["owners"], 0)


@pytest.mark.parametrize(
    ("optimizer", "change", "found"),
    [
        (Muon, without("exp_avg_sq"), "it lacks exp_avg_sq"),
        (Chain, without("step"), "it lacks step"),
        (Lookahead, without("exp_avg"), "it lacks exp_avg"),
        (Wrapped, without("exp_avg"), "it lacks exp_avg"),
        (Wrapped, owned_by_the_first, None),
    ],
    ids=["beside", "in a list", "inside", "shared", "shared and whole"],
)
def test_composite_optimizer_load_refuses_an_incomplete_part(tmp_path, optimizer, change, found):
    job = job_of(optimizer)
    train(job, 2)
    job.save(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(sealed(manifest)))
    losses = train(job, 1)
    if found is None:
        job.load(tmp_path / "saved")
        assert train(job, 1) == losses
        return
    before = job.model[0].bias.detach().clone()
    with pytest.raises(CheckpointError, match=found):
        job.load(tmp_path / "saved")
    assert torch.equal(job.model[0].bias, before)
    train(job, 1)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", [Muon, Chain, Lookahead, Wrapped])
def test_all_of_it_comes_back(tmp_path, optimizer, ranks):
    folder, parts = str(tmp_path / "saved"), {"scheduler": step_lr, "clip_norm": 0.5}
    losses, weight = run_ranks(ranks, save_and_go_on, folder, optimizer, parts)[0]
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in read_manifest(tmp_path / "saved")["tensors"])
    for is_back in (False, True):
        again, same = run_ranks(ranks, load_and_go_on, folder, optimizer, parts, is_back)[0]
        assert again == losses
        assert torch.equal(same, weight)


def multi_step(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 8], 0.1)


def in_sequence(optimizer):
    schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), multi_step(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [2])


@pytest.mark.parametrize("scheduler", [multi_step, in_sequence])
def test_a_schedulers_milestones_come_back(tmp_path, scheduler):
    """Their steps are the keys of a dict, and JSON makes text of them."""
    optimizer, parts = adamw, {"scheduler": scheduler}
    before = save_and_go_on(0, str(tmp_path / "saved"), optimizer, parts)[0]
    assert load_and_go_on(0, str(tmp_path / "saved"), optimizer, parts, False)[0] == before


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def tensor_rate(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)


class ChainOfTensors(Chain):
    """Parts whose rates are tensors."""

    def __init__(self, model):
        super().__init__(model)
        for group in self.param_groups:
            group["lr"], group["foreach"] = torch.tensor(group["lr"]), False


class OnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """A person's own, which has no need of an argument."""

    def __init__(self, optimizer):
        self.values = [3.0]
        super().__init__(optimizer, patience=1)

    def step(self):
        self.values.append(2.0)
        super().step(self.values[-1])


@pytest.mark.parametrize("scheduler", [None, step_lr])
@pytest.mark.parametrize("optimizer", [tensor_rate, ChainOfTensors])
def test_a_rate_that_is_a_tensor_stays_one(tmp_path, optimizer, scheduler):
    job = job_of(optimizer, scheduler=scheduler)
    train(job, 3)
    job.save(tmp_path / "saved")
    rate = job.optimizer.param_groups[0]["lr"].clone()
    losses = train(job, 3)
    again = job_of(optimizer, scheduler=scheduler)
    again.load(tmp_path / "saved")
    assert torch.equal(again.optimizer.param_groups[0]["lr"], rate)
    assert train(again, 3) == losses


class Counting(torch.optim.SGD):
    """Keeps a list that grows, and a value that is None at first, in its groups."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        self.param_groups[0].update(seen=[0], best=None)

    def step(self, closure=None):
        group = self.param_groups[0]
        group["seen"].append(len(group["seen"]))
        group["best"] = 1 / len(group["seen"])
        group["lr"] = 0.1 * group["best"]
        super().step()


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_custom_optimizer_values_in_groups_are_restored(tmp_path, is_back, steps):
    job = job_of(Counting)
    train(job, steps)
    job.save(tmp_path / "saved")
    losses = train(job, 3)
    again = job if is_back else job_of(Counting)
    again.load(tmp_path / "saved")
    assert again.optimizer.param_groups[0]["seen"] == list(range(steps + 1))
    assert train(again, 3) == losses


@pytest.mark.parametrize("is_back", [False, True])
def test_a_persons_own_scheduler_comes_back(tmp_path, is_back):
    parts = {"scheduler": OnPlateau}
    before = save_and_go_on(0, str(tmp_path / "saved"), adamw, parts)[0]
    assert load_and_go_on(0, str(tmp_path / "saved"), adamw, parts, is_back)[0] == before


def norm_after_clipping(optimizer):
    api.init()
    job = job_of(optimizer, clip_norm=1e-3)
    job.step(next(job.batches()))
    return sum(float(p.grad.square().sum()) for p in job.model.parameters()) ** 0.5


def test_gradients_of_the_inner_one_are_clipped_too():
    assert norm_after_clipping(Muon) == pytest.approx(1e-3, rel=1e-3)


def test_two_that_keep_the_same_are_refused(tmp_path):
    job = job_of(Twice)
    train(job, 1)
    with pytest.raises(WorkloadError, match="two of the optimizers in Twice keep it"):
        job.save(tmp_path / "saved")


def test_one_that_hides_its_state_is_refused_at_the_start():
    with pytest.raises(WorkloadError, match="Delegating has no attributes of its own"):
        job_of(Delegating)


def refused(rank, mesh):
    api.init()
    with pytest.raises(PlanError, match="made of several") as error:
        job_of(Muon, mesh)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["shard=2", "pipeline=2"])
def test_an_axis_that_cuts_parameters_refuses_it(mesh):
    for text in run_ranks(2, refused, mesh):
        assert f"write replicate in place of {mesh[:-2]}" in text


def test_a_scheduler_outside_of_the_workload_works():
    job = job_of(lambda model: torch.optim.SGD(model.parameters(), 0.1), evaluation=list(torch.zeros(4, 4)))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0, threshold=1e9)
    for batch in job.batches():
        job.step(batch)
        scheduler.step(job.evaluate()["loss"])
    assert job.optimizer.param_groups[0]["lr"] < 1e-3


def test_unsaveable_scheduler_state_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    with pytest.raises(WorkloadError, match="the scheduler's state should be something that JSON can keep"):
        job_of(lambda model: torch.optim.SGD(model.parameters(), 0.1), scheduler=WithFunction)


class WithFunction(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer):
        self.function = print
        super().__init__(optimizer, 1)
