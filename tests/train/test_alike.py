"""State of optimizers and schedulers comes back from JSON as it was, and what is another's is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from paceline.nouns.errors import CheckpointError
from paceline.train.alike import StateCheck, check_groups, is_like, load_scheduler, scheduler_state

MAKE = {
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5], gamma=0.5),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [2, 3])], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)


def rates(own, scheduler, steps):
    seen = []
    for _ in range(steps):
        own.step()
        scheduler.step()
        seen.append(own.param_groups[0]["lr"])
    return seen


def as_saved(scheduler):
    return json.loads(json.dumps(scheduler.state_dict()))


@pytest.mark.parametrize("name", MAKE)
def test_a_scheduler_goes_on_as_if_it_had_not_been_saved(name):
    whole = optimizer()
    undisturbed = rates(whole, MAKE[name](whole), 10)
    before = optimizer()
    scheduler = MAKE[name](before)
    first = rates(before, scheduler, 4)
    after = optimizer()
    again = MAKE[name](after)
    state = scheduler_state(again, as_saved(scheduler))
    after.load_state_dict(before.state_dict())
    load_scheduler(again, state)
    assert first + rates(after, again, 6) == undisturbed


def test_a_scheduler_on_a_plateau_goes_on():
    def losses(scheduler, own, values):
        for value in values:
            scheduler.step(value)
        return own.param_groups[0]["lr"]

    whole, own, after = optimizer(), optimizer(), optimizer()
    make = lambda o: schedulers.ReduceLROnPlateau(o, patience=1)  # noqa: E731
    undisturbed = losses(make(whole), whole, [3, 2, 2, 2, 2, 2])
    scheduler, again = make(own), make(after)
    losses(scheduler, own, [3, 2, 2])
    state = scheduler_state(again, as_saved(scheduler))
    load_scheduler(again, state)
    assert losses(again, after, [2, 2, 2]) == undisturbed < 1


def forged(**changes):
    return {**as_saved(schedulers.StepLR(optimizer(), 3)), **changes}


OTHERS = {
    "another kind": (as_saved(schedulers.ExponentialLR(optimizer(), 0.9)), "only the workload's has 'step_size'"),
    "a kind with more": (forged(T_max=3), "only the checkpoint's has 'T_max'"),
    "a step of text": (forged(last_epoch="x"), "its 'last_epoch' is 'x', here it is 0"),
    "a rate of text": (forged(base_lrs=["x"]), "its 'base_lrs' is"),
    "rates of two groups": (forged(base_lrs=[0.1, 0.1]), "its 'base_lrs' is"),
    "a rate of nothing": (forged(gamma=None), "its 'gamma' is None"),
    "a rate that is no number": (forged(gamma=math.nan), "its 'gamma' is nan"),
    "yes for a number": (forged(step_size=True), "its 'step_size' is True"),
    "another form": ({}, "only the workload's has 'base_lrs'"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_schedulers_state_is_refused(case):
    state, said = OTHERS[case]
    with pytest.raises(CheckpointError) as caught:
        scheduler_state(schedulers.StepLR(optimizer(), 3), state)
    assert said in caught.value.found


def test_milestones_that_are_no_numbers_are_refused():
    scheduler = schedulers.MultiStepLR(optimizer(), [2])
    with pytest.raises(CheckpointError, match="milestones"):
        scheduler_state(scheduler, {**as_saved(scheduler), "milestones": {"soon": 1}})


class Own:
    """A person's scheduler, with a state of its own."""

    def __init__(self, at):
        self.at = at

    def step(self):
        self.at["step"] += 1

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = {"step": state["step"], "seen": state["seen"] + []}


def test_a_persons_own_scheduler_judges_for_itself():
    own = Own({"step": 0, "seen": []})
    load_scheduler(own, scheduler_state(own, {"step": 3, "seen": [1, 2], "more": None}))
    assert own.at == {"step": 3, "seen": [1, 2]}
    with pytest.raises(CheckpointError, match="KeyError: 'seen'"):
        load_scheduler(own, scheduler_state(own, {"step": 3}))


def test_settings_of_groups_are_held_against_the_optimizers():
    group = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).param_groups[0]
    saved = {**{key: value for key, value in group.items() if key != "params"}, "betas": [0.9, 0.99]}
    check_groups([{**saved, "parameters": ["weight"], "foreach": True, "initial_lr": 0.1}], [group])
    wrong = {"lr": "x", "betas": [0.9], "eps": None, "weight_decay": [1], "maximize": 1, "amsgrad": "no"}
    for key, value in wrong.items():
        with pytest.raises(CheckpointError, match=f"its '{key}' is"):
            check_groups([{**saved, key: value}], [group])


KINDS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "NAdam": {},
    "RAdam": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 2)])
def test_a_parameters_state_must_be_whole(kind, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    own = getattr(torch.optim, kind)([parameter], **KINDS[kind])
    parameter.grad = torch.ones(shape)
    own.step()
    state, settings = dict(own.state[parameter]), own.param_groups[0]
    StateCheck(own).check(0, settings, "w", parameter.detach(), state)
    tensors = [key for key, value in state.items() if value.numel() in (1, parameter.numel())]
    for key in tensors:
        with pytest.raises(CheckpointError, match=f"it lacks {key}"):
            StateCheck(own).check(0, settings, "w", parameter.detach(), {k: v for k, v in state.items() if k != key})
        with pytest.raises(CheckpointError, match=f"its {key} has 7 elements"):
            StateCheck(own).check(0, settings, "w", parameter.detach(), {**state, key: torch.ones(7)})
    assert tensors


def test_of_a_persons_own_optimizer_nothing_is_known():
    class Mine(torch.optim.SGD):
        pass

    Mine.__module__ = "mine"
    StateCheck(Mine([torch.nn.Parameter(torch.ones(2))])).check(0, {}, "w", torch.ones(2), {"anything": torch.ones(9)})


def test_what_is_set_later_can_be_anything():
    assert is_like(3, None)
    assert is_like([1, 2], [])
    assert is_like("x", object())
    assert is_like(0.1, torch.tensor(0.3))
    assert not is_like("x", torch.tensor(0.3))
