"""Loops that are ahead of themselves, and resumed ones that count: a loss has the weight of its own batches."""

from __future__ import annotations

import copy
import json
import os
import pickle
import queue
import threading
from dataclasses import asdict
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.train.taken_batches import BatchMarks, TakenBatches

from support.ranks import preload, run_ranks

preload("paceline.train.loop_job")
PASSES = 2
_draws = torch.Generator().manual_seed(0)
X = torch.randn(23, 4, dtype=torch.float64, generator=_draws)
Y = torch.randn(23, 2, dtype=torch.float64, generator=_draws)


def test_loop_ahead_marks_batches_of_copied_not_pickled_models():
    begun = []
    model = nn.Linear(4, 2, dtype=torch.float64)
    BatchMarks(TakenBatches(), lambda: False, begun.append).watch(model)
    for count, called in enumerate((model, copy.deepcopy(model)), 1):
        called(X)
        assert len(begun) == count
    pickle.loads(pickle.dumps(model))(X)
    assert len(begun) == 2


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 48), nn.Linear(48, 48), nn.Linear(48, 2)
        self.norm = nn.BatchNorm1d(48, affine=False) if norm else nn.Identity()

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))))


class Plain:
    """A plain loop's `job`, by torch alone."""

    rank, step_number, position = 0, 0, 0

    def epochs(self, count):
        return range(count)

    def backward(self, loss, weight=None):
        loss.backward()

    def end_step(self):
        pass


class Loop:
    """What an idiom has: the job, the objects, and what it does with a batch."""

    def __init__(self, job, model, optimizer, loader, stop=None):
        self.job, self.model, self.optimizer, self.loader, self.stop = job, model, optimizer, loader, stop

    def add(self, batch, share=1.0):
        x, y = batch
        self.job.backward(F.mse_loss(self.model(x), y) * share)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stop is not None and self.job.step_number == self.stop:
            self.job.end_step()
            self.job.checkpoints.finish()
            raise EOFError

    def train(self, batch):
        self.add(batch)
        self.update()


def prefetched(loop):
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            loop.train(batch)
            batch = following


def fetched_after_forward(loop):
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        batch = next(batches, None)
        while batch is not None:
            loss = F.mse_loss(loop.model(batch[0]), batch[1])
            batch = next(batches, None)
            loop.job.backward(loss)
            loop.update()


def fetched_after_backward(loop):
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        batch = next(batches, None)
        while batch is not None:
            loop.add(batch)
            batch = next(batches, None)
            loop.update()


def with_the_next(loop):
    def pairs():
        before = None
        for batch in loop.loader:
            if before is not None:
                yield before, batch
            before = batch
        yield before, None

    for _ in loop.job.epochs(PASSES):
        for batch, _ in pairs():
            loop.train(batch)


def in_a_list(loop):
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        while group := list(islice(batches, 3)):
            for batch in group:
                loop.add(batch, 1 / len(group))
            loop.update()


def each_of_a_list(loop):
    for _ in loop.job.epochs(PASSES):
        for batch in list(loop.loader):
            loop.train(batch)


def endless(loader):
    while True:
        yield from loader


def two_at_once(loop):
    batches = endless(loop.loader)
    for _ in range(loop.job.step_number, 5):
        first, second = next(batches), next(batches)
        loop.add(first, 0.5)
        loop.add(second, 0.5)
        loop.update()


def two_as_one(loop):
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        for first, second in zip(batches, batches, strict=False):
            x, y = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
            loop.train((x, y))


def copied(loop):
    """As the usual prefetcher normalizes: what the model gets is made of the batch."""
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        batch = next(batches, None)
        while batch is not None:
            x, y = batch[0] * 2 - 1, batch[1] * 2
            batch = next(batches, None)
            loop.job.backward((loop.model(x) - y).square().mean())
            loop.update()


def left_out(loop):
    for _ in loop.job.epochs(PASSES):
        for number, batch in enumerate(loop.loader):
            if number % 3 != 1:
                loop.train(batch)


