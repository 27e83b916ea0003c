"""What a model's code keeps in Python reaches no later batch, or the model is refused."""

import collections
import copy
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from updating import WIDE, assert_same, captured_of, in_stages, loss, make, trained

from paceline.graph import capture as capture_module
from paceline.graph import kept_values
from paceline.graph.capture import capture
from paceline.nouns.errors import WorkloadError

EXACT, REFUSED = {}, {}


def exact(update):
    EXACT[update.__name__] = update
    return update


def refused(name):
    def note(update):
        REFUSED[update.__name__] = (update, name)
        return update

    return note


@exact
def kept_for_this_batch_alone(net, x):
    net.auxiliary = x.mean(0)
    net.several = [net.auxiliary]
    net.several.append(x.sum(0))
    return sum(net.several)


@exact
def added_up_from_zero(net, x):
    net.steps = 0
    for part in (x, x.square()):
        net.steps = net.steps + part.mean(0)
    return net.steps * x


@exact
def added_up_from_nothing(net, x):
    net.scale = None
    for part in (x, x.square()):
        net.scale = part.mean(0) if net.scale is None else net.scale + part.mean(0)
    return net.scale * x


@exact
def a_list_cleared_and_filled(net, x):
    net.seen.clear()
    net.seen.append(x.mean(0))
    net.seen.append(x.square().mean(0))
    return sum(net.seen)


@exact
def a_list_filled_and_cleared(net, x):
    net.seen.append(x.mean(0))
    added = sum(net.seen)
    net.seen.clear()
    return added


@exact
def a_table_filled_anew(net, x):
    net.table_of.clear()
    net.table_of.update(mean=x.mean(0), count=len(x))
    return net.table_of["mean"] / net.table_of["count"]


@exact
def a_number_that_comes_to_rest(net, x):
    net.steps = min(net.steps + 1, 1)
    return net.steps * x


@exact
def a_constant_kept(net, x):
    if net.scale is None:
        net.scale = torch.arange(WIDE) + 1.0
    return net.scale.to(x) * x


@refused("steps")
def the_longest_batch_until_now(net, x):
    net.steps = max(net.steps, len(x))
    return x / net.steps


@refused("several")
def the_longest_batch_in_a_list(net, x):
    net.several = getattr(net, "several", [0])
    net.several[0] = max(net.several[0], len(x))
    return x / net.several[0]


@refused("steps")
def a_counter(net, x):
    net.steps += 1
    return 0.01 * net.steps * x


@refused("seen")
def a_list_that_grows(net, x):
    net.seen.append(x.detach().mean(0))
    return sum(net.seen)


@refused("seen")
def a_list_read_and_then_cleared(net, x):
    added = sum(net.seen)
    net.seen.clear()
    net.seen.append(x.detach().mean(0))
    return added


@refused("seen")
def a_list_cleared_every_second_time(net, x):
    if len(net.seen) == 2:
        net.seen.clear()
    net.seen.append(x.detach().mean(0))
    return net.seen[-1]


@refused("steps")
def a_counter_that_matters_later(net, x):
    net.steps += 1
    return x if net.steps % 3 else 2 * x


@refused("steps")
def a_number_that_comes_to_rest_after_it_was_read(net, x):
    factor, net.steps = net.steps, min(net.steps + 1, 1)
    return factor * x


@refused("before")
def the_batch_before_the_last(net, x):
    last, net.far_before, net.before = net.far_before, net.before, x.detach().mean(0)
    return None if last is None else x * last


@refused("scale")
def a_scale_from_the_first_batch(net, x):
    if net.scale is None:
        net.scale = x.detach().std()
    return net.scale * x


@refused("own")
def a_plain_tensor_replaced(net, x):
    net.own = 0.9 * net.own + x.detach().mean(0)
    return net.own


