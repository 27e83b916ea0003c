"""Each kind of effect under each placement: to the numbers of one process, or refused, naming a plan that keeps it."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.parallel.effects import overlapping

from support.ranks import run_ranks

_PLANS = ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2")
_LOOP_PLANS = _PLANS[:-1]
_WHOLE = {"replicate=2"}
_OWNED = {"replicate=2", "shard=2,zero=1"}
_OWN_CODE = {"replicate=2", "shard=2", "shard=2,zero=1"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class Clamped(Net):
    def forward(self, x):
        return self.b(Clamp.apply(torch.tanh(self.a(x))))


class HookedActivation(Net):
    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.b(hidden)


class Projected(Net):
    """Its forward pass writes to a weight, by `.data` and in place."""

    def forward(self, x):
        self.a.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.b.weight.div_(self.b.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class Teacher(Net):
    """Its forward pass moves a second network after the first, as BYOL and MoCo do."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(8, 32).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
        return super().forward(x) + self.slow(x).mean(1, keepdim=True)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(16, 8, max_norm=0.5), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.words((x * 3).long().clamp(0, 15)).mean(1))


def changed(change):
    def model():
        net = Net()
        change(net)
        return net

    return model


def clip_by_value(net):
    net.a.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def normed(net):
    net.b.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))


def accumulated(net):
    def clamp(weight):
        weight.grad.clamp_(-0.01, 0.01)

    net.a.weight.register_post_accumulate_grad_hook(clamp)


def module_hook(net):
    net.b.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-0.01, 0.01),))


def module_pre_hook(net):
    net.b.register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-0.01, 0.01),))


def tied_by_data(net):
    net.c = nn.Linear(8, 32)
    net.c.weight.data = net.a.weight.data
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] + module.c(inputs[0]).mean(1, keepdim=True),))


def flat(net):
    net.all = nn.Parameter(torch.cat([net.a.weight.detach().flatten(), net.b.weight.detach().flatten()]))
    net.a.weight.data = net.all.data[:256].view(32, 8)
    net.b.weight.data = net.all.data[256:].view(4, 32)
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] + module.all.square().mean(),))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pre_hooked(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def normalize(optimizer, arguments, named):
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-6)

    optimizer.register_step_pre_hook(normalize)
    return optimizer


def post_hooked(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @torch.no_grad()
    def project(optimizer, arguments, named):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_((1 / parameter.norm()).clamp(max=1))

    optimizer.register_step_post_hook(project)
    return optimizer


def replaced_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = optimizer.step

    def step(closure=None):
        plain()
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_((1 / parameter.norm()).clamp(max=1))

    optimizer.step = step
    return optimizer


# The model, the optimizer, and the plans that keep the effect in a workload and in a loop.
EFFECTS = {
    "clipping hook": (changed(clip_by_value), sgd, _WHOLE, _OWNED),
    "norm hook": (changed(normed), sgd, _WHOLE, _OWNED),
    "post-accumulate hook": (changed(accumulated), sgd, _WHOLE, _OWNED),
    "module hook": (changed(module_hook), sgd, _OWN_CODE, _OWN_CODE),
    "module pre-hook": (changed(module_pre_hook), sgd, _OWN_CODE, _OWN_CODE),
    "autograd function": (Clamped, sgd, set(_PLANS), set(_LOOP_PLANS)),
    "tensor hook": (HookedActivation, sgd, _OWN_CODE, _OWN_CODE),
    # The workload is converted to float64, where parameters have memory of their own.
    "tied by data": (changed(tied_by_data), sgd, _OWNED, _WHOLE),
    "flat parameter": (changed(flat), sgd, _OWNED, _WHOLE),
    "optimizer pre-hook": (Net, pre_hooked, _WHOLE, _OWNED),
    "optimizer post-hook": (Net, post_hooked, _WHOLE, _OWNED),
    "replaced step": (Net, replaced_step, _WHOLE, _OWNED),
    "projected weights": (Projected, sgd, _OWNED, _OWNED),
    "moving teacher": (Teacher, sgd, {*_OWNED, "tensor=2"}, {*_OWNED, "tensor=2"}),
    "max_norm": (Renormed, sgd, set(), set()),
}


def samples():
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 8, generator=random, dtype=torch.float64)
    targets = torch.randn(20, 4, generator=random, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, targets)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def score(model, batch):
    return {"loss": loss(model, batch)}


