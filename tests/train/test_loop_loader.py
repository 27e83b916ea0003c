"""A user's loader, cut: the parts of all ranks are its batches, whoever draws what in between, and after a resume."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline
from paceline.checkpoint.manifest import sealed
from paceline.nouns.errors import CheckpointError
from paceline.train.loader import Place
from paceline.train.loop_loader import CutLoader, load_pass

SAMPLES = 23


class Numbers(Dataset):
    """Draws with every sample, as an augmentation does."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), float(torch.rand(()) + random.random())])


class ManyAtOnce(Numbers):
    """As the data sets of Hugging Face: asked for a whole batch."""

    def __getitems__(self, indices):
        return [torch.tensor([float(index), 0.0]) for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(SAMPLES):
            yield torch.tensor([float(index), float(torch.rand(()))])


class Drawing(Sampler):
    """Draws from Python's random numbers as it goes, and begins other passes otherwise."""

    def __init__(self):
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        indices = list(range(SAMPLES))
        for number in range(4):
            yield [random.choice(indices), (number + self.calls) % SAMPLES, int(torch.randint(SAMPLES, ()))]

    def __len__(self):
        return 4


@pytest.mark.parametrize(("batch", "is_place"), [(0, True), (6, True), (7, True), (8, False), (10**15, False)])
def test_a_place_behind_a_pass_is_refused(batch, is_place):
    cut = CutLoader(DataLoader(Numbers(), batch_size=4), 0)
    context = contextlib.nullcontext() if is_place else pytest.raises(CheckpointError, match="a pass has 6")
    with context:
        cut.check_place(Path("step-3"), batch)


@pytest.mark.parametrize("loader", ["stream", "batch sampler"])
def test_passes_of_unknown_lengths_have_any_place(loader):
    CutLoader(LOADERS[loader](), 0).check_place(Path("step-3"), 10**15)


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "dropping the last": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator()),
    "torch's generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.default_generator),
    "of some": lambda: DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(3, 12))),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 20)
    ),
    "with replacement": lambda: DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), True, 70)),
    "a few": lambda: DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), num_samples=9)),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Drawing()),
    "many at once": lambda: DataLoader(ManyAtOnce(), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "workers, torch's generator": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, generator=torch.default_generator
    ),
}


def batches(make, passes=2, part=0, parts=1, disturbed=False):
    """Every pass's batches, as one part of several sees them."""
    cut = CutLoader(make(), 7)
    found = []
    for number in range(passes):
        cut.begin_pass()
        rows = []
        for each in load_pass(cut.loader, Place(part, parts, 7, number), 0):
            if disturbed:  # the loop draws, and other ranks draw otherwise
                torch.rand(part + 1)
                random.random()
            rows.append(each)
        found.append(rows)
        cut.end_pass()
    return found


@pytest.mark.parametrize("name", LOADERS)
def test_the_parts_are_the_batches(name):
    whole = batches(LOADERS[name])
    parts = [batches(LOADERS[name], part=part, parts=3, disturbed=True) for part in range(3)]
    for number, rows in enumerate(whole):
        assert rows
        for at, batch in enumerate(rows):
            cut = [part[number][at] for part in parts]
            torch.testing.assert_close(torch.cat([each.batch[: each.samples] for each in cut]), batch.batch)
            assert {each.check for each in cut} == {batch.check}
            assert {each.of for each in cut} == {batch.of} == {len(batch.batch)}
            assert [each.keeps_pace for each in cut] == [not each.samples for each in cut]
            assert all(len(each.batch) == 1 for each in cut if each.keeps_pace)


@pytest.mark.parametrize("name", LOADERS)
def test_a_loop_draws_what_it_would_draw_without_a_loader(name):
    cut = CutLoader(LOADERS[name](), 7)
    torch.manual_seed(3)
    random.seed(3)
    drawn = []
    for number in range(2):
        cut.begin_pass()
        for _ in load_pass(cut.loader, Place(0, 1, 7, number), 0):
            drawn.append((float(torch.rand(())), random.random()))
        drawn.append((float(torch.rand(())), random.random()))
        cut.end_pass()
    torch.manual_seed(3)
    random.seed(3)
    assert drawn == [(float(torch.rand(())), random.random()) for _ in drawn]