@refused("steps")
def a_counter_of_numpy_that_matters_later(net, x):
    net.steps = np.add(net.steps, 1)
    return x if net.steps % 3 else 2 * x


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_what_begins_anew_with_each_batch_is_taken(name, stages):
    wanted, model = make(EXACT[name]), make(EXACT[name])
    assert_same(trained(model, in_stages(model, stages)), trained(wanted, lambda batch: loss(wanted, batch)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_a_later_batch_is_refused(name):
    update, kept = REFUSED[name]
    model, alone = make(update), make(update)
    trained(alone, lambda batch: loss(alone, batch))  # in one process it trains
    with pytest.raises(WorkloadError, match=f"keep values from batch to batch (?s:.*)change {kept}"):
        captured_of(model)


class Criterion(nn.Module):
    """A loss with a centre of its own, as DINO's."""

    def __init__(self, is_assigned):
        super().__init__()
        self.is_assigned, self.count = is_assigned, 0
        self.register_buffer("centre", torch.zeros(1, dtype=torch.float64))

    def forward(self, found):
        with torch.no_grad():
            if self.is_assigned:
                self.centre = 0.9 * self.centre + 0.1 * found.mean(0)
            else:
                self.centre.mul_(0.9).add_(0.1 * found.mean(0))
        return (found - self.centre).square().sum()


class PlainCriterion:
    def __init__(self):
        self.steps = 0

    def __call__(self, model, batch):
        self.steps += 1
        return model(batch["x"]).square().sum() * self.steps, len(batch["x"])


GLOBAL = {"steps": 0}


def global_loss(model, batch):
    GLOBAL["steps"] += 1
    return model(batch["x"]).square().sum() * GLOBAL["steps"], len(batch["x"])


def closure_loss():
    steps, past = 0, collections.deque(maxlen=2)

    def count(model, batch):
        nonlocal steps
        steps += 1
        past.append(steps)
        return model(batch["x"]).square().sum() * sum(past), len(batch["x"])

    return count


def criterion_loss(is_assigned):
    criterion = Criterion(is_assigned)
    return lambda model, batch: (criterion(model(batch["x"])), len(batch["x"]))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (criterion_loss(True), "in the place of Criterion.centre"),
        (criterion_loss(False), r"writes into a tensor of shape \(1,\)"),
        (PlainCriterion(), "change the variable PlainCriterion.steps"),
        (global_loss, "change the variable GLOBAL"),
        (closure_loss(), "change the variable (steps|past)"),
    ],
    ids=["a centre assigned", "a centre written", "an object", "a global variable", "a closure"],
)
def test_kept_values_of_a_loss_are_refused_and_left_unchanged(function, match):
    for _ in range(2):  # also when a second shape is captured
        with pytest.raises(WorkloadError, match=match):
            captured_of(make(lambda net, x: None), function)
    assert GLOBAL == {"steps": 0}


class Balanced(nn.Module):
    """Blocks that leave auxiliary terms, which the model collects and the loss reads."""

    def __init__(self, is_list):
        super().__init__()
        self.blocks, self.last = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), nn.Linear(4, 1)
        self.is_list, self.terms, self.term = is_list, [], 0

    def forward(self, x):
        self.terms.clear()
        self.term = 0
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.terms.append(x.square().sum())
            self.term = self.term + x.square().sum()
        return self.last(x)


PAST = {"terms": 3.0}


def balanced_loss(model, batch):
    total, weight = loss(model, batch)
    PAST["terms"] = 0
    PAST["terms"] = PAST["terms"] + (sum(model.terms) if model.is_list else model.term)
    return total + 0.1 * PAST["terms"], weight


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_loss_reads_what_the_forward_pass_collected(stages, is_list):
    torch.manual_seed(1)
    model = Balanced(is_list).double()
    wanted = copy.deepcopy(model)
    found = trained(model, in_stages(model, stages, balanced_loss))
    assert (model.terms, model.term, PAST) == ([], 0, {"terms": 3.0})
    assert_same(found, trained(wanted, lambda batch: balanced_loss(wanted, batch)))
    PAST["terms"] = 3.0


@pytest.mark.parametrize(("file", "is_of_the_user"), [("train.py", True), (None, True), ("verify/ranks/x.py", False)])
def test_the_main_module_is_the_persons_unless_it_is_of_verify(monkeypatch, file, is_of_the_user):
    """A rank of `verify` counts what a module's own code draws in an object of its main module."""
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = str(Path(kept_values.__file__).parents[1] / file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert kept_values._is_user_code("__main__") is is_of_the_user


@pytest.mark.parametrize(("states", "is_refused"), [([1, 2, 2, 2], False), ([1, 2, 2, 3], True)])
def test_what_another_thread_draws_once_refuses_no_model(states, is_refused, monkeypatch):
    seen = iter(states)
    monkeypatch.setattr(capture_module, "_plain_random_state", lambda: next(seen, states[-1]))
    with pytest.raises(WorkloadError, match="random numbers") if is_refused else nullcontext():
        capture(nn.Linear(2, 1), lambda model, batch: model(batch).sum(), torch.ones(3, 2), torch.device("cpu"))
