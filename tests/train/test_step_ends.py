"""A loop's step ends without a message where all was said before the update, and nothing is lost by it."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.train.replicas import FIRST_STEPS

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
STEPS = 9
AT = 6  # the step in which something happens; those around it end without a message
BATCH = 8
DATA = torch.randn(STEPS * BATCH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CELLS = [(size, plan) for size in (2, 4) for plan in ("replicate", "replicate by gloo", "shard", "zero=1")]


class Net(nn.Module):
    """A model with a buffer, if it is to have one: of its state (persistent), or derived."""

    def __init__(self, persistent=None):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 1)
        if persistent is not None:
            self.register_buffer("noted", torch.zeros(2, dtype=torch.float64), persistent=persistent)

    def forward(self, x):
        return self.outer(self.inner(x).tanh())


def plan_of(name, size):
    axis, *options = {
        "replicate by gloo": ("replicate", "transport=gloo"),
        "replicate": ("replicate",),
        "shard": ("shard",),
        "zero=1": ("shard", "zero=1"),
    }[name]
    return ",".join([f"{axis}={size}", *options])


def prepared(plan, size, model, data=DATA):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan_of(plan, size))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = None if data is None else DataLoader(data, batch_size=BATCH)
    objects = [model.double(), optimizer, *([] if loader is None else [loader])]
    job, *_, last = paceline.prepare(*objects)
    job.heard = []  # by step: whether the job is to stop after it
    plain = job._end_step

    def end_step(*arguments):
        job.heard.append(plain(*arguments))
        return job.heard[-1]

    job._end_step = end_step
    return job, optimizer, (last if data is not None else None)


def train(job, model, optimizer, loader, at=lambda moment: None):
    """Train; `at` is called at several moments of step AT."""
    calls = [job.ledger.calls.total()]
    for batch in loader:
        if job.step_number:
            calls.append(job.ledger.calls.total())
        is_it = job.step_number == AT - 1
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if is_it:
            at("forward")
        job.backward(loss)
        optimizer.step()
        if is_it:
            at("updated")
    return [after - before for before, after in itertools.pairwise(calls)]


def messages_of(rank, size, plan, persistent):
    model = Net(persistent)
    job, optimizer, loader = prepared(plan, size, model)
    return train(job, model, optimizer, loader)


@pytest.mark.parametrize(("size", "plan"), CELLS)
def test_one_message_less_where_there_is_nothing_to_say(size, plan):
    with_all = run_ranks(size, messages_of, size, plan, True)[0]
    for persistent in (None, False):
        found = run_ranks(size, messages_of, size, plan, persistent)[0]
        expected = list(with_all)
        for step in range(FIRST_STEPS, len(expected)):
            expected[step] -= 1
        assert found == expected


def stops_of(rank, size, plan, moment, asked):
    model = Net()
    job, optimizer, loader = prepared(plan, size, model)

    def at(now):
        if now == moment and rank == asked:
            job.is_stopping.set()

    train(job, model, optimizer, loader, at)
    return job.heard


@pytest.mark.parametrize(("moment", "step"), [("forward", AT), ("updated", AT + 1)])
@pytest.mark.parametrize(("size", "plan"), CELLS)
def test_a_stop_is_heard_by_all_after_the_same_step(size, plan, moment, step):
    for heard in run_ranks(size, stops_of, size, plan, moment, size - 1):
        assert heard.index(True) == step - 1


def stops_at_the_end_of(rank, ends):
    """The signal comes after the last sums of a pass, on rank 1, and nothing follows in it."""
    model = Net()
    job, optimizer, loader = prepared("replicate", 2, model)
    for _ in job.epochs(1):
        for batch in loader:
            optimizer.zero_grad()
            job.backward(model(batch).square().mean())
            optimizer.step()
            if job.step_number == AT and ends != "pass":
                if rank == 1:
                    job.is_stopping.set()
                if ends == "break":
                    break
                job.evaluate(DATA[:4], lambda model, batch: {"loss": (model(batch).sum(), len(batch))})
                break
        if rank == 1:
            job.is_stopping.set()
    return job.step_number, job.heard


@pytest.mark.parametrize(("ends", "step"), [("pass", STEPS), ("break", AT), ("evaluation", AT)])
def test_what_is_no_next_step_hears_at_once(ends, step):
    for number, heard in run_ranks(2, stops_at_the_end_of, ends):
        assert number == step
        assert heard == [False] * (step - 1) + [True]


def one_rank_hears(rank):
    return stops_of(rank, 1, "replicate", "updated", 0)


def test_one_rank_hears_of_a_stop_at_once():
    (heard,) = run_ranks(1, one_rank_hears)
    assert heard.index(True) == AT - 1


def buffers_of(rank, size, plan, persistent, moment, how):
    model = Net(persistent)
    job, optimizer, loader = prepared(plan, size, model)
    seen = []

    def write():
        value = torch.tensor([rank + 1.0, 2.0], dtype=torch.float64)
        if how == "in place":
            model.noted.copy_(value)
        elif how == "by data":
            model.noted.data.copy_(value)
        else:
            model.noted = value

    for batch in loader:
        seen.append(model.noted.tolist())
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if job.step_number == AT - 1 and moment == "forward":
            write()
        job.backward(loss)
        optimizer.step()
        if job.step_number == AT and moment == "updated":
            write()
    return seen


@pytest.mark.parametrize("how", ["in place", "by data", "another tensor"])
@pytest.mark.parametrize("moment", ["forward", "updated"])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("plan", ["replicate", "shard"])
def test_buffers_are_equal_after_a_step_that_writes_them(plan, persistent, moment, how):
    is_late = moment == "updated" and not persistent
    for rank, seen in enumerate(run_ranks(2, buffers_of, 2, plan, persistent, moment, how)):
        assert seen[:AT] == [[0.0, 0.0]] * AT
        after = [[1.5, 2.0]] * (STEPS - AT)
        if is_late:  # each rank can compute it anew, and has its own for one step
            after[0] = [rank + 1.0, 2.0]
        assert seen[AT:] == after


def parted(rank, what):
    """Rank 1 does something else after a step that has ended without a message."""
    model = Net()
    job, optimizer, loader = prepared("replicate by gloo", 2, model)
    try:
        for batch in loader:
            if rank == 1 and job.step_number == AT and what == "sums":
                job.gradients()
            optimizer.zero_grad()
            job.backward(model(batch).square().mean())
            optimizer.step()
            if rank == 1 and job.step_number == AT and what in ("leaves", "evaluates"):
                if what == "leaves":
                    break
                job.settle()
        job.end_step()
    except PacelineError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize(
    ("what", "says"),
    [("leaves", "ends the step"), ("evaluates", "ends the step"), ("sums", "sums gradients")],
)
def test_step_end_without_message_reports_ranks_that_diverge(what, says):
    first, second = run_ranks(2, parted, what)
    assert first[0] == second[0] == "CollectiveError"
    assert f"this rank calls job.backward, rank 1 {says}" in first[1]
    assert f"this rank {says}" in second[1]
    assert "rank 0 calls job.backward" in second[1]


def trained_without_a_loader(rank, size, plan):
    model = Net()
    job, optimizer, _ = prepared(plan, size, model, None)
    calls = [job.ledger.calls.total()]
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = DATA[step * BATCH : (step + 1) * BATCH]
        share = len(rows) // size
        loss = model(rows[rank * share : (rank + 1) * share]).square().mean()
        job.backward(loss, weight=share)
        calls.append(job.ledger.calls.total())  # with the end of the step before
        optimizer.step()
    job.end_step()
    with job.gathered():
        values = [parameter.detach().clone() for parameter in model.parameters()]
    return [after - before for before, after in itertools.pairwise(calls)], job.last.step, values


@pytest.mark.parametrize("plan", ["replicate", "replicate by gloo"])
def test_a_loop_without_a_loader_leaves_the_message_out_too(plan):
    alone = run_ranks(1, trained_without_a_loader, 1, plan)[0]
    for calls, step, values in run_ranks(2, trained_without_a_loader, 2, plan):
        # The first steps' ends are said.
        assert calls[FIRST_STEPS] - calls[FIRST_STEPS + 1] == 1
        assert len(set(calls[FIRST_STEPS + 1 :])) == 1
        assert step == STEPS
        for value, expected in zip(values, alone[2], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
