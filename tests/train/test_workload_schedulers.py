"""Several schedulers, and those that step by a metric: as in one process, and on after a kill bit for bit."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.checkpoint.manifest import list_checkpoints
from paceline.comm import api
from paceline.nouns.errors import CheckpointError, PacelineError, PlanError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.job import Job, Stopped

from support.kill_and_resume_checks import check_goes_on
from support.ranks import run_ranks
from support.whole_optimizers import data, loss, muon_and_adamw, workload

TOLERANCE = 1e-10


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def both(optimizer):
    """One of steps, and one of a metric."""
    return [lr_scheduler.StepLR(optimizer, 3, 0.9), plateau(optimizer)]


def of_each(optimizers):
    """One for each of two optimizers; a tuple."""
    return lr_scheduler.CosineAnnealingLR(optimizers[0], 10), plateau(optimizers[1])


def two_by_steps(optimizer):
    return [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]


SCHEDULES = {
    "plateau": ("lamb", plateau),
    "both": ("muon", both),
    "of each": ("list", of_each),
    "by steps": ("list", two_by_steps),
}
PLANS = {2: ("replicate=2", "shard=2", "tensor=2", "pipeline=2"), 4: ("replicate=4", "replicate=2,shard=2")}
CELLS = [(kind, plan) for kind in SCHEDULES for plans in PLANS.values() for plan in plans]
CELLS = [cell for cell in CELLS if not (cell[0] == "by steps" and cell[1] == "tensor=2")]


def declared(kind, **parts):
    optimizer, scheduler = SCHEDULES[kind]
    return workload(optimizer, scheduler=scheduler, evaluation=data()[:5], **{"steps": 9, **parts})


def rates(job):
    return [group["lr"] for group in job.optimizer.param_groups]


def train(job, kind):
    """What each step made: loss, evaluation and rates."""
    steps = []
    for batch in job.batches():
        mean = job.step(batch)
        score = 0.0
        if kind != "by steps" and job.step_number % 2 == 1:
            score = job.evaluate()["loss"]
            job.schedule(score)
        steps.append((mean, score, rates(job)))
    return steps


def train_all(rank, cells):
    api.init()
    results = {}
    for kind, plan in cells:
        job = Job(declared(kind), Plan.parse(plan))
        results[kind, plan] = train(job, kind)
        job.close()
    return results


@functools.cache
def results(size):
    cells = [(kind, "replicate=1") for kind in SCHEDULES]
    if size > 1:
        cells = [cell for cell in CELLS if Plan.parse(cell[1]).world_size == size]
    return run_ranks(size, train_all, cells, timeout_s=300)


@pytest.mark.parametrize(("kind", "plan"), CELLS)
def test_ranks_have_the_rates_of_one_process(kind, plan):
    expected = results(1)[0][kind, "replicate=1"]
    assert len({tuple(own) for _, _, own in expected}) > 2  # they change
    for answers in results(Plan.parse(plan).world_size):
        for (mean, score, own), (whole_mean, whole_score, whole) in zip(answers[kind, plan], expected, strict=True):
            assert mean == pytest.approx(whole_mean, rel=TOLERANCE)
            assert score == pytest.approx(whole_score, rel=TOLERANCE)
            assert own == pytest.approx(whole, rel=1e-12)


def test_in_one_process_it_is_a_plain_loop():
    """The plain loop has no Paceline in it."""
    kind = "of each"
    api.init()
    job = Job(declared(kind, batch_size=24, clip_norm=None), Plan())
    torch.manual_seed(0)
    model = workload("lamb").model().double()
    model.load_state_dict(job.model.state_dict())
    optimizers = muon_and_adamw(model)
    cosine, on_plateau = of_each(optimizers)
    whole = torch.utils.data.default_collate(data())
    held_out = torch.utils.data.default_collate(data()[:5])
    expected = []
    for step in range(1, 10):
        total, count = loss(model, whole)
        model.zero_grad()
        (total / count).backward()
        for optimizer in optimizers:
            optimizer.step()
        cosine.step()
        score = 0.0
        if step % 2 == 1:
            with torch.no_grad():
                held_out_total, held_out_count = loss(model, held_out)
            score = float(held_out_total) / held_out_count
            on_plateau.step(score)
        expected.append((float(total.detach()) / count, score, [one.param_groups[0]["lr"] for one in optimizers]))
    for (mean, score, own), (other_mean, other_score, others) in zip(train(job, kind), expected, strict=True):
        assert (mean, score) == pytest.approx((other_mean, other_score), rel=TOLERANCE)
        assert own == pytest.approx(others, rel=1e-12)


def save_in_the_middle(rank, folder, kind, plan, at):
    api.init()
    job = Job(declared(kind), Plan.parse(plan))
    steps = []
    for batch in job.batches():
        mean = job.step(batch)
        if kind != "by steps":
            job.schedule(mean)
        steps.append((mean, rates(job)))
        if job.step_number == at:
            job.save(folder)
    return steps[at:]


def go_on(rank, folder, kind, plan, before):
    api.init()
    job = Job(declared(kind), Plan.parse(plan))
    batches = job.batches()
    for _ in range(before):
        mean = job.step(next(batches))
        if kind != "by steps":
            job.schedule(mean)
    job.load(folder)
    steps = []
    for batch in job.batches():
        mean = job.step(batch)
        if kind != "by steps":
            job.schedule(mean)
        steps.append((mean, rates(job)))
    return steps


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("at", "before"), [(4, 0), (2, 5)])
def test_all_of_them_come_back(tmp_path, kind, at, before):
    expected = save_in_the_middle(0, str(tmp_path / "saved"), kind, "replicate=1", at)
    assert go_on(0, str(tmp_path / "saved"), kind, "replicate=1", before) == expected


@pytest.mark.slow
def test_they_come_back_on_other_ranks(tmp_path):
    expected = save_in_the_middle(0, str(tmp_path / "saved"), "of each", "replicate=1", 4)
    for steps in run_ranks(2, go_on, str(tmp_path / "saved"), "of each", "shard=2", 0):
        for (mean, own), (whole_mean, whole) in zip(steps, expected, strict=True):
            assert mean == pytest.approx(whole_mean, rel=TOLERANCE)
            assert own == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("saved", "here", "found"),
    [
        ("both", lambda o: [plateau(o)], "a list of 1\n  found: it has that of a list of 2"),
        ("both", plateau, "one without a list\n  found: it has that of a list of 2"),
        ("plateau", lambda o: [plateau(o), plateau(o)], "a list of 2\n  found: it has that of one without a list"),
        (
            "both",
            lambda o: [lr_scheduler.StepLR(o, 3), lr_scheduler.StepLR(o, 3)],
            "the checkpoint's scheduler should be a StepLR",
        ),
        ("both", lambda o: both(o)[::-1], "the checkpoint's scheduler should be a ReduceLROnPlateau"),
    ],
)
def test_the_state_of_others_is_refused_before_anything_changes(tmp_path, saved, here, found):
    save_in_the_middle(0, str(tmp_path / "saved"), saved, "replicate=1", 4)
    job = Job(workload(SCHEDULES[saved][0], scheduler=here, steps=9), Plan())
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        job.load(tmp_path / "saved")
    assert found in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(job.model.parameters(), before, strict=True))


class ByEpoch:
    """As other libraries have them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise AssertionError

    def state_dict(self):
        return {}


