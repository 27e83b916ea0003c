"""An optimizer that looks beyond an element is found out before the first step."""

import pytest
import torch
from torch import nn, optim

from paceline.nouns.errors import PlanError
from paceline.parallel.elementwise import check_optimizer

PARAMETERS = list(nn.Linear(4, 3).parameters())
MATRIX = [nn.Parameter(torch.ones(4, 4))]


class Lamb(optim.Optimizer):
    """You et al. 2020 without the moments: the update is as long as the parameter."""

    def __init__(self, parameters, lr=1e-3, trust=True):
        super().__init__(parameters, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / parameter.grad.norm() if group["trust"] else 1.0
                parameter -= group["lr"] * ratio * parameter.grad


class Named(optim.SGD):
    """Can't be made from its defaults."""

    def __init__(self, parameters, run_name):
        super().__init__(parameters, lr=0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.SGD(PARAMETERS, lr=0.1, momentum=0.9, nesterov=True),
        optim.Adam(PARAMETERS, amsgrad=True, fused=True),
        optim.AdamW(PARAMETERS, lr=torch.tensor(1e-3)),
        optim.RMSprop(PARAMETERS, centered=True),
        optim.Rprop(PARAMETERS),
        Lamb([{"params": PARAMETERS, "trust": False}]),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_elementwise_optimizers_pass_and_leave_no_trace(optimizer):
    random, before = torch.get_rng_state(), [parameter.detach().clone() for parameter in PARAMETERS]
    check_optimizer(optimizer, "tensor")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(parameter, old) for parameter, old in zip(PARAMETERS, before, strict=True))


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.Adafactor(PARAMETERS),
        optim.Muon(MATRIX),
        Lamb(PARAMETERS),
        Lamb(PARAMETERS, lr=0.0),
        Lamb([{"params": PARAMETERS[:1], "trust": False}, {"params": PARAMETERS[1:]}]),
    ],
    ids=lambda optimizer: f"{type(optimizer).__name__}-{optimizer.param_groups[0]['lr']}",
)
def test_others_are_refused_even_where_the_schedule_begins_at_0(optimizer):
    with pytest.raises(PlanError, match="updates an element from the others of its parameter"):
        check_optimizer(optimizer, "tensor")


@pytest.mark.parametrize("optimizer", [optim.LBFGS(PARAMETERS), Named(PARAMETERS, "first")])
def test_what_cannot_be_tried_is_refused(optimizer):
    with pytest.raises(PlanError, match="it can't be tried on a small matrix"):
        check_optimizer(optimizer, "tensor")
