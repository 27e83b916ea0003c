"""A workload whose data is a stream: the same batches on any number of ranks, and on after a checkpoint."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.checkpoint.manifest_schema import fault_of_form
from paceline.comm import api
from paceline.nouns.data_order import share
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.train.job import Job

from support.kill_and_resume_checks import check_goes_on, check_verified
from support.ranks import run_ranks
from support.streams import BATCH, LENGTH, STREAMS, Net, Plain, WithState, loss, noisy, sample, workload

TOLERANCE = 1e-10
PLANS = {
    2: ("replicate=2", "shard=2", "shard=2,zero=1", "tensor=2", "pipeline=2"),
    4: ("replicate=4", "replicate=2,shard=2", "shard=2,tensor=2", "replicate=2,pipeline=2"),
}
CASES = [(kind, plan, {}) for kind in ("plain", "generated") for plans in PLANS.values() for plan in plans]
CASES += [(kind, plan, {}) for kind in sorted(STREAMS) for plan in ("replicate=2", "replicate=4")]
CASES += [("reread", "replicate=2", {"steps": 13}), ("plain", "replicate=2", {"micro_batch_size": 3})]


def key(kind, parts):
    return kind, json.dumps(parts)


def taken(batch):
    """The numbers of this rank's samples, and their values."""
    numbers = [number for row in batch.microbatches for number in row[2].tolist()]
    return numbers, [value for row in batch.microbatches for value in row[0].sum(1).tolist()]


def train_all(rank, cases):
    api.init()
    results = {}
    for kind, plan, parts in cases:
        job = Job(workload(kind, **parts), Plan.parse(plan))
        steps = []
        for batch in job.batches():
            steps.append((batch.positions, *taken(batch), job.step(batch)))
        state = {}
        if rank == 0 and "replicate" in plan and "," not in plan:
            state = {name: value.detach().clone() for name, value in job.model.state_dict().items()}
        results[key(kind, parts), plan] = steps, state
        job.close()
    return results


@functools.cache
def results(size):
    cases = [case for case in CASES if Plan.parse(case[1]).world_size == size]
    if size == 1:
        cases = [(kind, "replicate=1", parts) for kind, parts in {key(k, p): (k, p) for k, _, p in CASES}.values()]
    return run_ranks(size, train_all, cases, timeout_s=300)


