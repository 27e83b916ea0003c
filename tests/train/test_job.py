"""Switches of a workload, and a loop that brings its own batches."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import api
from paceline.nouns.errors import LossError, PeerLostError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job
from paceline.train.loop_job import LoopJob

from support.ranks import run_ranks


def workload(seen=None, **parts):
    def loss(model, batch):
        out = model(batch)
        if seen is not None:
            seen.append(out.dtype)
        return out.float().square().sum(), len(batch)

    return paceline.Workload(
        model=lambda: nn.Linear(4, 2),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))),
        batch_size=4,
        **parts,
    )


def one_step(rank, parts):
    api.init()
    seen = []
    job = Job(workload(seen, **parts), Plan(mesh=f"replicate={api.size()}"))
    job.step(next(job.batches()))
    weight = job.model.weight
    return seen[-1], weight.dtype, weight.detach(), torch.are_deterministic_algorithms_enabled()


def test_bf16_computes_in_bf16_and_keeps_float32_parameters():
    for seen, kept, _, _ in run_ranks(2, one_step, {"precision": "bf16"}):
        assert (seen, kept) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("handed", "found"),
    [
        (nn.Linear(2, 2), "it is Linear(in_features=2, out_features=2, bias=True)"),
        (workload, "it is <function workload"),
    ],
)
def test_distribute_refuses_what_is_no_workload(handed, found):
    """Such as a model, which is what DDP and FSDP are handed."""
    with pytest.raises(WorkloadError) as caught:
        paceline.distribute(handed)
    assert caught.value.asked == "paceline.distribute should be handed a workload"
    assert caught.value.found.startswith(found)
    assert "hand it paceline.Workload(model=..., loss=..., optimizer=..., data=..., " in caught.value.fix


def test_the_determinism_switch():
    assert not run_ranks(1, one_step, {})[0][3]
    assert run_ranks(1, one_step, {"deterministic": True})[0][3]


def own_batches(rank):
    api.init()
    job = Job(workload(), Plan(mesh=f"replicate={api.size()}"))
    data = torch.stack(job.workload.data)
    mine = [data[:3], data[3:4]][rank] if api.size() == 2 else data[:4]
    mean = job.step(mine)
    return mean, job.model.weight.detach(), job.position


def test_a_persons_own_batches_are_averaged_by_their_weights():
    (whole, weight, position), *_ = run_ranks(1, own_batches)
    for mean, other, _ in run_ranks(2, own_batches):
        assert abs(mean - whole) < 1e-6
        torch.testing.assert_close(other, weight)
    assert position == 0, "the order is the person's, so ours has not moved"


def update_again(job, batch):
    job.optimizer.step()


def schedule_again(job, batch):
    job.scheduler.step()
    job.step(batch)


def backward(job, batch):
    job.backward(batch)


# After a step: what the loop does besides, and what the error says.
BESIDE_STEP = [
    (update_again, "the loop calls SGD.step() too", "leave it out"),
    (schedule_again, "the loop has stepped one too", "job.schedule(metric)"),
    (backward, "made this job of a paceline.Workload", "write job.step(batch)"),
]


@pytest.mark.parametrize(("act", "found", "fix"), BESIDE_STEP, ids=lambda value: getattr(value, "__name__", ""))
def test_what_step_does_is_not_done_besides(act, found, fix):
    parts = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    job = paceline.distribute(workload(**parts))
    first, second, *_ = job.batches()
    job.step(first)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    with pytest.raises(UsageError) as caught:
        act(job, second)
    assert found in caught.value.found
    assert fix in caught.value.fix
    assert all(torch.equal(now, then) for now, then in zip(job.model.parameters(), before, strict=True))


def test_a_batch_that_is_stepped_again_is_told():
    job = paceline.distribute(workload())
    told = []
    job.notice = lambda text, everywhere=False: told.append(text)
    for batch in job.batches():
        job.step(batch)
        if job.step_number < 4:
            job.step(batch)
    assert [text for text in told if "a batch again" in text] == told[:1]


def test_a_loss_of_another_model_is_refused():
    other = nn.Linear(4, 2)
    parts = {"loss": lambda model, batch: (other(batch).square().sum(), len(batch))}
    job = paceline.distribute(dataclasses.replace(workload(), **parts))
    with pytest.raises(LossError, match="no parameter of the model has a gradient"):
        job.step(next(job.batches()))


def open_data_that_rank_0_lacks(rank):
    """What becomes of a rank's job where rank 0's data set can't be opened."""
    api.init()

    def data():
        if rank == 0:
            raise OSError("no such file")
        return workload().data

    try:
        Job(dataclasses.replace(workload(), data=data), Plan(mesh="replicate=2,shard=2"))
    except (OSError, PeerLostError) as error:
        return type(error).__name__
    return ""


def test_job_data_error_on_one_rank_does_not_block_other_ranks():
    # Two axes: with one alone there is the group of all ranks, and nothing to wait for.
    assert run_ranks(4, open_data_that_rank_0_lacks, timeout_s=30) == ["OSError", *["PeerLostError"] * 3]


def of_workload():
    return Job(workload(), Plan())


def of_loop():
    model = nn.Linear(4, 2)
    return paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


@pytest.mark.parametrize(
    ("make", "call", "fix"),
    [
        (of_workload, "backward", "write job.step(batch), which calls the workload's loss"),
        (of_loop, "batches", "iterate over the loader that paceline.prepare returned"),
        (of_loop, "step", "write job.backward(loss) and optimizer.step()"),
        (of_loop, "whole_model", "inside `with job.gathered():`"),
    ],
)
def test_a_call_of_the_other_form_of_a_job_says_what_to_write(make, call, fix):
    api.init()
    job = make()
    assert not hasattr(type(job), call)
    with pytest.raises(UsageError, match=re.escape(fix)):
        getattr(job, call)(torch.ones(2, 4), weight=2)
    assert not hasattr(job, "no_such_call")


def test_no_form_of_a_job_is_a_kind_of_the_other():
    assert not issubclass(LoopJob, Job)
    assert not issubclass(Job, LoopJob)