class ByTwo(ByEpoch):
    def step(self, metric, count):
        raise AssertionError


def twice(optimizer):
    one = lr_scheduler.StepLR(optimizer, 3)
    return [one, one]


def of_another(optimizer):
    return lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1), 3)


REFUSED = {
    "an empty list": (lambda o: [], "it returned an empty list"),
    "nothing": (lambda o: None, "it made a NoneType"),
    "a number in the list": (lambda o: [plateau(o), 0.1], "number 1 of the list is 0.1"),
    "a class": (lambda o: lr_scheduler.StepLR, "it made the class StepLR"),
    "a list in the list": (lambda o: [both(o)], "number 0 of the list is ["),
    "one of them twice": (twice, "number 1 of the list is there twice"),
    "one that counts epochs": (ByEpoch, "ByEpoch.step wants epoch"),
    "one of them counts epochs": (lambda o: [plateau(o), ByEpoch(o)], "ByEpoch.step wants epoch"),
    "one that wants two": (ByTwo, "ByTwo.step wants metric and count"),
    "another optimizer": (of_another, "StepLR has another SGD"),
    "another optimizer in a list": (lambda o: [plateau(o), of_another(o)], "StepLR has another SGD"),
    "an optimizer": (lambda o: o, "it made a Lamb"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_workload_schedulers_of_wrong_kind_are_refused_at_start(case):
    make, found = REFUSED[case]
    api.init()
    with pytest.raises(WorkloadError) as caught:
        Job(workload("lamb", scheduler=make), Plan())
    assert found in str(caught.value)
    assert "\n  fix: " in str(caught.value)


METRICS = {
    "nothing": (None, "it is None of type NoneType"),
    "text": ("0.5", "it is '0.5' of type str"),
    "True": (True, "it is True of type bool"),
    "a dict": ({"loss": 1.0}, "it is {'loss': 1.0}"),
    "a vector": (torch.ones(3), "it is tensor"),
    "NaN": (math.nan, "it is nan of type float"),
}


@pytest.mark.parametrize("case", METRICS)
def test_what_is_no_metric_is_refused(case):
    metric, found = METRICS[case]
    api.init()
    job = Job(declared("plateau"), Plan())
    job.step(next(job.batches()))
    with pytest.raises(UsageError) as caught:
        job.schedule(metric)
    assert found in str(caught.value)
    job.schedule(torch.tensor(1.5))
    assert job.scheduler.best == 1.5


def test_a_metric_that_nobody_wants_is_refused():
    api.init()
    with pytest.raises(UsageError, match="it has none that wants one"):
        Job(declared("by steps"), Plan()).schedule(1.0)
    with pytest.raises(UsageError, match="the workload has no scheduler"):
        Job(workload("lamb"), Plan()).schedule(1.0)


def schedule_apart(rank, metrics):
    api.init()
    job = Job(declared("plateau"), Plan(mesh="replicate=2"))
    job.step(next(job.batches()))
    try:
        job.schedule(metrics[rank])
    except PacelineError as error:
        return str(error), rates(job)
    return "", rates(job)


@pytest.mark.parametrize("metrics", [(1.0, 2.0), (1.0, math.nan), (None, 1.0)], ids=str)
def test_a_metric_that_differs_between_ranks_is_refused_on_all(metrics):
    texts = run_ranks(2, schedule_apart, metrics)
    assert all("job.schedule should be handed" in text for text, _ in texts)
    assert any("the same metric on every rank" in text for text, _ in texts)
    assert texts[0][1] == texts[1][1]  # nobody has stepped


def start_with_servers(rank):
    api.init()
    try:
        Job(
            declared("plateau", optimizer=lambda m: torch.optim.AdamW(m.parameters())),
            Plan(mesh="replicate=2", server=1),
        )
    except PlanError as error:
        return str(error)
    return ""


def test_servers_refuse_a_metric_before_the_first_step():
    for text in run_ranks(2, start_with_servers):
        assert "workers of parameter servers should step ReduceLROnPlateau by a metric" in text


def of_run(monkeypatch, folder, **parts):
    monkeypatch.setenv("PACELINE_RUN_DIR", str(folder))
    monkeypatch.setattr("paceline.train.open_jobs._run_jobs", [])
    api.init()
    return Job(declared("plateau", **parts), Plan(checkpoint_every=2, keep=9))


def manifests(folder):
    found = {}
    for path in list_checkpoints(folder / "checkpoints"):  # and none that is being written
        manifest = json.loads((path / "manifest.json").read_text())
        found[manifest["step"]] = manifest["scheduler"]["last_epoch"]
    return found


def test_a_steps_checkpoint_has_what_the_loop_scheduled_after_it(tmp_path, monkeypatch):
    job = of_run(monkeypatch, tmp_path)
    for batch in job.batches():
        job.step(batch)
        assert job.step_number not in manifests(tmp_path)
        job.schedule(1.0)
    job.close()
    assert manifests(tmp_path) == {step: step for step in (2, 4, 6, 8, 9)}


def test_a_stop_waits_for_the_loop_too(tmp_path, monkeypatch):
    job = of_run(monkeypatch, tmp_path)
    with pytest.raises(Stopped):
        stop_at_the_third(job)
    job.close()
    assert job.step_number == 3
    assert manifests(tmp_path) == {2: 2, 3: 3}


def stop_at_the_third(job):
    for batch in job.batches():
        if job.step_number == 2:
            job.is_stopping.set()
        job.step(batch)
        job.schedule(1.0)


def test_a_stop_waits_in_a_loop_with_its_own_batches_too(tmp_path, monkeypatch):
    job = of_run(monkeypatch, tmp_path, data=None)
    batch = torch.utils.data.default_collate(data()[:8])
    job.step(batch)
    job.is_stopping.set()
    job.schedule(1.0)
    job.step(batch)
    job.schedule(1.0)
    with pytest.raises(Stopped):
        job.step(batch)
    job.close()
    assert manifests(tmp_path) == {2: 2}


FILE = """
import os, signal
import paceline, torch
from support.whole_optimizers import data, muon_and_adamw, workload

def schedulers(optimizers):
    return [torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.9),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers, factor=0.5, patience=0, threshold=0.5)]

workload = workload("list", scheduler=schedulers, evaluation=data()[:6], steps=14)
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.step_number == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        if job.step_number % 3 == 0:
            job.schedule(job.evaluate()["loss"])
    total = sum(float(p.detach().sum()) for p in job.model.parameters())
    print("ends at", job.step_number, repr(total), [group["lr"] for group in job.optimizer.param_groups])
"""


@pytest.mark.slow
@pytest.mark.complete  # in one process above; killed: test_streams.py
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """Checkpoints are due at the very steps after which the loop schedules."""
    file = tmp_path / "scheduled.py"
    file.write_text(FILE)
    check_goes_on(tmp_path, file)