@pytest.mark.parametrize(("kind", "plan", "parts"), CASES, ids=str)
def test_stream_ranks_take_their_parts_of_one_process_batches(kind, plan, parts):
    steps, state = results(1)[0][key(kind, parts), "replicate=1"]
    mesh = Mesh.parse(Plan.parse(plan).mesh)
    for rank, answers in enumerate(results(mesh.world_size)):
        other_steps, other_state = answers[key(kind, parts), plan]
        assert len(other_steps) == len(steps) == parts.get("steps", 15)
        for (positions, numbers, values, mean), (whole_positions, whole, whole_values, whole_mean) in zip(
            other_steps, steps, strict=True
        ):
            assert positions == whole_positions
            own = share(range(len(positions)), mesh.data_part(rank), mesh.data_size)
            assert numbers == whole[own.start : own.stop]
            assert values == whole_values[own.start : own.stop]  # bit for bit
            assert mean == pytest.approx(whole_mean, rel=TOLERANCE)
        for name, value in other_state.items():
            torch.testing.assert_close(value, state[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_each_epoch_has_every_sample_once():
    for kind in STREAMS:
        steps, _ = results(1)[0][key(kind, {}), "replicate=1"]
        epochs = []
        for first in (0, 5, 10):
            epochs.append([number for _, numbers, _, _ in steps[first : first + 5] for number in numbers])
        assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs)
        assert (epochs[0] == epochs[1]) == (kind in ("plain", "sized"))  # set_epoch was called, or the order drawn


def test_a_worker_that_reads_ahead_changes_nothing():
    without, _ = results(1)[0][key("generated", {}), "replicate=1"]
    api.init()
    job = Job(workload("generated", loader_workers=1), Plan())
    ahead = [(batch.positions, *taken(batch), job.step(batch)) for batch in job.batches()]
    assert [step[:3] for step in ahead] == [step[:3] for step in without]
    # Here torch may use several threads, which round otherwise.
    assert [mean for *_, mean in ahead] == pytest.approx([mean for *_, mean in without], rel=TOLERANCE)


def test_a_worker_that_reads_ahead_goes_on_bit_for_bit(tmp_path):
    parts = {"collate": noisy, "loader_workers": 1}
    expected = save_and_go_on(0, tmp_path / "saved", "with a state", "replicate=1", 7, parts)
    assert load_and_go_on(0, tmp_path / "saved", "with a state", "replicate=1", 0, parts)[0] == expected


def test_in_one_process_it_is_a_plain_loop_over_the_stream():
    """The plain loop has no Paceline in it. A stream without random numbers: what seeds them is Paceline's own."""

    class Numbers(IterableDataset):
        def __iter__(self):
            for number in range(20):
                yield torch.full((6,), number / 20, dtype=torch.float64), torch.tensor(number / 3.0), number

    api.init()
    job = Job(workload("plain", data=Numbers(), epochs=2, clip_norm=None), Plan())
    model = Net().double()
    model.load_state_dict(job.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        for batch in DataLoader(Numbers(), batch_size=BATCH):
            optimizer.zero_grad()
            total, count = loss(model, batch)
            (total / count).backward()
            optimizer.step()
            losses.append(float(total.detach()) / count)
    assert [job.step(batch) for batch in job.batches()] == pytest.approx(losses, rel=1e-6)


def save_and_go_on(rank, folder, kind, plan, at, parts):
    api.init()
    job = Job(workload(kind, **parts), Plan.parse(plan))
    batches = job.batches()
    for _ in range(at):
        job.step(next(batches))
    job.save(folder)
    return [(batch.positions, *taken(batch), job.step(batch)) for batch in batches]


def load_and_go_on(rank, folder, kind, plan, steps_before, parts):
    api.init()
    job = Job(workload(kind, **parts), Plan.parse(plan))
    batches = job.batches()
    for _ in range(steps_before):
        job.step(next(batches))
    job.load(folder)
    after = [(batch.positions, *taken(batch), job.step(batch)) for batch in job.batches()]
    return after, getattr(job.loader.data.stream.data, "reads", None)


@pytest.mark.parametrize("kind", sorted(STREAMS))
@pytest.mark.parametrize(("at", "before"), [(3, 0), (7, 9), (7, 1), (5, 0), (10, 12)])
def test_it_goes_on_bit_for_bit(tmp_path, kind, at, before):
    parts = {"collate": noisy}
    expected = save_and_go_on(0, tmp_path / "saved", kind, "replicate=1", at, parts)
    after, reads = load_and_go_on(0, tmp_path / "saved", kind, "replicate=1", before, parts)
    assert len(after) == 15 - at
    assert after == expected
    if kind == "with a state" and not before:
        left = 3 * LENGTH - (at // 5 * LENGTH + at % 5 * BATCH)
        assert reads == left  # nothing was read on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan", "other", "parts"),
    [
        ("generated", "replicate=2", "replicate=2", {}),
        ("with a state", "replicate=2", "shard=2", {}),
        ("reread", "replicate=1", "replicate=4", {"steps": 17}),
        ("with a state", "pipeline=2", "tensor=2", {}),
    ],
)
def test_it_goes_on_under_other_plans(tmp_path, kind, plan, other, parts):
    folder = str(tmp_path / "saved")
    before = run_ranks(Plan.parse(plan).world_size, save_and_go_on, folder, kind, plan, 7, parts)
    after = run_ranks(Plan.parse(other).world_size, load_and_go_on, folder, kind, other, 0, parts)
    assert len(after[0][0]) == parts.get("steps", 15) - 7
    for (positions, _, _, mean), (other_positions, _, _, other_mean) in zip(before[0], after[0][0], strict=True):
        assert other_positions == positions
        assert other_mean == pytest.approx(mean, rel=TOLERANCE)
    if plan == other:
        assert [answer for answer, _ in after] == before


def test_the_checkpoint_says_where_the_stream_is(tmp_path):
    save_and_go_on(0, tmp_path / "saved", "with a state", "replicate=1", 7, {})
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert (manifest["position"], manifest["samples"]) == (LENGTH + 2 * BATCH, 0)
    state = {"epoch": 1, "inner": {"read": 2 * BATCH, "shard": None}}
    assert manifest["stream"] == {"epoch": 1, "batch": 2, "taken": 7, "state": state}


MANIFEST = {
    "step": 1, "position": 1, "seed": 0, "samples": 0, "world_size": 1, "files": [], "tensors": {},
    "optimizer": {"class": "SGD", "groups": [], "numbers": {}}, "scheduler": None,
}  # fmt: skip
PLACE = {"epoch": 1, "batch": 2, "taken": 7, "state": {"read": 3}}


def test_a_place_in_a_stream_is_taken():
    for place in (None, PLACE, {**PLACE, "state": None}):
        assert fault_of_form({**MANIFEST, "stream": place}) is None


@pytest.mark.parametrize(
    "place",
    [
        {**PLACE, "epoch": -1},
        {**PLACE, "epoch": 10**12},
        {**PLACE, "batch": -1},
        {**PLACE, "batch": "2"},
        {**PLACE, "taken": 10**30},
        {**PLACE, "state": 3},
        {**PLACE, "state": {"read": 10**30}},
        {**PLACE, "more": 1},
        {"epoch": 1, "batch": 2},
        [1, 2],
        7,
    ],
    ids=str,
)
def test_what_is_no_place_in_a_stream_is_refused(place):
    assert fault_of_form({**MANIFEST, "stream": place}) is not None


class Tuples(WithState):
    """Its state has what JSON would change."""

    def state_dict(self):
        return {"place": (self.reads, self.epoch)}

    def load_state_dict(self, state):
        raise AssertionError("it was not to be saved")


def test_stream_without_saveable_state_is_read_again_on_resume(tmp_path):
    parts = {"data": Tuples}
    expected = save_and_go_on(0, tmp_path / "saved", "plain", "replicate=1", 7, parts)
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["stream"]["state"] is None
    assert load_and_go_on(0, tmp_path / "saved", "plain", "replicate=1", 0, parts)[0] == expected


def evaluate(rank, plan):
    api.init()
    job = Job(workload("generated", evaluation=Plain(11), score=count), Plan.parse(plan))
    first = job.evaluate()
    batches = job.batches()
    seen = [(batch.positions, *taken(batch), job.step(batch)) for batch in (next(batches), next(batches))]
    return first, seen, job.evaluate(Plain(5)), [job.step(batch) for batch in batches]


def count(model, batch):
    _, _, numbers = batch
    return {"sum": (numbers.sum(), 1), "loss": loss(model, batch)}


def test_an_evaluation_may_be_a_stream_and_leaves_training_alone():
    (first, seen, second, after), *_ = run_ranks(1, evaluate, "replicate=1")
    steps, _ = results(1)[0][key("generated", {}), "replicate=1"]
    assert seen == steps[:2]
    assert after == [mean for *_, mean in steps[2:]]
    for plan in ("replicate=2", "tensor=2"):
        for answers in run_ranks(2, evaluate, plan):
            assert answers[0]["loss"] == pytest.approx(first["loss"], rel=TOLERANCE)
            assert answers[2]["loss"] == pytest.approx(second["loss"], rel=TOLERANCE)


class Split(Plain):
    """As Hugging Face's `split_dataset_by_node` leaves it."""

    _distributed = ("rank", "world_size")


ONCE = iter([sample(0)])
OPENED = {sample(0)[2]}
# What the data is, other parts, and what the error says; all before the first step.
REFUSED = {
    "a generator": ({"data": (sample(n) for n in range(9))}, "which can be read once"),
    "an iterator": ({"data": ONCE}, "write data=samples|data=samples in place of data=samples()"),
    "a set": ({"data": {1, 2, 3}}, "may have in another order"),
    "a dict": ({"data": {"a": 1}}, "whose [] takes a key"),
    "a loader": ({"data": DataLoader(Plain())}, "it is a DataLoader"),
    "a text": ({"data": "samples.txt"}, "read it first"),
    "a number": ({"data": 7}, "it is 7 of type int"),
    "a function of nothing": ({"data": lambda: None}, "its function returned a NoneType"),
    "a function of one iterator": ({"data": lambda: ONCE}, "returns the same tuple_iterator again|returns the same list_iterator again"),
    "an empty stream": ({"data": Plain(0)}, "a stream that ends before its first sample"),
    "an empty generator": ({"data": lambda: (n for n in ())}, "a stream that ends before its first sample"),
    "one that is split already": ({"data": Split()}, "leave split_dataset_by_node out"),
    "several processes": ({"data": Plain(), "loader_workers": 2}, "write loader_workers=1"),
    "samples of no common shape": ({"data": lambda: iter([torch.ones(2), torch.ones(3)])}, "hand in collate=..."),
    "no batch size": ({"data": Plain(), "batch_size": 0}, "batch_size should be a whole number of at least 1"),
    "an evaluation that can be read once": ({"data": Plain(), "evaluation": iter([1])}, "the workload's evaluation should be"),
}  # fmt: skip


def take_a_step(parts):
    job = Job(workload("plain", **parts), Plan())
    job.step(next(job.batches()))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_stream_is_refused(case):
    parts, found = REFUSED[case]
    api.init()
    with pytest.raises(WorkloadError) as caught:
        take_a_step(parts)
    text = str(caught.value)
    assert any(each in text for each in found.split("|")), text
    assert "\n  fix: " in text


class RankDependent(IterableDataset):
    """Its length, or its order, depends on the rank."""

    def __init__(self, is_short):
        self.is_short = is_short

    def __iter__(self):
        first = 0 if self.is_short else paceline.rank()
        yield from map(sample, range(first, 3 + 3 * paceline.rank() if self.is_short else 20))


def start(rank, cases):
    api.init()
    texts = []
    for plan, parts in cases:
        try:
            parsed = Plan(mesh="replicate=2", server=1) if plan == "server=1" else Plan.parse(plan)
            Job(workload("plain", **parts), parsed)
            texts.append("")
        except PacelineError as error:
            texts.append(str(error))
    return texts


BY_RANKS = [
    ("server=1", {}, "write replicate, shard, tensor or pipeline for server"),
    ("replicate=2", {"data": RankDependent(True)}, "rank"),
    ("replicate=2", {"batch_size": 1}, "1 of them would get none"),
    ("tensor=2", {"data": Plain(0)}, "ends before its first sample"),
    ("pipeline=2", {"data": Plain(0)}, "ends before its first sample"),
    ("replicate=2", {"data": Plain(0)}, "ends before its first sample"),
    ("replicate=2", {"data": Plain(), "loader_workers": 3}, "write loader_workers=1"),
]


def test_stream_use_that_ranks_cannot_do_is_refused_at_start():
    for texts in run_ranks(2, start, [(plan, parts) for plan, parts, _ in BY_RANKS]):
        for (plan, _, found), text in zip(BY_RANKS, texts, strict=True):
            assert found in text, (plan, text)


def notices(rank, parts):
    api.init()
    said = []
    Job.notice = lambda job, text, everywhere=False: said.append(text)
    Job(workload("plain", **parts), Plan(mesh="replicate=2"))
    return said


def test_a_stream_whose_first_sample_depends_on_the_rank_is_told():
    for said in run_ranks(2, notices, {"data": RankDependent(False)}):
        assert any("begin with different samples" in text for text in said), said
    for said in run_ranks(2, notices, {"data": Plain()}):
        assert len(said) == 1


def test_that_no_total_is_known_is_said_once(capfd):
    api.init()
    job = Job(workload("plain"), Plan())
    assert job.total_steps == 0
    assert "the data is a stream: its end shows how many steps an epoch has" in capfd.readouterr().out
    job = Job(workload("plain", steps=9), Plan())
    assert job.total_steps == 9
    assert "stream" not in capfd.readouterr().out


FILE = """
import os, signal, torch
import paceline
from support.streams import generated, workload
from support.whole_optimizers import muon_and_adamw

def schedulers(optimizers):
    return [torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.9), torch.optim.lr_scheduler.StepLR(optimizers[1], 3, 0.5)]

workload = workload("generated", optimizer=muon_and_adamw, scheduler=schedulers)
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if job.step_number == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
    print("ends at", job.step_number, job.position, repr(sum(float(p.detach().sum()) for p in job.model.parameters())))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit_and_verify_agrees(tmp_path):
    file = tmp_path / "streamed.py"
    file.write_text(FILE)
    check_goes_on(tmp_path, file)
    check_verified(tmp_path, file)
