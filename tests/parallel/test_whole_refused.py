"""What an update of whole parameters can't do is refused before the first step, on every rank."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.server.optimizers import describe
from paceline.train.job import Job

from support.ranks import run_ranks
from support.whole_optimizers import GlobalStep, Lamb, MuonAdamW, workload


class StateAtOnce(Lamb):
    """Makes its state in the constructor."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scale"] = torch.ones_like(parameter)

    def update(self, parameter, group):
        parameter -= group["lr"] * self.state[parameter]["scale"] * parameter.grad / parameter.grad.norm()


class OfSeveral(MuonAdamW):
    """Does not say that whole parameters are enough."""

    needs_whole_parameters = False


class Named(Lamb):
    """Can't be made from its defaults."""

    def __init__(self, params, run_name):
        super().__init__(params)


class Declared(Named):
    needs_whole_parameters = True


class OwnList(GlobalStep):
    """Steps through a list that it made in its constructor; each step is as long as the parameter's own gradient."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= self.param_groups[0]["lr"] * parameter.grad / parameter.grad.norm()


REFUSED = [
    ("shard=2", {}, lambda model: GlobalStep(model.parameters()), "GlobalStep updates a parameter from the others"),
    ("tensor=2", {}, lambda model: GlobalStep(model.parameters()), "GlobalStep updates a parameter from the others"),
    ("pipeline=2", {}, lambda model: GlobalStep(model.parameters()), "write replicate in place of pipeline"),
    ("shard=2", {"offload": "on"}, lambda model: Lamb(model.parameters()), "leave offload out"),
    ("shard=2", {}, lambda model: StateAtOnce(model.parameters()), "StateAtOnce makes scale in its constructor"),
    ("shard=2", {}, lambda model: OwnList(model.parameters()), "updates none that its groups have been given since"),
    ("shard=2", {}, OfSeveral, "needs_whole_parameters = True in its class is enough"),
    ("pipeline=2", {}, MuonAdamW, "the axis pipeline gives each rank a part of the optimizer's work"),
    ("tensor=2", {}, lambda model: Named(model.parameters(), "first"), "write needs_whole_parameters = True"),
]
TAKEN = [
    ("pipeline=2", {}, lambda model: Lamb(model.parameters())),
    ("pipeline=2", {}, lambda model: Named(model.parameters(), "first")),
    ("tensor=2", {}, lambda model: Declared(model.parameters(), "first")),
]


def try_all(rank):
    """What each case was refused for, and the last loss of what is taken."""
    api.init()
    texts = []
    for plan, options, optimizer, _ in REFUSED:
        try:
            Job(workload("lamb", optimizer=optimizer), Plan.parse(plan, **options))
            texts.append("")
        except PlanError as error:
            texts.append(str(error))
    losses = []
    for plan, options, optimizer in TAKEN:
        job = Job(workload("lamb", optimizer=optimizer), Plan.parse(plan, **options))
        losses.append([job.step(batch) for batch in job.batches()])
        job.close()
    return texts, losses


def train_alone(rank):
    api.init()
    job = Job(workload("lamb"), Plan())
    return [job.step(batch) for batch in job.batches()]


def test_each_is_refused_with_its_reason_and_a_way_out():
    expected = run_ranks(1, train_alone)[0]
    for texts, losses in run_ranks(2, try_all):
        for (plan, _, _, found), text in zip(REFUSED, texts, strict=True):
            assert found in text, plan
            assert "fix:" in text
        for taken in losses:
            assert taken == pytest.approx(expected, rel=1e-10)


def test_servers_refuse_it_and_name_the_axes_that_run_it():
    with pytest.raises(PlanError, match="shard and tensor run those that update each parameter by itself"):
        describe(Lamb([torch.nn.Parameter(torch.ones(2, 2))]))


def train_with_more_later(rank, make, plan):
    """The losses, and the error, of an optimizer that is given two more parameters after the second step."""
    api.init()

    def but_first(model):
        return make([parameter for name, parameter in model.named_parameters() if not name.startswith("first")])

    job = Job(workload("lamb", optimizer=but_first), Plan.parse(plan))
    losses = []
    try:
        for batch in job.batches():
            if job.step_number == 2:
                first = [parameter for name, parameter in job.model.named_parameters() if name.startswith("first")]
                job.optimizer.add_param_group({"params": first})
            losses.append(job.step(batch))
    except PlanError as error:
        return losses, str(error)
    return losses, ""


@pytest.mark.parametrize("plan", ["shard=2", "shard=2,zero=1", "tensor=2"])
def test_whole_update_refuses_parameters_added_later(plan):
    for losses, text in run_ranks(2, train_with_more_later, Lamb, plan):
        assert len(losses) == 2  # none with a wrong update
        assert "Lamb was given first.bias and 1 more after the start" in text
        assert "fix: " in text


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2"])
def test_part_update_accepts_parameters_added_later(plan):
    expected, _ = run_ranks(1, train_with_more_later, torch.optim.AdamW, "replicate=1")[0]
    for losses, text in run_ranks(2, train_with_more_later, torch.optim.AdamW, plan):
        assert text == ""
        assert losses == pytest.approx(expected, rel=1e-10)


def train_what_was_frozen(rank, make, plan):
    """The losses, and the error, where a frozen layer is trained from the third step on."""
    api.init()
    job = Job(workload("lamb", optimizer=lambda model: make(model.parameters())), Plan.parse(plan))
    losses = []
    try:
        for batch in job.batches():
            if job.step_number == 2:
                for name, parameter in job.model.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad or name.startswith("frozen"))
            losses.append(job.step(batch))
    except PlanError as error:
        return losses, str(error)
    return losses, ""


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2"])
def test_whole_update_refuses_parameters_that_were_frozen(plan):
    for losses, text in run_ranks(2, train_what_was_frozen, Lamb, plan):
        assert len(losses) == 2  # none with a wrong update
        assert "frozen.bias and 1 more after the start, or it was frozen then" in text


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2"])
def test_part_update_accepts_parameters_that_were_frozen(plan):
    expected, _ = run_ranks(1, train_what_was_frozen, torch.optim.AdamW, "replicate=1")[0]
    for losses, text in run_ranks(2, train_what_was_frozen, torch.optim.AdamW, plan):
        assert text == ""
        assert losses == pytest.approx(expected, rel=1e-10)
