"""What is special to the pipeline: schedules, tied parameters, micro-batches that differ, samples that meet."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm import api
from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import SCHEDULES, Plan
from paceline.nouns.schedule import BACKWARD, FORWARD, WEIGHTS, check, make_schedule, picture
from paceline.parallel.pipeline.pipeline_strategy import same_shapes
from paceline.train.job import Job
from paceline.verify.ranks.draw_trace import DrawTrace

from support.models import workload
from support.ranks import run_ranks
from support.sample import sampled

SLOW = pytest.mark.slow
QUICK = settings(deadline=None, max_examples=60)
names, ranks_, micros = st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 12)


@given(names, ranks_, micros)
@QUICK
def test_a_schedule_does_everything_once_in_an_order_that_runs(name, ranks, micro_batches):
    schedule = make_schedule(name, ranks, micro_batches)
    kinds = 3 if name == "zero_bubble" else 2
    chunks = 2 if name == "interleaved" else 1
    assert schedule.stages == chunks * ranks
    done = {}
    for rank, (actions, ticks) in enumerate(zip(schedule.actions, schedule.ticks, strict=True)):
        assert len(set(actions)) == len(actions) == kinds * chunks * micro_batches
        assert list(ticks) == sorted(set(ticks))
        assert {action.stage % ranks for action in actions} == {rank}
        done |= dict(zip(actions, ticks, strict=True))
    for action, tick in done.items():
        before = dataclasses.replace(action, stage=action.stage - 1)
        after = dataclasses.replace(action, stage=action.stage + 1)
        if action.kind == FORWARD and action.stage:
            assert done[before] < tick
        if action.kind == BACKWARD:
            assert done[dataclasses.replace(action, kind=FORWARD)] < tick
            assert action.stage == schedule.stages - 1 or done[after] < tick
        if action.kind == WEIGHTS:
            assert done[dataclasses.replace(action, kind=BACKWARD)] < tick


@given(ranks_, micros)
@QUICK
def test_no_more_is_in_flight_than_the_schedule_promises(ranks, micro_batches):
    for rank in range(ranks):
        assert make_schedule("gpipe", ranks, micro_batches).in_flight(rank) == micro_batches
        for name in ("1f1b", "zero_bubble"):
            assert make_schedule(name, ranks, micro_batches).in_flight(rank) == min(micro_batches, ranks - rank)
        limit = 2 * (ranks - rank - 1) + ranks + 1
        assert make_schedule("interleaved", ranks, micro_batches).in_flight(rank) <= min(2 * micro_batches, limit)


@given(st.integers(2, 6), micros)
@QUICK
def test_bubbles_are_as_large_as_the_papers_say(ranks, micro_batches):
    assume(micro_batches >= ranks)
    plain = (ranks - 1) / (micro_batches + ranks - 1)  # Narayanan et al. 2021, with forward and backward equally long
    for name in ("gpipe", "1f1b"):
        assert make_schedule(name, ranks, micro_batches).bubble == pytest.approx(plain)
    # ZB-H1 fills a third of 1F1B's bubble with each of two of its three kinds (Qi et al. 2024).
    zero = make_schedule("zero_bubble", ranks, micro_batches)
    assert zero.length <= 3 * micro_batches + ranks - 1
    assert zero.bubble < plain


@given(names, st.integers(2, 5), st.integers(2, 8), st.data())
@QUICK
def test_a_broken_schedule_is_refused(name, ranks, micro_batches, data):
    schedule = make_schedule(name, ranks, micro_batches)
    rank = data.draw(st.integers(0, ranks - 1))
    row = list(schedule.actions[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    how = data.draw(st.sampled_from(["drop", "double", "backward before forward"]))
    if how == "drop":
        del row[at]
    elif how == "double":
        row.append(row[at])
    else:
        forward = next(action for action in row if action.kind == FORWARD)
        backward = dataclasses.replace(forward, kind=BACKWARD)
        i, j = row.index(forward), row.index(backward)
        row[i], row[j] = row[j], row[i]
    actions = [tuple(row) if number == rank else one for number, one in enumerate(schedule.actions)]
    with pytest.raises(PlanError, match=f"the schedule {name} should run through"):
        check(dataclasses.replace(schedule, actions=tuple(actions)))


def test_an_action_of_another_rank_and_a_circle_are_refused():
    schedule = make_schedule("1f1b", 2, 2)
    first, last = schedule.actions
    with pytest.raises(PlanError, match="of another rank"):
        check(dataclasses.replace(schedule, actions=(first[:-1], last)))
    circle = (tuple(sorted(first)), tuple(sorted(last)))  # backwards first
    with pytest.raises(PlanError, match="wait for each other"):
        check(dataclasses.replace(schedule, actions=circle))


def test_the_picture_of_1f1b():
    lines = [" ".join(line.split()[2:]) for line in picture(make_schedule("1f1b", 2, 3)).splitlines()]
    assert lines == ["F0 F1 . B0 F2 B1 . B2", ". F0 B0 F1 B1 F2 B2 ."]


def test_runs_of_equal_shapes():
    batches = [torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 4), torch.zeros(2, 3)]
    assert [len(run) for run in same_shapes(batches)] == [2, 1, 1]


class Tied(nn.Module):
    """An embedding at the first stage that is the head at the last."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(31, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x @ self.words.weight.T


