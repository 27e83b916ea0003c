"""An update that the device leaves out by itself, where the gradient's norm is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import LossError
from paceline.nouns.plan import Plan
from paceline.parallel.loss_scale import can_leave_out, is_fused_on, left_out_if
from paceline.train import step as step_module
from paceline.train.job import Job

from support.ranks import preload, run_ranks

preload("paceline.train.job", "paceline.parallel.shard.fsdp_adapter")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def trained(kind, is_bad, steps=3):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3))
    optimizer = kind([weight], lr=0.1, fused=True)
    for number in range(steps):
        weight.grad = torch.full_like(weight, number + 1.0)
        with left_out_if(optimizer, torch.tensor(is_bad(number))):
            optimizer.step()
    state = optimizer.state[weight]
    return {"weight": weight.detach(), **{name: value.clone() for name, value in state.items()}}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_neither_parameters_nor_state_change(kind, bad):
    found = trained(kind, lambda number: number in bad)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3))
    optimizer = kind([weight], lr=0.1, fused=True)
    for number in range(3):
        weight.grad = torch.full_like(weight, number + 1.0)
        if number not in bad:
            optimizer.step()
    assert torch.equal(found["weight"], weight)
    for name, value in optimizer.state[weight].items():
        assert torch.equal(found[name], value), name
    if len(bad) == 3:
        assert float(found["step"]) == 0
        assert not found["exp_avg"].any()


def test_an_error_leaves_no_flag_behind():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    with pytest.raises(ZeroDivisionError), left_out_if(optimizer, torch.tensor(True)):
        raise ZeroDivisionError
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def other():
    return [nn.Parameter(torch.ones(1))]


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "device", "can"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), CPU, True),
        (lambda p: torch.optim.Adam(p, fused=True), CPU, True),
        (lambda p: torch.optim.AdamW(p, fused=True), GPU, False),  # its parameters are on the host
        (lambda p: torch.optim.AdamW(p), CPU, False),
        (lambda p: Own(p, fused=True), CPU, False),  # its step may do more
        (lambda p: torch.optim.SGD(p, fused=True), CPU, False),
        (lambda p: torch.optim.AdamW([{"params": p}, {"params": other(), "fused": False}], fused=True), CPU, False),
    ],
)
def test_which_optimizers_can(make, device, can):
    optimizer = make([nn.Parameter(torch.zeros(1))])
    assert is_fused_on(optimizer, device) is can
    assert not can_leave_out(optimizer, CPU)  # the host need not wait there


class Copied:
    """`HostCopy` where there is nothing to wait for."""

    def __init__(self, numel, dtype, device):
        pass

    def begin(self, make):
        self.numbers = make()

    def read(self):
        return self.numbers.tolist()


def loss(model, batch):
    # The root is finite at 0, and its gradient is not.
    root = (model[0].weight.sum() * 0 + 1 - batch["hidden"]).sqrt()
    return (model(batch["x"]).square().sum(-1) + root).sum(), len(batch["x"])


def rows(bad):
    random = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=random), "hidden": torch.tensor(float(bad))} for _ in range(4)]


def stepped(rank, line, guarded):
    api.init()
    if guarded:
        step_module.HostCopy = Copied
        step_module.can_leave_out = is_fused_on
    workload = paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        data=rows(0),
        batch_size=4,
        steps=2,
        clip_norm=0.5,
    )
    job = Job(workload, Plan.parse(line))
    batches = job.batches()
    first = next(batches)
    norms = [(job.step(first), job.last.gradient_norm)]
    before = [tensor.detach().clone() for tensor in job.parallel.placed.updated().values()]
    bad = [{**piece, "hidden": piece["hidden"] + 1} for piece in first.microbatches]
    found = None
    try:
        job.step(type(first)(bad, first.positions, first.longest))
    except LossError as error:
        found = str(error)
    after = [tensor.detach().clone() for tensor in job.parallel.placed.updated().values()]
    is_same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    norms.append((job.step(first), job.last.gradient_norm))
    return norms, is_same, found


@pytest.mark.parametrize("line", ["replicate=1", "replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2"])
def test_a_step_is_left_out_as_where_the_host_reads_first(line):
    ranks = 2 if "2" in line else 1
    guarded = run_ranks(ranks, stepped, line, True)
    assert guarded == run_ranks(ranks, stepped, line, False)
    for norms, is_same, found in guarded:
        assert "the gradient's norm should be a finite number" in found
        assert "the parameters were left as they were" in found
        assert is_same
        assert all(norm > 0 for _, norm in norms)
