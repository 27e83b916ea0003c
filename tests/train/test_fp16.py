"""Training in fp16: an overflow on one rank leaves the update out on all, and the loss scale is the same everywhere."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.data_order import DataOrder
from paceline.nouns.errors import LossError, PlanError
from paceline.nouns.plan import Plan
from paceline.parallel import loss_scale
from paceline.parallel.loss_scale import LossScale
from paceline.train.job import Job
from paceline.train.seed import seed_everything

from support.overflowing import BATCH, OVERFLOWS, STEPS, TOLERANCES, data, loss, model
from support.ranks import run_ranks

FIRST_SCALE = 2.0**16 / BATCH
PLANS = ["replicate=2", "replicate=4", "shard=2", "shard=2,zero=1", "shard=2,zero=2", "tensor=2", "pipeline=2"]
PLANS += [
    "pipeline=2,schedule=zero_bubble",
    "replicate=2,tensor=2",
    "shard=2,pipeline=2",
    "replicate=2,compression=bf16",
    "replicate=2,compression=fp16",
]
EXACT = [plan for plan in PLANS if "compression" not in plan]


def workload(dtype=torch.float64, overflows=OVERFLOWS, **parts):
    order = DataOrder(0, BATCH * STEPS, BATCH)
    declared = {
        "model": lambda: model(dtype),
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": data(dtype, [order.index((step - 1) * BATCH + 2) for step in overflows]),  # of one rank's part
        "batch_size": BATCH,
        "precision": "fp16",
        "clip_norm": 5.0,
    }
    return paceline.Workload(**{**declared, **parts})


def train(job):
    steps = []
    for batch in job.batches():
        before = {name: value.clone() for name, value in local_state(job).items()}
        mean = job.step(batch)
        record = job.last
        steps.append((mean, record.is_skipped, record.loss_scale))
        same = all(torch.equal(value, before[name]) for name, value in local_state(job).items())
        assert same == record.is_skipped
    return steps


def local_state(job):
    found = {}
    for name, parameter in job.model.named_parameters():
        if not parameter.is_meta:
            found[name] = getattr(parameter.detach(), "_local_tensor", parameter.detach())
    return found


def train_all(rank, cells):
    api.init()
    results = {}
    for dtype, plan in cells:
        job = Job(workload(dtype), Plan.parse(plan))
        results[dtype, plan] = train(job)
        job.close()
    return results


@functools.cache
def results(plan):
    return run_ranks(Plan.parse(plan).world_size, train_all, [(dtype, plan) for dtype in TOLERANCES], timeout_s=300)


@functools.cache
def by_hand(dtype):
    """The steps of a plain loop with torch's own scaler."""
    seed_everything(0)
    trained = model(dtype)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    tensors = workload(dtype).data.tensors
    order = [DataOrder(0, BATCH * STEPS, BATCH).index(position) for position in range(BATCH * STEPS)]
    steps = []
    for step in range(STEPS):
        batch = [tensor[order[step * BATCH : (step + 1) * BATCH]] for tensor in tensors]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            total, weight = loss(trained, batch)
            mean = total / weight
        scaler.scale(mean).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 5.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        steps.append((float(mean.detach()), scaler.get_scale() < before, scaler.get_scale() / BATCH))
    return steps


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("plan", ["replicate=1", *PLANS])
def test_ranks_skip_and_scale_as_a_plain_loop_with_a_grad_scaler(plan, dtype):
    expected = by_hand(dtype)
    assert [step + 1 for step in range(STEPS) if expected[step][1]] == OVERFLOWS
    tolerance = TOLERANCES[dtype if plan in ["replicate=1", *EXACT] else torch.float32]
    for answers in results(plan):
        steps = answers[dtype, plan]
        assert [step[1:] for step in steps] == [step[1:] for step in expected]
        assert [step[0] for step in steps] == pytest.approx([step[0] for step in expected], rel=tolerance)


def train_resumed(rank, plan, folder):
    api.init()
    job = Job(workload(), Plan.parse(plan))
    whole = train(job)
    job.close()
    job = Job(workload(), Plan.parse(plan))
    batches = job.batches()
    for _ in range(4):
        job.step(next(batches))
    job.save(folder)
    job.close()
    job = Job(workload(), Plan.parse(plan))
    job.load(folder)
    rest = train(job)
    job.close()
    return whole, rest


@pytest.mark.parametrize("plan", ["shard=2", "pipeline=2"])
def test_a_checkpoint_has_the_scale(plan, tmp_path):
    for whole, rest in run_ranks(2, train_resumed, plan, tmp_path / "saved", timeout_s=200):
        assert rest == whole[4:]
        assert whole[3][2] == FIRST_SCALE / 4  # other than at the beginning


def take(job, steps):
    batches = job.batches()
    for _ in range(steps):
        job.step(next(batches))


def test_the_scale_doubles_after_enough_updates():
    job = paceline.distribute(workload(overflows=[3]))
    job.parallel.loss_scale.updates = loss_scale.UPDATES_UNTIL_DOUBLED - 2
    take(job, 2)
    assert job.last.loss_scale == FIRST_SCALE * 2
    take(job, 1)
    assert (job.last.is_skipped, job.last.loss_scale) == (True, FIRST_SCALE)


def test_micro_batches_of_one_step_skip_together():
    job = paceline.distribute(workload(overflows=[1], micro_batch_size=2))
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    take(job, 1)
    assert job.last.is_skipped
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())


def test_gradients_that_overflow_at_every_scale_are_an_error():
    job = paceline.distribute(workload(overflows=[1]))
    job.parallel.loss_scale.value = loss_scale.SMALLEST
    object.__setattr__(job.workload, "loss", infinite_gradient)
    with pytest.raises(LossError, match="finite at some scale"):
        take(job, 1)


def infinite_gradient(model, batch):
    return (model(batch[0], batch[2]) * 0.0).abs().sqrt().sum(), len(batch[0])


def test_a_loss_that_is_not_finite_is_an_error_as_in_float32():
    job = paceline.distribute(workload(overflows=[]))
    job.workload.data.tensors[1].fill_(float("nan"))
    with pytest.raises(LossError, match="finite number"):
        take(job, 1)


def test_before_update_is_handed_unscaled_gradients():
    seen = []

    def look(gradients):
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})

    for precision in ("fp16", "float32"):
        declared = workload(overflows=[], before_update=look, precision=precision, steps=1)
        job = paceline.distribute(declared)
        take(job, 1)
        job.close()
    for name, gradient in seen[0].items():
        torch.testing.assert_close(gradient, seen[1][name])


def test_the_scale_of_sparse_gradients():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    scale = LossScale(1, torch.device("cpu"))
    table.weight.grad *= scale.value
    assert not scale.unscale(table.parameters(), [])
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


REFUSED = {
    "server": ("server=1", "under server the update is done on servers"),
    "topk": ("replicate=2,compression=topk", "adds what it left out"),
    "powersgd": ("replicate=2,compression=powersgd", "adds what it left out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_can_not_undo_an_overflow_are_refused(name):
    plan, said = REFUSED[name]
    api.init()
    with pytest.raises(PlanError, match=said):
        loss_scale.check_fits_plan(Plan.parse(plan), name != "server")


def test_only_fp16_has_a_scale():
    job = paceline.distribute(dataclasses.replace(workload(overflows=[]), precision="bf16"))
    take(job, 1)
    assert job.parallel.loss_scale is None
    assert "loss_scale" not in job.last.to_json()