def queued(loop):
    for _ in loop.job.epochs(PASSES):
        ready = queue.Queue(maxsize=3)

        def read(ready=ready):
            for batch in loop.loader:
                ready.put(batch)
            ready.put(None)

        thread = threading.Thread(target=read)
        thread.start()
        while (batch := ready.get()) is not None:
            loop.train(batch)
        thread.join()


IDIOMS = [
    prefetched,
    fetched_after_forward,
    fetched_after_backward,
    with_the_next,
    in_a_list,
    each_of_a_list,
    two_at_once,
    two_as_one,
    copied,
    left_out,
    queued,
]
SOME = [prefetched, fetched_after_forward, two_as_one]
PLANS = {
    "replicate=3": IDIOMS,
    "replicate=2": [queued],
    "shard=2": SOME,
    "shard=2,zero=1": SOME,
    "tensor=2": [prefetched],  # each shape is captured, for seconds
}


def made(norm=False, count=23):
    torch.manual_seed(0)
    model = Net(norm).double()
    data = TensorDataset(X[:count], Y[:count])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, batch_size=4)


def values(model):
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.detach().clone()
    return found


def plain(idiom, norm=False, count=23):
    loop = Loop(Plain(), *made(norm, count))
    idiom(loop)
    return values(loop.model)


def take(_, idioms, line, norm=False, count=23, folder=None, stops=None):
    """What ranks end with: steps, samples, a score and the model's state; or what they refuse."""
    plan = Plan.parse(line)
    options = {"check": "off", "checkpoint_every": 1 if folder else 0}
    os.environ["PACELINE_PLAN"] = json.dumps({**asdict(plan), **options})
    ended = []
    for number, idiom in enumerate(idioms):
        if folder:
            os.environ["PACELINE_RUN_DIR"] = run = str(folder / idiom.__name__)
            os.makedirs(run, exist_ok=True)
            if stops is None:
                os.environ["PACELINE_RESUME"] = f"{run}/checkpoints"
        loop = Loop(*paceline.prepare(*made(norm, count)), stops and stops[number])
        told = []
        loop.job.notice = lambda text, everywhere=False, told=told: told.append(text)
        try:
            idiom(loop)
            ended.append((*end_of(loop, "tensor" in line), told))
        except EOFError:
            ended.append(loop.job.step_number)
        except UsageError as error:
            ended.append(error)
        loop.job.close(save=False)
    return ended


def end_of(loop, is_split):
    loop.job.end_step()
    with loop.job.gathered():
        state = {} if is_split else values(loop.model)
    score = loop.job.evaluate(TensorDataset(X, Y), lambda m, b: {"loss": ((m(b[0]) - b[1]).square().sum(), len(b[0]))})
    return loop.job.step_number, loop.job.position, score["loss"], state


def score_of(state, norm):
    model = Net(norm).double()
    model.load_state_dict(state)
    return (model.eval()(X) - Y).square().sum().item() / len(X)


def check(idioms, line, norm=False, count=23):
    for ended in run_ranks(Plan.parse(line).world_size, take, idioms, line, norm, count):
        for idiom, (_, _, score, state, _) in zip(idioms, ended, strict=True):
            expected = plain(idiom, norm, count)
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12, msg=f"{idiom} {name}")
            assert score == pytest.approx(score_of(expected, norm), rel=1e-10), idiom


@pytest.mark.parametrize("line", PLANS)
def test_a_loop_that_is_ahead_trains_as_one_process(line):
    check(PLANS[line], line)


@pytest.mark.parametrize("line", ["replicate=3", "shard=3"])
def test_a_rank_without_samples_counts_none(line):
    check([prefetched, fetched_after_forward, two_at_once, each_of_a_list, copied], line, norm=True, count=22)