def padded(rows):
    """As long as the longest of these rows: micro-batches differ in shape."""
    length = max(len(row) for row in rows)
    ids = torch.stack([F.pad(row, (0, length - len(row))) for row in rows])
    return {"ids": ids, "labels": torch.stack([F.pad(row.flip(0), (0, length - len(row)), value=-1) for row in rows])}


def tied_loss(model, batch):
    scores = model(batch["ids"]).flatten(0, 1)
    labels = batch["labels"].flatten()
    return F.cross_entropy(scores, labels, reduction="sum", ignore_index=-1), (labels >= 0).sum()


def tied_workload(**parts):
    random = torch.Generator().manual_seed(2)
    lengths = [3 + index % 4 for index in range(23)]
    return paceline.Workload(
        **{
            "model": Tied,
            "loss": tied_loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
            "data": [torch.randint(31, (length,), generator=random) for length in lengths],
            "collate": padded,
            "batch_size": 9,
            "steps": 5,
            "precision": "float64",
            "clip_norm": 0.5,
            **parts,
        }
    )


def train(rank, make, parts, plan):
    api.init()
    job = Job(make(**parts), Plan.parse(plan))
    steps = [(job.step(batch), job.last.gradient_norm) for batch in job.batches()]
    return (
        steps,
        {n: p.detach().clone() for n, p in job.model.named_parameters() if not p.is_meta},
        job.parallel.local_shards(),
    )


def assert_equal_to_one_rank(results, make, parts):
    ((steps, whole, _),) = run_ranks(1, train, make, parts, "replicate=1")
    for other_steps, state, _ in results:
        for one, other in zip(steps, other_steps, strict=True):
            assert other == pytest.approx(one, rel=1e-10)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-9, atol=1e-11)
    assert {name for _, state, _ in results for name in state} == whole.keys()


@pytest.mark.parametrize(
    ("ranks", "schedule", "parts"),
    [
        (2, "1f1b", {"micro_batch_size": 2}),
        *[pytest.param(2, name, {"micro_batch_size": 4}, marks=SLOW) for name in SCHEDULES],
        *[pytest.param(3, name, {}, marks=SLOW) for name in SCHEDULES if name != "interleaved"],
    ],
)
def test_tied_embeddings_stay_equal_and_nothing_need_divide(ranks, schedule, parts):
    """Batches of 9, of 23 samples, and micro-batches as long as their longest row."""
    results = run_ranks(ranks, train, tied_workload, parts, f"pipeline={ranks},schedule={schedule}")
    holders = [state["words.weight"] for _, state, _ in results if "words.weight" in state]
    assert len(holders) >= 2, "the embedding is on one stage: the test is void"
    assert all(torch.equal(one, holders[0]) for one in holders)
    if schedule != "interleaved":
        assert results[0][2]["words.weight"].holders == (0, ranks - 1)
    assert_equal_to_one_rank(results, tied_workload, parts)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=sampled(row, column, of=2, mark=SLOW))
        for row, name in enumerate(("bert", "gpt2"))
        for column, schedule in enumerate(SCHEDULES)
    ],
)
def test_every_schedule_trains_a_transformer(name, schedule):
    parts = {"clip_norm": 0.5}
    make = functools.partial(workload, name)
    results = run_ranks(2, train, make, parts, f"pipeline=2,schedule={schedule},micro_batches=3")
    assert_equal_to_one_rank(results, make, parts)


