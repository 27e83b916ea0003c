"""A job's first step is compared with that of one process: without false stops, and with the faults found."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial

import pytest
import torch
from torch import nn

import paceline
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.train.open_jobs import close_open_jobs

from support.mutants import MUTANTS
from support.ranks import preload, run_ranks
from support.verified_workloads import make

preload("paceline.train.first_step")
EQUAL = "first step checked: equal to one process"
# Faults of strategies, buckets, buffers, the loss and optimizers that show in one step.
SEEDED = (
    "wrong_share_of_the_mean",
    "local_batch_statistics",
    "two_ranks_take_the_same_samples",
    "last_gradient_of_a_bucket_not_summed",
    "last_micro_batch_dropped",
    "accumulation_overwrites",
    "weight_decay_twice_on_a_shard",
    "a_shard_not_reduced",
    "clipping_by_a_shards_norm",
    "last_sample_of_a_part_dropped",
    "a_scalar_not_summed",
    "clipping_that_scales_up",
    "rotary_position_off_by_one",
    "a_short_micro_batch_weighed_double",
    "a_groups_settings_lost",
    "missing_all_reduce_of_a_norms_gradient",
    "bias_added_on_every_rank",
    "clipping_by_the_local_norm",
)


def stepped(rank, subject, plan, mutant=None, steps=1):
    """The notices of a job's first steps, or its error."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    if mutant is not None:
        MUTANTS[mutant].switch_on()
    said = []
    try:
        job = paceline.distribute(subject() if callable(subject) else make(subject))
        job.notice = lambda text, everywhere=False: said.append(text)
        batches = job.batches()
        for _ in range(steps):
            job.step(next(batches))
        job.close(save=False)
    except PacelineError as error:
        return str(error)
    return said


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "shard=2,zero=1", "tensor=2"])
@pytest.mark.parametrize("subject", ["decoder", "heads", "remembers", "grouped", "short"])
def test_a_right_step_is_found_equal(subject, plan):
    said = run_ranks(2, stepped, subject, plan)[0]
    assert any(line.startswith(EQUAL) for line in said), said


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_stops_the_job(name):
    mutant = MUTANTS[name]
    said = run_ranks(Plan.parse(mutant.plan).world_size, stepped, mutant.subject, mutant.plan, name)[0]
    assert isinstance(said, str), said
    assert "the ranks' first step should be that of one process" in said
    assert "--no-check trains on" in said


def first_step_alone(rank):
    """The notices of a job without a run directory, of which nobody holds more than its first step."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse("replicate=2")))
    said = []
    job = paceline.distribute(make("decoder"))
    job.notice = lambda text, everywhere=False: said.append(text)
    job.step(next(job.batches()))
    del job
    close_open_jobs()
    return said


def test_a_job_that_is_not_closed_says_the_result_at_its_end():
    assert run_ranks(2, first_step_alone)[0][-1] == EQUAL


class Noisy(nn.Module):
    """What it draws has no place for each sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) * (1 + 0.1 * torch.rand(()))


def data():
    random = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(21, 6, generator=random), torch.randn(21, 3, generator=random))


def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def workload(**parts):
    given = {
        "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3)),
        "loss": squared,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": data(),
        "batch_size": 7,
        "epochs": 2,
    }
    return paceline.Workload(**{**given, **parts})


def noisy():
    return workload(model=Noisy)


class Attends(nn.Module):
    """Attention with a mask for each sample, and noise by a mean of other dimensions."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.layer = nn.Linear(6, 36)
        self.last = nn.Linear(36, 3)

    def forward(self, x):
        hidden = self.layer(x).view(-1, 2, 6, 3)
        mask = (x > 0.5)[:, None, None, :].expand(-1, 1, 6, 6).logical_or(torch.eye(6, dtype=torch.bool))
        mixed = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, mask, self.dropout)
        noise = torch.normal(torch.zeros(len(x), 36), torch.full((36,), 0.1))
        return self.last(mixed.reshape(len(x), 36) + noise)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_with_a_mask_for_each_sample_is_checked(plan, dropout):
    said = run_ranks(2, stepped, partial(workload, model=partial(Attends, dropout)), plan)[0]
    assert said[-1] == EQUAL


def uneven():
    """Of two ranks one has two micro-batches, the other one."""
    return workload(micro_batch_size=3)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "shard=2,zero=1"])
def test_first_step_with_uneven_micro_batches_draws_as_one_rank(plan):
    assert run_ranks(2, stepped, uneven, plan)[0][-1] == EQUAL


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_a_model_of_a_library_is_checked(name):
    assert run_ranks(2, stepped, name, "replicate=2")[0][-1] == EQUAL


def half():
    return workload(precision="fp16")


NOT_CHECKED = {
    "draws": (noisy, "replicate=2", "do not belong to samples"),
    "fp16": (half, "replicate=2", "under fp16"),
    "compression": (workload, "replicate=2,compression=bf16", "compression=bf16 rounds"),
    "pipeline": (workload, "pipeline=2", "a generator of its own"),
}


@pytest.mark.parametrize("name", NOT_CHECKED)
def test_what_can_not_be_compared_is_said(name):
    subject, plan, reason = NOT_CHECKED[name]
    said = run_ranks(2, stepped, subject, plan)[0]
    assert [line for line in said if "first step" in line and reason in line], said


def test_check_off_and_one_rank_say_nothing():
    assert not [line for line in run_ranks(2, stepped, workload, "replicate=2,check=off")[0] if "first step" in line]
    assert not [line for line in run_ranks(1, stepped, workload, "replicate=1")[0] if "first step" in line]


def trained(rank, check):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="replicate=2", check=check)))
    job = paceline.distribute(workload())
    losses = [job.step(batch) for batch in job.batches()]
    return losses, [parameter.detach().clone() for parameter in job.model.parameters()]


def test_the_comparison_changes_no_bit_of_the_training():
    losses, parameters = run_ranks(2, trained, "on")[0]
    plain_losses, plain_parameters = run_ranks(2, trained, "off")[0]
    assert losses == plain_losses
    assert all(map(torch.equal, parameters, plain_parameters))


def resumed(rank, folder, is_faulty):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan(mesh="replicate=2")))
    job = paceline.distribute(workload())
    batches = job.batches()
    for _ in range(2):
        job.step(next(batches))
    job.save(folder)
    said = []
    job.notice = lambda text, everywhere=False: said.append(text)
    job.load(folder)
    if is_faulty:  # as if a resume had lost the optimizer's state
        job.optimizer.state.clear()
    try:
        job.step(next(job.batches()))
        job.close(save=False)
    except PacelineError as error:
        return str(error)
    return said


def test_the_first_step_after_a_resume_is_compared(tmp_path):
    assert EQUAL in run_ranks(2, resumed, str(tmp_path / "right"), False)[0]
    said = run_ranks(2, resumed, str(tmp_path / "wrong"), True)[0]
    assert "the update of" in said