@pytest.mark.parametrize("line", PLANS)
def test_a_loop_that_is_ahead_goes_on_where_it_was(tmp_path, line):
    size = Plan.parse(line).world_size
    idioms = PLANS[line]
    norm = line != "tensor=2"
    whole = run_ranks(size, take, idioms, line, norm)[0]
    stops = [max(1, steps // 2) for steps, *_ in whole]
    assert run_ranks(size, take, idioms, line, norm, 23, tmp_path, stops)[0] == stops
    again = run_ranks(size, take, idioms, line, norm, 23, tmp_path)[0]
    for idiom, one, other in zip(idioms, again, whole, strict=True):
        assert one[:3] == other[:3], idiom
        for name, tensor in one[3].items():
            assert torch.equal(tensor, other[3][name]), (idiom, name)


def summed(loop):
    """One backward pass of two batches' losses."""
    batches = endless(loop.loader)
    for _ in range(6):
        (a, b), (c, d) = next(batches), next(batches)
        loop.job.backward((F.mse_loss(loop.model(a), b) + F.mse_loss(loop.model(c), d)) / 2)
        loop.update()


def flattened(loop, weighs=False):
    """Nothing tells of which batch the loss is: both tensors are copies, and no rows are left."""
    for _ in loop.job.epochs(PASSES):
        batches = iter(loop.loader)
        batch = next(batches, None)
        while batch is not None:
            x, y = batch[0] * 2, batch[1] * 2
            batch = next(batches, None)
            loss = (loop.model(x.repeat(3, 1)) - y.repeat(3, 1)).square().mean()
            loop.job.backward(loss, weight=len(x) if weighs else None)
            loop.update()


def weighed(loop):
    flattened(loop, weighs=True)


def test_what_cannot_be_told_is_refused_at_the_first_step():
    for ended in run_ranks(2, take, [summed, flattened], "replicate=2"):
        for error, found in zip(ended, ["of several batches", "it can't be told"], strict=True):
            assert found in error.found
            assert error.step == 1


def test_the_advice_for_what_cannot_be_told_is_right():
    check([two_at_once, weighed], "replicate=2")
    check([summed, flattened], "replicate=2", count=20)  # equal batches, as drop_last=True leaves them
    check([summed, flattened], "replicate=1")


class Counting:
    """Accumulates two batches, and the last of a pass, by what `counted` makes of the loader."""

    __name__ = "counting"

    def __init__(self, counted, keeps=False):
        self.counted, self.keeps = counted, keeps

    def __call__(self, loop):
        for _ in loop.job.epochs(PASSES):
            for i, batch in self.counted(loop.loader):
                loop.add(batch, 0.5)
                if i % 2 or i + 1 == len(loop.loader):
                    loop.update()


def from_one(loader):
    for i, batch in enumerate(loader, 1):
        yield i - 1, batch


def enumerated_bar(loader):
    return enumerate(batch for batch in loader)


def own_count(loader):
    yield from zip(range(len(loader)), loader, strict=False)


def stopped_in_a_pass(tmp_path, counted):
    whole = run_ranks(2, take, [Counting(counted)], "replicate=2", False, 20)[0][0]
    assert run_ranks(2, take, [Counting(counted)], "replicate=2", False, 20, tmp_path, [5])[0] == [5]
    return whole, run_ranks(2, take, [Counting(counted)], "replicate=2", False, 20, tmp_path)[0][0]


@pytest.mark.parametrize("counted", [enumerate, from_one], ids=["enumerate", "from 1"])
def test_enumerate_goes_on_in_a_resumed_pass(tmp_path, counted):
    whole, again = stopped_in_a_pass(tmp_path, counted)
    assert whole[0] == 6  # the last update of a pass has one batch
    assert again[:3] == whole[:3]


def test_enumerate_behind_a_generator_is_refused(tmp_path):
    _, error = stopped_in_a_pass(tmp_path, enumerated_bar)
    assert "updates of this pass took 2 batches each" in error.found
    assert "enumerate(loader)" in error.fix
    assert error.step is None


def test_a_count_of_the_loops_own_gets_a_notice(tmp_path):
    whole, again = stopped_in_a_pass(tmp_path, own_count)
    assert not whole[4]
    assert "a count of the loop's own begins at 0" in again[4][-1]
