"""What optimizers and modules keep beside tensors: it is saved and put back, or refused before the first step."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from dataclasses import asdict

import numpy as np
import pytest
import torch
from test_snapshot import load_alone, make, optimizer_of, save, steps
from torch import nn

import paceline
from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm import api
from paceline.nouns.errors import WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, LocalShard, ShardSpec
from paceline.train.check_saving import check_can_save
from paceline.train.job import Job

from support.ranks import run_ranks
from support.whole_optimizers import workload

INPUTS = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Own(torch.optim.Optimizer):
    """Gradient descent that keeps what `make` returns for a parameter."""

    make = None

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["own"] = type(self).make(parameter)
                parameter -= group["lr"] * parameter.grad


def keeping(value, key="own"):
    return type("Keeping", (Own,), {"make": staticmethod(value), "__module__": __name__})


VALUES = {
    "a list": lambda p: [p.clone(), p + 1, 2.5, None],
    "a deque": lambda p: collections.deque([p.clone()], maxlen=3),
    "a dict": lambda p: {0: p.clone(), "count": torch.tensor(3), "pair": (1, "x")},
    "a text": lambda p: "fast",
    "a shape": lambda p: tuple(p.shape),
    "an array": lambda p: np.ones(3, dtype=np.float32),
    "a number of numpy": lambda p: np.float32(0.5),
    "another dtype": lambda p: [p.bfloat16()],
}


def flat(value):
    """A value's parts with their types, to compare them."""
    if isinstance(value, dict):
        return dict, [(key, flat(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), getattr(value, "maxlen", None), [flat(item) for item in value]
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), str(value.dtype), value.tolist()
    return type(value), value


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_the_state_comes_back(name, tmp_path):
    model = make()
    optimizer = optimizer_of(model, keeping(VALUES[name]))
    steps(model, optimizer)
    check_can_save(model, optimizer, None, {}, 1)
    save(0, 1, tmp_path / "saved", model, optimizer, {}).wait()
    again = make(seed=1)
    other = optimizer_of(again, keeping(VALUES[name]))
    load_alone(tmp_path / "saved", again, other)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert flat(other.state[two]["own"]) == flat(optimizer.state[one]["own"])


class Averaged(torch.optim.Optimizer):
    """Steps by the mean of the last three gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                past = self.state[parameter].setdefault("past", collections.deque(maxlen=3))
                past.append(parameter.grad.clone())
                parameter -= group["lr"] * sum(past) / len(past)


def go_on(rank, folder, plan, steps_taken):
    """Take steps under a plan, save, and take the rest of 6; begin with what is in the folder already."""
    api.init()
    averaging = dataclasses.replace(workload("lamb"), optimizer=lambda model: Averaged(model.parameters()))
    job = Job(averaging, Plan.parse(plan))
    if not steps_taken:
        job.load(folder)
    losses = []
    for batch in job.batches():
        losses.append(job.step(batch))
        if job.step_number == steps_taken:
            job.save(folder)
    job.close()
    return losses


MESHES = [
    ("replicate=2", "shard=2"),
    ("shard=2", "tensor=2"),
    ("tensor=2", "pipeline=2"),
    ("pipeline=2", "shard=2,zero=1"),
    ("shard=2,zero=1", "replicate=2"),
]


@pytest.mark.parametrize(("one", "other"), MESHES)
def test_a_list_of_tensors_goes_on_under_another_mesh(one, other, tmp_path):
    whole, *_ = run_ranks(2, go_on, str(tmp_path / "saved"), one, 3)
    for again in run_ranks(2, go_on, str(tmp_path / "saved"), other, 0):
        assert again == pytest.approx(whole[3:], rel=1e-9)


def loop_on(rank, folder, plan, steps_taken):
    """As `go_on`, in a loop of one's own: `tensor` cuts the state that was loaded in its first step."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    job, model, optimizer = paceline.prepare(model, Averaged(model.parameters()))
    if not steps_taken:
        job.load(folder)
    weights = []
    for batch in INPUTS[job.step_number :]:
        batch = batch.tensor_split(job.data_size)[job.data_rank]
        optimizer.zero_grad()
        job.backward(model(batch).square().mean(), weight=len(batch))
        optimizer.step()
        weights.append(
            [float(job.parallel.models.full_tensor(each).detach().double().sum()) for each in model.parameters()]
        )
        if len(weights) == steps_taken:
            job.save(folder)
    job.close()
    return weights


@pytest.mark.parametrize(("one", "other"), [("shard=2", "tensor=2"), ("tensor=2", "shard=2")])
def test_a_loop_goes_on_with_a_list_of_tensors(one, other, tmp_path):
    whole, *_ = run_ranks(2, loop_on, str(tmp_path / "saved"), one, 2)
    for again in run_ranks(2, loop_on, str(tmp_path / "saved"), other, 0):
        assert again == [pytest.approx(weights, rel=1e-9) for weights in whole[2:]]


def put(key, value):
    """An optimizer that keeps a value under a key of its own."""

    class Keyed(Own):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                state = {"whole": self.state, "group": self.param_groups[0]}.get(key, self.state[parameter])
                state[key] = value

    return Keyed


# An optimizer's class, and what is said of it.
REFUSED = {
    "an object": (put("own", {"a": [object()]}), "'own'['a'][0] should be something that a checkpoint can keep"),
    "a function": (put("own", len), "it is <built-in function len>"),
    "a sparse tensor": (put("own", torch.eye(2).to_sparse()), "it is of float32, torch.sparse_coo"),
    "of no parameter": (put("whole", 1), "it has self.state['whole']"),
    "an object in a group": (put("group", object()), "the optimizer's group should be something that JSON can keep"),
    "a slash": (put("a/b", 1), "it has self.state[parameter]['a/b']"),
    "no text": (put(0, 1), "it has self.state[parameter][0]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_checkpoint_can_keep_is_refused_before_a_step(name):
    kind, said = REFUSED[name]
    model = make()
    with pytest.raises(WorkloadError) as caught:
        check_can_save(model, kind(model.parameters()), None, {}, 1)
    assert said in str(caught.value)


def test_state_of_another_shape_is_refused_for_cut_parameters():
    model = make()
    optimizer = put("own", [torch.zeros(7)])(model.parameters())
    check_can_save(model, optimizer, None, {}, 1)
    held = {"0.weight": LocalShard(ShardSpec((7, 5), (Cut(0, (4, 3), 0, 1),)), (0,))}
    with pytest.raises(WorkloadError, match=f"{OPTIMIZER}own/0.weight should be of its parameter's shape"):
        check_can_save(model, optimizer, None, held, 1)


class Extra(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self, kept):
        super().__init__(5, 5)
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def job_of(kept, plan="replicate=1"):
    api.init()
    of = workload("lamb")

    def model():
        whole = of.model()
        whole.extra = Extra(kept)
        return whole

    return Job(dataclasses.replace(of, model=model), Plan.parse(plan))


@pytest.mark.parametrize("kept", [{"calls": 3, "of": (1, None)}, torch.arange(5), b"bytes", 2.5])
def test_what_a_module_keeps_beside_tensors_comes_back(kept, tmp_path):
    job = job_of(kept)
    assert "model.extra_state" in job.kept_objects.objects
    job.step(next(job.batches()))
    job.save(tmp_path / "saved")
    other = job_of(None)
    other.load(tmp_path / "saved")
    assert flat(other.model.extra.kept) == flat(kept)


def test_extra_state_that_cannot_be_kept_is_refused_when_saved(tmp_path, monkeypatch):
    job = job_of([object()])
    job.step(next(job.batches()))  # no checkpoint was asked for
    with pytest.raises(WorkloadError, match=r"what get_extra_state\(\) of the model's modules returns"):
        job.save(tmp_path / "saved")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path / "run"))
    with pytest.raises(WorkloadError, match=r"extra_state'\]\[0\] should be something that a checkpoint can keep"):
        job_of([object()])


def save_apart(rank, folder):
    """What is said, and what is there after a load, where ranks have other extra states."""
    job = job_of({"calls": rank}, "replicate=2")
    said = []
    job.kept_objects.notice = said.append
    for number, _ in zip(range(2), map(job.step, job.batches()), strict=False):
        job.save(f"{folder}-{number}")
    job.load(f"{folder}-1")
    job.close()
    return said, job.model.extra.kept


def test_ranks_with_other_extra_states_are_told_once(tmp_path):
    for said, kept in run_ranks(2, save_apart, str(tmp_path / "saved")):
        assert [line for line in said if "differs between ranks 0 and 1" in line] == said
        assert len(said) == 1
        assert kept == {"calls": 0}