class DrawnStream(IterableDataset):
    def __iter__(self):
        for _ in range(SAMPLES):
            yield torch.rand(2)


def masked(samples):
    return torch.stack(samples) + 0 * torch.rand(len(samples)).sum()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collate_draws_leaves_the_stream_alone(workers):
    def make():
        return DataLoader(DrawnStream(), batch_size=4, collate_fn=masked, num_workers=workers)

    (whole,) = batches(make, passes=1)
    parts = [batches(make, passes=1, part=part, parts=3)[0] for part in range(3)]
    for at, batch in enumerate(whole):
        cut = [part[at] for part in parts]
        assert torch.equal(torch.cat([each.batch[: each.samples] for each in cut]), batch.batch)


def test_passes_have_other_orders_and_other_draws():
    first, second = batches(LOADERS["shuffled"])
    assert not torch.equal(first[0].batch, second[0].batch)
    in_order = batches(LOADERS["in order"])
    assert torch.equal(in_order[0][0].batch[:, 0], in_order[1][0].batch[:, 0])
    assert not torch.equal(in_order[0][0].batch[:, 1], in_order[1][0].batch[:, 1])


def test_workers_load_what_the_process_loads():
    alone = batches(LOADERS["workers"])
    here = batches(LOADERS["shuffled"])
    for rows, others in zip(alone, here, strict=True):
        assert all(torch.equal(row.batch, other.batch) for row, other in zip(rows, others, strict=True))


@pytest.mark.parametrize("name", LOADERS)
def test_a_new_process_goes_on_in_the_middle_of_a_pass(name):
    expected = batches(LOADERS[name])[1][2:]
    cut = CutLoader(LOADERS[name](), 7)
    cut.passes = 2
    cut.go_to(1, 2)
    torch.rand(3)
    assert cut.begin_pass()
    rest = list(load_pass(cut.loader, Place(0, 1, 7, 1), cut.batch))
    assert [each.check for each in rest] == [each.check for each in expected]
    assert all(torch.equal(each.batch, other.batch) for each, other in zip(rest, expected, strict=True))


def test_loop_loader_skips_uncounted_passes_before_the_resume():
    cut = CutLoader(LOADERS["shuffled"](), 7)
    cut.go_to(2, 1)
    assert [cut.begin_pass() for _ in range(3)] == [False, False, True]
    assert (cut.number, cut.batch) == (2, 1)


def test_loading_leaves_the_loops_random_numbers_alone():
    torch.manual_seed(3)
    random.seed(3)
    for name in LOADERS:
        expected = torch.rand(1), random.random()
        torch.manual_seed(3)
        random.seed(3)
        batches(LOADERS[name])
        assert (torch.rand(1), random.random()) == expected, name
        torch.manual_seed(3)
        random.seed(3)


def loop_of_six_batches():
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.ones(24, 2), torch.ones(24, 1))
    loader = DataLoader(data, batch_size=4)
    return paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def test_loop_loader_refuses_a_checkpoint_past_the_end_of_a_pass(tmp_path):
    job, model, optimizer, loader = loop_of_six_batches()
    for x, y in itertools.islice(loader, 3):
        optimizer.zero_grad()
        job.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    job.save(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(sealed({**manifest, "loop": {**manifest["loop"], "batch": 10**15}})))
    other, model, *_ = loop_of_six_batches()
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match="after 1000000000000000 batches of a pass, and a pass has 6"):
        other.load(tmp_path / "saved")
    assert torch.equal(model.weight, before)
    path.write_text(json.dumps(sealed(manifest)))
    other.load(tmp_path / "saved")
    assert other.step_number == 3