def coupled_workload(**parts):
    """A loss in which every sample meets every other one."""
    random = torch.Generator().manual_seed(4)

    def loss(model, batch):
        found = F.normalize(model(batch), dim=1)
        return F.cross_entropy(found @ found.T * 5, torch.arange(len(batch)), reduction="sum"), len(batch)

    return paceline.Workload(
        model=lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=[torch.randn(6, generator=random) for _ in range(16)],
        batch_size=8,
        steps=3,
        precision="float64",
        clip_norm=0.5,
        **parts,
    )


def pieces_of(rank, make):
    api.init()
    job = Job(make(), Plan.parse("pipeline=2"))
    return len(next(job.batches()).microbatches)


def test_a_loss_in_which_samples_meet_takes_the_batch_whole():
    assert_equal_to_one_rank(run_ranks(2, train, coupled_workload, {}, "pipeline=2"), coupled_workload, {})
    assert run_ranks(2, pieces_of, coupled_workload) == [1, 1]
    assert run_ranks(2, pieces_of, tied_workload) == [3, 3], "nine samples in at most four micro-batches"


class Dropped(nn.Module):
    """Equal layers, each with dropout: equal random numbers would give equal masks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return x


def dropped_workload():
    random = torch.Generator().manual_seed(5)
    return paceline.Workload(
        model=Dropped,
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=[torch.randn(64, generator=random) for _ in range(24)],
        batch_size=8,
        steps=3,
        precision="float64",
    )


def masks_of(rank, plan, folder):
    """Loss and masks of every step, and of those after the first taken again from its checkpoint."""
    api.init()
    taken = [[], []]
    for number in range(2):
        job = Job(dropped_workload(), Plan.parse(plan))
        if number:
            job.load(folder)
        for batch in job.batches():
            with DrawTrace() as drawn:
                loss = job.step(batch)
            taken[number].append((loss, drawn.forward, drawn.again))
            if not number and job.step_number == 1:
                job.save(folder)
        job.close(save=False)
    return taken


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, "pipeline=2"),
        *[
            pytest.param(2, f"pipeline=2,{more}", marks=SLOW)
            for more in ("schedule=interleaved", "schedule=zero_bubble", "checkpointing=full")
        ],
        pytest.param(4, "pipeline=2,tensor=2", marks=SLOW),
        pytest.param(4, "replicate=2,pipeline=2", marks=SLOW),
    ],
)
def test_every_stage_draws_its_own_dropout_masks(ranks, plan, tmp_path):
    mesh = Mesh.parse(Plan.parse(plan).mesh)
    found = run_ranks(ranks, masks_of, plan, str(tmp_path / "checkpoint"))
    by_stream = {}
    for rank, (steps, resumed) in enumerate(found):
        assert resumed == steps[1:], "a resumed job draws the same masks and has the same losses"
        forward = [mask for _, masks, _ in steps for mask in masks]
        again = [mask for _, _, masks in steps for mask in masks]
        assert len(forward) >= 3 * 2 * 4, "masks of few micro-batches or layers: the test is void"
        assert len(set(forward)) == len(forward)
        assert set(again) <= set(forward)
        assert bool(again) == ("checkpointing" in plan)
        assert by_stream.setdefault(mesh.random_stream(rank), forward) == forward, "tensor ranks share a stream"
    assert len(by_stream) == mesh.size("pipeline") * mesh.data_size
    every = [mask for masks in by_stream.values() for mask in masks]
    assert len(set(every)) == len(every)
