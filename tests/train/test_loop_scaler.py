"""torch.amp.GradScaler in a plain loop: ranks skip and scale as one process does."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.nouns.errors import LossError, UsageError
from paceline.nouns.plan import Plan

from support.overflowing import BATCH, OVERFLOWS, STEPS, TOLERANCES, data, loss, model
from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
PLANS = ["replicate=2", "replicate=4", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2"]
CHANGES = {"plain": {}, "clip": {"clip": 0.05}, "fused": {"fused": True}, "twice": {"twice": True}}
CELLS = [("plain", torch.float32), *((change, torch.float64) for change in CHANGES)]


class Alone:
    """A plain loop's `job`, by torch alone."""

    size = 1

    def __init__(self, trained):
        self.trained = trained

    def backward(self, loss):
        loss.backward()

    def clip(self, max_norm):
        return float(torch.nn.utils.clip_grad_norm_(self.trained.parameters(), max_norm))


def objects(dtype, fused=False):
    torch.manual_seed(1)
    trained = model(dtype)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=fused)
    loader = DataLoader(data(dtype, [(step - 1) * BATCH + 2 for step in OVERFLOWS]), batch_size=BATCH)
    return trained, optimizer, loader, torch.amp.GradScaler("cpu")


def loop(job, trained, optimizer, loader, scaler, **settings):
    clip, twice = settings.get("clip"), settings.get("twice", False)
    steps = []
    for batch in loader:
        optimizer.zero_grad()
        for _ in range(1 + twice):
            with torch.autocast("cpu", torch.float16):
                total, weight = loss(trained, batch)
            job.backward(scaler.scale(total / weight))
        norm = None
        if clip is not None:
            scaler.unscale_(optimizer)
            norm = job.clip(clip)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        steps.append((float(total.detach()) / BATCH, scaler.get_scale() < before, scaler.get_scale(), norm))
    return steps


@functools.cache
def alone(change, dtype):
    settings = dict(CHANGES[change])
    trained, *rest = objects(dtype, settings.pop("fused", False))
    return loop(Alone(trained), trained, *rest, **settings)


def train_all(rank, plan):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    results = {}
    for change, dtype in CELLS:
        settings = dict(CHANGES[change])
        job, *prepared = paceline.prepare(*objects(dtype, settings.pop("fused", False)))
        steps = loop(job, *prepared, **settings)
        job.end_step()
        results[change, dtype] = steps, (job.step_number, job.position, job.last.to_json())
        job.close()
    return results


@functools.cache
def results(plan):
    return run_ranks(Plan.parse(plan).world_size, train_all, plan, timeout_s=300)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-{cell[1]}".replace("torch.", ""))
@pytest.mark.parametrize("plan", ["replicate=1", *PLANS])
def test_ranks_skip_and_scale_as_one_process(plan, cell):
    expected = alone(*cell)
    assert [step + 1 for step in range(STEPS) if expected[step][1]] == OVERFLOWS
    tolerance = TOLERANCES[cell[1]]
    losses = [0.0] * STEPS
    for answers in results(plan):
        steps, (number, position, last) = answers[cell]
        assert (number, position) == (STEPS, STEPS * BATCH)
        assert (last["is_skipped"], last["loss_scale"]) == (False, expected[-1][2])
        assert last["loss"] == pytest.approx(expected[-1][0], rel=tolerance)  # not that of the scaled loss
        for at, (step, other) in enumerate(zip(expected, steps, strict=True)):
            losses[at] += other[0]
            assert other[1:3] == step[1:3]
            if step[1] or step[3] is None:
                assert other[3] in (None, float("inf"))
            else:
                assert other[3] == pytest.approx(step[3], rel=tolerance)
    copies = Plan.parse(plan).world_size if "tensor" in plan else 1
    assert [each / copies for each in losses] == pytest.approx([step[0] for step in expected], rel=tolerance)


def train_resumed(rank, plan, folder):
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    job, *prepared = paceline.prepare(*objects(torch.float64))
    whole = loop(job, *prepared)
    job.close()
    job, trained, optimizer, loader, scaler = paceline.prepare(*objects(torch.float64))
    loop(job, trained, optimizer, first(loader, 4), scaler)
    job.save(folder)
    job.close()
    job, trained, optimizer, loader, scaler = paceline.prepare(*objects(torch.float64))
    job.load(folder)
    rest = loop(job, trained, optimizer, loader, scaler)
    job.close()
    return whole, rest


def first(loader, count):
    for _, batch in zip(range(count), loader, strict=False):
        yield batch


def test_a_checkpoint_has_the_scaler(tmp_path):
    for whole, rest in run_ranks(2, train_resumed, "replicate=2", tmp_path / "saved", timeout_s=200):
        assert rest == whole[4:]


def one_step(**change):
    """A job, and a step's parts, up to its update."""
    trained, optimizer, _, scaler = objects(torch.float64)
    job, trained, optimizer, scaler = paceline.prepare(trained, optimizer, scaler)
    total, weight = loss(trained, data(torch.float64, change.get("spiked", [])).tensors)
    job.backward(scaler.scale(total / weight), weight=weight)
    return job, optimizer, scaler


@pytest.mark.parametrize("call", [lambda job: job.clip(1.0), lambda job: job.gradients()["shift"].abs()])
def test_scaled_gradients_are_refused(call):
    job, optimizer, scaler = one_step()
    with pytest.raises(UsageError, match=r"scaler\.unscale_"):
        call(job)
    scaler.unscale_(optimizer)
    assert call(job) > 0


def test_a_loss_that_is_not_finite_is_an_error():
    trained, optimizer, _, scaler = objects(torch.float64)
    job, trained, optimizer, scaler = paceline.prepare(trained, optimizer, scaler)
    with pytest.raises(LossError, match="finite"):
        job.backward(scaler.scale(trained.shift.sum() * float("nan")), weight=1)


def test_a_scaler_that_is_off_changes_nothing():
    trained, optimizer, loader, _ = objects(torch.float64)
    job, trained, optimizer, loader, scaler = paceline.prepare(
        trained, optimizer, loader, torch.amp.GradScaler("cpu", enabled=False)
    )
    batch = next(iter(loader))
    total, weight = loss(trained, batch)
    job.backward(scaler.scale(total / weight))
    scaler.step(optimizer)
    scaler.update()
    job.end_step()
    assert (job.step_number, job.last.loss_scale) == (1, None)


def test_an_optimizer_that_the_job_has_not_is_left_to_torch():
    job, _, scaler = one_step()
    other = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler.scale(other(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert job.step_number == 0