def trained_workload(name, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    model, optimizer, _, _ = EFFECTS[name]
    workload = paceline.Workload(
        model=model, loss=loss, optimizer=optimizer, data=samples(), batch_size=8, epochs=2, precision="float64"
    )
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
    return job.evaluate(samples())["loss"]


def trained_loop(name, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    torch.manual_seed(0)
    make_model, make_optimizer, _, _ = EFFECTS[name]
    model = make_model().double()
    loader = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True)
    job, model, optimizer, loader = paceline.prepare(model, make_optimizer(model), loader)
    for _ in job.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            job.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
    return job.evaluate(samples(), score)["loss"]


FORMS = {"workload": trained_workload, "loop": trained_loop}


def outcomes(rank, form, plan):
    found = {}
    for name in EFFECTS:
        torch.set_default_dtype(torch.float64 if form == "loop" else torch.float32)
        try:
            found[name] = FORMS[form](name, plan)
        except PacelineError as error:
            found[name] = error.found, error.fix
    return found


@functools.cache
def in_one_process(form):
    (found,) = run_ranks(1, outcomes, form, "replicate=1")
    return found


CELLS = [("workload", plan) for plan in _PLANS] + [("loop", plan) for plan in _LOOP_PLANS]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_an_effect_is_kept_or_refused(cell):
    form, plan = cell
    for found in run_ranks(2, outcomes, form, plan):
        for name, outcome in found.items():
            kept_by = EFFECTS[name][2 if form == "workload" else 3]
            if plan in kept_by:
                assert outcome == pytest.approx(in_one_process(form)[name], rel=1e-9), name
            else:
                assert isinstance(outcome, tuple), f"{name} ends with {outcome}"
                assert ("replicate" if kept_by else "-n 1") in outcome[1], name


def test_storage_that_overlaps_is_found_by_its_bytes():
    memory = torch.zeros(12)
    parameters = {
        "rows": memory[:4].view(2, 2),
        "next": memory[4:8],
        "strided": memory[6:].as_strided((3,), (2,), 6),
        "last": memory[11:],
    }
    assert overlapping(parameters) == [("next", "strided")]
    assert overlapping({"first": memory, "second": memory[3:5], "third": memory[9:]}) == [
        ("first", "second"),
        ("first", "third"),
    ]


def hooked_late(rank, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    workload = paceline.Workload(
        model=Net, loss=loss, optimizer=sgd, data=samples(), batch_size=8, epochs=2, precision="float64"
    )
    job = paceline.distribute(workload)
    clip_by_value(job.model)
    try:
        for batch in job.batches():
            job.step(batch)
    except PacelineError as error:
        return error.found
    return job.evaluate(samples())["loss"]


def test_hooks_that_come_after_the_job_are_kept_too():
    expected = in_one_process("workload")["clipping hook"]
    for found in run_ranks(2, hooked_late, "replicate=2"):
        assert found == pytest.approx(expected, rel=1e-9)
    for found in run_ranks(2, hooked_late, "shard=2"):
        assert "a.weight has a hook on its gradient (<lambda> at" in found


def reached_twice(rank, accumulates):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net().double()
    clip_by_value(model)
    seen = []
    model.a.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad.sum())))
    job, model, optimizer = paceline.prepare(model, sgd(model))
    inputs = samples().tensors[0][:8][4 * rank :][: 8 // job.size]
    try:
        for factor in (1, 2):
            with job.accumulate(accumulates):
                job.backward(factor * model(inputs).square().mean(), weight=len(inputs))
        optimizer.step()
    except PacelineError as error:
        return str(error)
    return seen, float(model.a.weight.sum())


def test_a_hook_sees_the_whole_gradient_of_each_of_two_passes():
    ((expected, weight),) = run_ranks(1, reached_twice, False)
    for seen, found in run_ranks(2, reached_twice, False):
        assert seen == pytest.approx(expected, rel=1e-9)
        assert found == pytest.approx(weight, rel=1e-9)
    assert len(expected) == 2


def test_a_hook_and_two_passes_of_one_sum_are_refused():
    for found in run_ranks(2, reached_twice, True):
        assert "two have reached a.weight" in found
