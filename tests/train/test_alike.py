"""State of optimizers and schedulers comes back from JSON as it was, and what is another's is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from paceline.nouns.errors import CheckpointError
from paceline.train.alike import StateCheck, check_groups, in_types_of, is_like, load_scheduler, scheduler_state

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


class OnPlateau(schedulers.ReduceLROnPlateau):
    """A person's own, which finds its measure itself: torch's wants it as an argument, and no workload may have it."""

    measures = (3, 2, 2, 2, 2, 2)

    def step(self):
        super().step(self.measures[self.last_epoch])


class Remembering(schedulers.LRScheduler):
    """A person's own: a list that grows, something that is None at first, and pairs."""

    def __init__(self, optimizer):
        self.best, self.rates, self.pairs = None, [1.0], [(0, 0.0)]
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch:
            self.rates.append(self.rates[-1] * 0.9)
            self.pairs.append((self.last_epoch, self.rates[-1]))
            self.best = min(self.best or 9.0, self.rates[-1])
        return [self.rates[-1] for _ in self.optimizer.param_groups]


class Callable:
    """A person's own factor, with attributes that grow."""

    def __init__(self):
        self.seen = [0]

    def __call__(self, step):
        self.seen.append(step)
        return 1 / len(self.seen)


PERSONS = {
    "on a plateau": lambda o: OnPlateau(o, patience=1),
    "remembering": Remembering,
    "in a sequence": lambda o: schedulers.SequentialLR(o, [Remembering(o), schedulers.ConstantLR(o)], [9]),
    "a callable": lambda o: schedulers.LambdaLR(o, Callable()),
}


@pytest.mark.parametrize("name", PERSONS)
def test_custom_scheduler_continues_as_if_it_had_not_been_saved(name):
    make, whole, before, after = PERSONS[name], optimizer(), optimizer(), optimizer()
    undisturbed = rates(whole, make(whole), 6)
    scheduler, again = make(before), make(after)
    assert rates(before, scheduler, 3) == undisturbed[:3]
    state = scheduler_state(again, as_saved(scheduler))
    after.load_state_dict(before.state_dict())
    load_scheduler(again, state)
    assert rates(after, again, 3) == undisturbed[3:]
    assert len({1.0, *undisturbed}) > 2, "the rate changes before and after"


def test_custom_scheduler_can_load_values_that_were_not_set_yet():
    own, other = Remembering(optimizer()), Remembering(optimizer())
    rates(other.optimizer, other, 3)
    load_scheduler(other, scheduler_state(other, as_saved(own)))
    assert (other.best, other.rates) == (None, [1.0])
    rates(other.optimizer, other, 2)
    load_scheduler(own, scheduler_state(own, as_saved(other)))
    assert own.pairs == other.pairs, "tuples stay tuples in a list that has grown"


@pytest.mark.parametrize(
    "change",
    [
        {"base_lrs": ["x"]},
        {"base_lrs": [1.0, 1.0]},
        {"last_epoch": None},
        {"rates": ["x"]},
        {"rates": 3},
        {"pairs": {}},
    ],
    ids=str,
)
def test_what_a_persons_own_scheduler_can_not_have_is_refused(change):
    own = Remembering(optimizer())
    with pytest.raises(CheckpointError, match=f"its '{next(iter(change))}' is"):
        scheduler_state(own, {**as_saved(own), **change})


@pytest.mark.parametrize("inner", ["x", [], [{}], ["x", "y"], [{"rates": ["x"]}, {}]])
def test_an_inner_scheduler_of_another_form_is_refused(inner):
    sequence = PERSONS["in a sequence"](optimizer())
    with pytest.raises(CheckpointError, match="should be a"):
        scheduler_state(sequence, {**as_saved(sequence), "_schedulers": inner})


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
    for key, value in {"lr": None, "betas": "x"}.items():
        with pytest.raises(CheckpointError, match=f"its '{key}' is"):
            check_groups([{**saved, key: value}], [group], may_grow=True)


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


def test_types_that_json_lacks_come_back():
    here = {"betas": (0.9, 0.99), "lr": torch.tensor(0.5, dtype=torch.float64), "at": {2: (1,)}, "one": torch.ones(1)}
    made = in_types_of({"betas": [0.8, 0.9], "lr": 0.1, "at": {"2": [3]}, "one": 2}, here)
    assert (made["betas"], made["at"]) == ((0.8, 0.9), {2: (3,)})
    assert torch.equal(made["lr"], torch.tensor(0.1, dtype=torch.float64))
    assert torch.equal(made["one"], torch.tensor([2.0]))
    assert in_types_of([[1, 2], [3, 4]], [(0, 0)]) == [(1, 2), (3, 4)]


def test_what_is_set_later_can_be_anything():
    assert is_like(3, None)
    assert is_like([1, 2], [])
    assert is_like("x", object())
    assert is_like(0.1, torch.tensor(0.3))
    assert not is_like("x", torch.tensor(0.3))
