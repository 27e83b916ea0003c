"""An optimizer that looks beyond an element is found out before the first step."""

import pytest
import torch
from torch import nn, optim

from paceline.nouns.errors import PlanError
from paceline.parallel.elementwise import find_whole_parameters

from support.whole_optimizers import GlobalStep, Lamb, MuonAdamW

PARAMETERS = list(nn.Linear(4, 3).parameters())
MATRIX, VECTOR = PARAMETERS


class Trust(optim.Optimizer):
    """LAMB without the moments: the update is as long as the parameter."""

    def __init__(self, parameters, lr=1e-3, trust=True):
        super().__init__(parameters, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / parameter.grad.norm() if group["trust"] else 1.0
                parameter -= group["lr"] * ratio * parameter.grad


class ByRow(Trust):
    """The norms are those of rows, so rows are all it needs."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm(dim=-1, keepdim=True)


class MatricesAlone(optim.Optimizer):
    """As people write Muon: what is no matrix is updated element by element."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                length = parameter.grad.norm() if parameter.dim() == 2 else 1.0
                parameter -= group["lr"] * parameter.grad / length


class Neighbors(GlobalStep):
    """Two groups meet, though the parameters of a group don't."""

    @torch.no_grad()
    def step(self, closure=None):
        lengths = [group["params"][0].grad.norm() for group in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / parameter.grad.norm() / max(lengths)


class Named(optim.SGD):
    """Can't be made from its defaults."""

    def __init__(self, parameters, run_name):
        super().__init__(parameters, lr=0.1)


class Declared(Named):
    needs_whole_parameters = True


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.SGD(PARAMETERS, lr=0.1, momentum=0.9, nesterov=True),
        optim.Adam(PARAMETERS, amsgrad=True, fused=True),
        optim.AdamW(PARAMETERS, lr=torch.tensor(1e-3)),
        optim.RMSprop(PARAMETERS, centered=True),
        optim.Rprop(PARAMETERS),
        Trust([{"params": PARAMETERS, "trust": False}]),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_elementwise_optimizers_take_parts_and_stay_unchanged(optimizer):
    random, before = torch.get_rng_state(), [parameter.detach().clone() for parameter in PARAMETERS]
    assert find_whole_parameters(optimizer, ["tensor"]) == set()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(parameter, old) for parameter, old in zip(PARAMETERS, before, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "whole"),
    [
        (optim.Adafactor(PARAMETERS), {MATRIX, VECTOR}),
        (optim.Muon([MATRIX]), {MATRIX}),
        (Lamb(PARAMETERS), {MATRIX, VECTOR}),
        (Trust(PARAMETERS), {MATRIX, VECTOR}),
        (Trust(PARAMETERS, lr=0.0), {MATRIX, VECTOR}),
        (Trust([{"params": [VECTOR], "trust": False}, {"params": [MATRIX]}]), {MATRIX}),
        (MatricesAlone(PARAMETERS), {MATRIX}),
        (MuonAdamW(nn.Linear(4, 3)), None),
        (Declared(PARAMETERS, "first"), {MATRIX, VECTOR}),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.param_groups[0]['lr']}" if hasattr(value, "step") else "",
)
def test_elementwise_check_finds_other_optimizers_at_rate_0_too(optimizer, whole):
    if whole is None:  # all that it has
        whole = {*optimizer.param_groups[0]["params"], *optimizer.others.param_groups[0]["params"]}
        assert len(whole) == 2
    assert find_whole_parameters(optimizer, ["shard"]) == whole


def test_rows_are_enough_for_some_where_shard_alone_cuts():
    optimizer = ByRow([MATRIX])
    assert find_whole_parameters(optimizer, ["shard"]) == set()
    assert find_whole_parameters(optimizer, ["shard", "tensor"]) == {MATRIX}


@pytest.mark.parametrize(
    "optimizer", [GlobalStep(PARAMETERS), Neighbors([{"params": [MATRIX]}, {"params": [VECTOR]}])], ids=["one", "two"]
)
def test_what_couples_parameters_is_refused(optimizer):
    with pytest.raises(PlanError, match="updates a parameter from the others") as caught:
        find_whole_parameters(optimizer, ["tensor"])
    assert "to clip by the norm of all gradients, set clip_norm in the workload" in caught.value.fix


@pytest.mark.parametrize("optimizer", [optim.LBFGS(PARAMETERS), Named(PARAMETERS, "first")])
def test_what_cannot_be_tried_is_refused(optimizer):
    with pytest.raises(PlanError, match="it can't be tried on a small tensor"):
        find_whole_parameters(optimizer, ["tensor"])
