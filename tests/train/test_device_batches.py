"""The next batch is copied to the device while a step works: in which order, what waits for what, and never the host.

Order and waits are those of a device that is not there (`support/absent_device.py`). Values are compared on the CPU,
with streams of that device.
"""

from __future__ import annotations

import functools
import gc
import itertools
import queue
import threading
import time
import weakref
from collections import namedtuple
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

import paceline
from paceline.train import data, loop_job
from paceline.train import loader as loading
from paceline.train.data import rank_loader
from paceline.train.loader import AtHand, Place, on_device
from paceline.train.loop_loader import CutLoader, load_pass

from support import absent_device
from support.ranks import preload, run_ranks

preload("torch.utils.backend_registration")
CPU = torch.device("cpu")
BATCHES = 5
LOOKED_AHEAD = [True] * BATCHES
NEVER = [False] * BATCHES


class Planned(AtHand):
    """Says what a test wants, one answer for each batch that is handed out."""

    def __init__(self, answers):
        super().__init__()
        self.answers = iter(answers)

    def has_next(self):
        return next(self.answers)


# --- on a device that is not there


class Copies(absent_device.Watch):
    """Gives the current stream the copy of each tensor, and counts what is on the device."""

    def __init__(self):
        super().__init__()
        self.names = itertools.count()
        self.alive = set()  # storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        is_across = func is torch.ops.aten.copy_.default and args[0].device.type != args[1].device.type
        if is_across or (func is torch.ops.aten._to_copy.default and result.device != args[0].device):
            absent_device.CURRENT[-1].give(f"copy {next(self.names)}")
        if isinstance(result, torch.Tensor) and result.device.type == absent_device.NAME:
            storage = result.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive.add(storage._cdata)
                weakref.finalize(storage, self.alive.discard, storage._cdata)
        return result


def trained(answers, sizes=(4,) * BATCHES, leave_after=None, to_float64=False, switch_at=None):
    """What the device was given, what the host waited for, and the most batches alive in a step and after it."""
    device = torch.device(absent_device.NAME, 0)
    absent_device.WORK.clear()
    absent_device.SEEN.clear()
    first = absent_device.CURRENT[-1]

    def loaded():
        for number, size in enumerate(sizes):
            absent_device.WORK.append(absent_device.Work(f"load {number}", 0, {0: 0}))
            yield number, torch.zeros(size)

    most = kept = 0
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as watch:
        batches = on_device(loaded(), device, to_float64, Planned(answers))
        for number, arrived in batches:
            batch = arrived.take()
            assert batch.shape == (sizes[number],)
            assert batch.device == device
            absent_device.CURRENT[-1].give(f"step {number} begins")
            gc.collect()
            most = max(most, len(watch.alive))
            absent_device.CURRENT[-1].give(f"step {number}")
            del batch  # a loop may, before it asks for the next
            gc.collect()
            kept = max(kept, len(watch.alive))
            if number == leave_after:
                break
            if number == switch_at:
                absent_device.CURRENT[-1] = absent_device.Stream()
        del batches
        absent_device.CURRENT[-1].give("after")
    absent_device.CURRENT[-1] = first
    return list(absent_device.WORK), dict(absent_device.SEEN), (most, kept)


CASES = {
    "ahead": {"answers": LOOKED_AHEAD},
    "when asked": {"answers": NEVER},
    "other shapes": {"answers": NEVER, "sizes": (4, 4, 4, 3, 4)},
    "never alike": {"answers": NEVER, "sizes": (4, 3, 4, 3, 4)},
    "sometimes": {"answers": [True, False, False, True, False]},
    "left": {"answers": LOOKED_AHEAD, "leave_after": 1},
    "float64": {"answers": LOOKED_AHEAD, "to_float64": True},
    "another stream": {"answers": LOOKED_AHEAD, "switch_at": 1},
}


def trained_all(rank):
    absent_device.set_up()
    return {name: trained(**case) for name, case in CASES.items()}


@functools.cache
def all_trained():
    return run_ranks(1, trained_all)[0]


def work_of(case):
    work, _, _ = all_trained()[case]
    return {each.what: each for each in work}


def order_of(case):
    work, _, _ = all_trained()[case]
    return [each.what for each in work]


def test_the_next_copy_is_given_before_the_step():
    order = ["load 0", "copy 0"]
    for number in range(BATCHES - 1):
        order += [f"load {number + 1}", f"copy {number + 1}", f"step {number} begins", f"step {number}"]
    assert order_of("ahead") == [*order, "step 4 begins", "step 4", "after"]


@pytest.mark.parametrize("case", ["ahead", "sometimes", "when asked"])
def test_device_batches_copy_and_step_wait_only_where_they_must(case):
    work = work_of(case)
    is_ahead = [False, *CASES[case]["answers"]]
    for number in range(BATCHES):
        assert work[f"step {number} begins"].waits_for(work[f"copy {number}"])
        if number < 2:  # nothing is known of shapes yet
            continue
        # Its memory may have been that of what the steps before used; the step beside it has other memory.
        assert work[f"copy {number}"].waits_for(work[f"step {number - 2}"])
        assert not work[f"copy {number}"].waits_for(work[f"step {number - 1} begins"])
    order = order_of(case)
    for number in range(1, BATCHES):
        is_before = order.index(f"load {number}") < order.index(f"step {number - 1} begins")
        assert is_before == is_ahead[number]


def test_what_is_not_at_hand_is_loaded_when_it_is_asked_for():
    order = order_of("when asked")
    for number in range(1, BATCHES):
        at = order.index(f"load {number}")
        assert order[at - 1] == f"step {number - 1}"
        assert order[at + 1] == f"copy {number}"


@pytest.mark.parametrize("case", ["other shapes", "never alike"])
def test_new_memory_is_written_after_all_that_came_before(case):
    work = work_of(case)
    sizes = CASES[case]["sizes"]
    for number in range(1, BATCHES):
        has_room = number >= 2 and sizes[number - 2] == sizes[number - 1] == sizes[number]
        assert work[f"copy {number}"].waits_for(work[f"step {number - 1}"]) != has_room
        assert work[f"step {number} begins"].waits_for(work[f"copy {number}"])


def test_device_batches_unused_memory_is_reused_after_its_copy():
    work = work_of("left")
    assert "step 2" not in work
    assert work["after"].waits_for(work["copy 2"])


def test_device_batches_are_copied_again_for_another_stream():
    order, work = order_of("another stream"), work_of("another stream")
    at = order.index("step 1")
    assert order[at + 1] == "copy 3"  # of batch 2 once more
    assert work["step 2 begins"].waits_for(work["copy 3"])
    # The memory that it had goes back to the other stream.
    assert work["step 4"].stream != work["step 0"].stream
    assert len([each for each in order if each.startswith("copy")]) == BATCHES + 1


def test_what_the_host_widens_is_moved_when_it_is_asked_for():
    order = order_of("float64")
    assert order[:6] == ["load 0", "copy 0", "step 0 begins", "step 0", "load 1", "copy 1"]
    assert {each.stream for each in work_of("float64").values()} - {0} == {work_of("float64")["step 0"].stream}


@pytest.mark.parametrize("case", CASES)
def test_device_batches_are_at_most_two_and_never_block_the_host(case):
    _, seen, most = all_trained()[case]
    assert seen == {}
    assert most == ((1, 0) if case in ("float64", "never alike") else (2, 1))


# --- values, on the CPU


@dataclass
class Sentence:
    words: torch.Tensor
    name: str


Pair = namedtuple("Pair", "left right")


class Own(torch.Tensor):
    """Has code of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl


SHAPES = {
    "tensor": lambda x: x,
    "dict": lambda x: {"inputs": x, "more": [x + 1, (x + 2, 7)], "name": "a"},
    "named tuple": lambda x: Pair(x, {"right": x.double()}),
    "dataclass": lambda x: Sentence(x.long(), "b"),
    "no tensor": lambda x: ["a", 3],
    "turned": lambda x: x.t(),
    "part of another": lambda x: (x[:, 1:], x[:1].expand(4, 3)),
    "complex": lambda x: torch.complex(x, x + 1).conj(),
    "sparse": lambda x: x.to_sparse(),
    "its own class": lambda x: x.as_subclass(Own),
}


@pytest.fixture
def streams(monkeypatch):
    """Let the CPU have streams, and no pinned memory, which needs a device."""
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "get_device_module", lambda device: absent_device.Backend)
    monkeypatch.setattr(torch, "empty_strided", lambda *sizes, pin_memory=False, **rest: empty(*sizes, **rest))
    loading._stream_of.cache_clear()
    yield
    loading._stream_of.cache_clear()


def copied_on_cpu(loaded, at_hand):
    return loading._copied(loaded, loading._Copies(CPU), at_hand)


@pytest.mark.parametrize("answers", [LOOKED_AHEAD, NEVER])
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_of_any_shape_arrive_as_they_are(streams, shape, answers):
    made = [SHAPES[shape](torch.arange(12.0).reshape(4, 3) + 100 * number) for number in range(BATCHES)]
    arrived = [batch.take() for _, batch in copied_on_cpu(iter(enumerate(made)), Planned(answers))]
    for batch, source in zip(arrived, made, strict=True):
        assert_same(batch, source)


def assert_same(batch: Any, source: Any) -> None:
    assert type(batch) is type(source)
    if isinstance(source, torch.Tensor):
        assert batch.dtype == source.dtype
        assert (batch.layout, batch.is_conj()) == (source.layout, source.is_conj())
        assert torch.equal(batch.to_dense(), source.to_dense())
    elif isinstance(source, dict):
        assert list(batch) == list(source)
        for key in source:
            assert_same(batch[key], source[key])
    elif isinstance(source, list | tuple):
        for one, other in zip(batch, source, strict=True):
            assert_same(one, other)
    elif isinstance(source, Sentence):
        assert_same([batch.words, batch.name], [source.words, source.name])
    else:
        assert batch == source


def test_on_the_cpu_nothing_comes_early_and_nothing_is_copied():
    taken = []

    def loaded():
        for number in range(3):
            taken.append(number)
            yield number, batches[number]

    batches = [torch.zeros(2) for _ in range(3)]
    for number, arrived in on_device(loaded(), CPU, False, Planned(LOOKED_AHEAD)):
        assert arrived.take() is batches[number]
        assert taken[-1] == number


# --- what is at hand


class Drawn(torch.utils.data.Dataset):
    """Draws with every sample; one of them is an error, and one comes once it may."""

    def __init__(self, wrong=None, late=None):
        self.wrong = wrong
        self.late = late
        self.may_come = torch.multiprocessing.Event()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.wrong:
            raise ValueError("no such sample")
        if index == self.late:
            self.may_come.wait(60)
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(10):
            yield torch.tensor([float(number), float(torch.rand(()))])


def relay(come, gone, device_id, is_done, device):
    """Do what the thread that pins memory does, without the pinning, which needs a device."""
    while not is_done.is_set():
        with suppress(queue.Empty):
            gone.put(come.get(timeout=0.05))


@pytest.fixture
def pinning(monkeypatch):
    """Let loaders have the thread that pins memory."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *arguments: CPU)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "_pin_memory_loop", relay)


def comes(at_hand):
    """Wait for the next batches; return False at the end, and where they don't come."""
    batches = at_hand.batches
    late_s = time.monotonic() + 5
    while not at_hand.has_next():
        tasks = list(batches._task_info.values())
        there = batches._data_queue.qsize() + sum(len(task) == 2 for task in tasks)
        has_ended = any(type(item[1]).__name__ == "_IterableDatasetStopIteration" for item in batches._data_queue.queue)
        if has_ended or there >= len(tasks) or time.monotonic() > late_s:
            return at_hand.has_next()  # the last may have come meanwhile
        time.sleep(0.01)
    return True


@pytest.fixture
def open_loader(pinning):
    """Begin loaders, whose processes end with the test."""
    begun = []

    def begin(workers=2, pins=True, count=1, **kind):
        at_hand = AtHand(count)
        loader = DataLoader(Drawn(**kind), batch_size=4, num_workers=workers, pin_memory=pins)
        begun.append(at_hand.of(iter(loader)))
        return at_hand, begun[-1], loader.dataset

    yield begin
    for each in begun:
        if hasattr(each, "_shutdown_workers"):
            each._shutdown_workers()


def test_what_the_loaders_processes_have_made_is_at_hand(open_loader):
    at_hand, batches, _ = open_loader(count=2)
    assert comes(at_hand)
    for _ in range(4):
        next(batches)
    assert comes(at_hand)
    next(batches)
    assert not at_hand.has_next()  # one is left
    next(batches)
    assert not at_hand.has_next()


def test_device_batches_that_are_late_are_not_reported_as_ready(open_loader):
    at_hand, batches, dataset = open_loader(late=4)
    assert comes(at_hand)
    next(batches)
    assert not any(at_hand.has_next() for _ in iter(lambda: batches._data_queue.qsize() == 2, True))
    dataset.may_come.set()
    assert comes(at_hand)
    assert next(batches)[0, 0] == 4


def test_an_error_is_not_at_hand(open_loader):
    at_hand, batches, _ = open_loader(workers=1, wrong=5)
    next(batches)
    while not batches._data_queue.qsize():
        time.sleep(0.01)
    assert not at_hand.has_next()
    with pytest.raises(ValueError, match="no such sample"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_processes_or_pinned_memory_nothing_is_at_hand(open_loader, workers):
    at_hand, batches, _ = open_loader(workers, pins=False)
    next(batches)
    if workers:
        time.sleep(0.1)
    assert not at_hand.has_next()


class Backwards(SequentialSampler):
    """A sampler of the user's own."""

    def __iter__(self):
        return reversed(range(24))


ORDERS = {
    "in order": (True, lambda: {}),
    "shuffled": (True, lambda: {"shuffle": True}),
    "with weights": (True, lambda: {"sampler": WeightedRandomSampler([1.0] * 24, 8)}),
    "drawn as it goes": (False, lambda: {"sampler": RandomSampler(range(24), replacement=True)}),
    "of one's own": (False, lambda: {"sampler": Backwards(range(24))}),
    "batches of one's own": (False, lambda: {"batch_sampler": [[0, 1], [2, 3]]}),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_sampler_of_ones_own_is_asked_no_earlier_than_before(order):
    is_fixed, options = ORDERS[order]
    at_hand = AtHand()
    next(load_pass(DataLoader(Drawn(), **options()), Place(0, 1, 7, 0), 0, at_hand=at_hand))
    assert (at_hand.batches is not None) == is_fixed


# --- the loaders


class Patient(AtHand):
    """Waits for what will come, so that every batch is taken ahead."""

    ahead = 0

    def has_next(self):
        at_hand = AtHand(self.count)
        at_hand.batches = self.batches
        found = hasattr(self.batches, "_task_info") and comes(at_hand)
        Patient.ahead += found
        return found


@pytest.fixture
def ahead(streams, pinning, monkeypatch):
    """Let loaders on the CPU look ahead."""
    for module in (data, loop_job):
        monkeypatch.setattr(module, "AtHand", Patient)
        monkeypatch.setattr(module, "on_device", lambda loaded, device, _, at_hand: copied_on_cpu(loaded, at_hand))
    loader = DataLoader.__init__

    def pinned(self, *data, num_workers=0, **options):
        loader(self, *data, num_workers=num_workers, **{**options, "pin_memory": num_workers > 0})

    monkeypatch.setattr(DataLoader, "__init__", pinned)
    monkeypatch.setattr(Patient, "ahead", 0)


def workload(dataset, workers, **parts):
    return paceline.Workload(
        model=lambda: None,
        loss=lambda model, batch: None,
        optimizer=lambda model: None,
        data=dataset,
        **{"batch_size": 7, "loader_workers": workers, **parts},
    )


def items(dataset, workers):
    """A loader of a data set with two micro-batches in a batch, and short last ones."""
    loader = rank_loader(dataset, workload(dataset, workers, micro_batch_size=4), (0, 1), CPU)
    return loader, loader.training(0, 48)


def stream(dataset, workers):
    opened = data.open_data("data", dataset)
    loader = rank_loader(opened, workload(dataset, workers, batch_size=3, epochs=2), (0, 1), CPU)
    return loader, loader.training(0, 0)


def seen(batches):
    """The batches, and what a loop draws beside them."""
    torch.manual_seed(3)
    return [(batch.positions, batch.microbatches, batch.place, float(torch.rand(()))) for batch in batches]


@pytest.mark.parametrize(("make", "dataset", "workers"), [(items, Drawn, 2), (items, Drawn, 0), (stream, Stream, 1)])
def test_a_jobs_batches_and_draws_are_those_without_a_look_ahead(request, make, dataset, workers):
    plain = seen(make(dataset(), workers)[1])
    request.getfixturevalue("ahead")
    found = seen(make(dataset(), workers)[1])
    assert str(found) == str(plain)
    assert (Patient.ahead > 3) == bool(workers)


def test_a_streams_place_is_after_the_batch_that_was_trained(ahead):
    loader, batches = stream(Stream(), 1)
    for number, batch in enumerate(batches):
        loader.batch_trained(batch)
        assert loader.progress.place.taken == number + 1
        if number == 2:
            break
    assert Patient.ahead == 3
    again, rest = stream(Stream(), 1)
    again.go_to(loader.facts())
    assert next(rest).microbatches[0][0, 0] == 9


def loop_over(workers, steps=None):
    """A loop's loader, and its job's place in the data."""
    names = ("end_step", "take", "notice")
    job: Any = SimpleNamespace(device=CPU, to_float64=False, step_number=0, data_part=0, **dict.fromkeys(names, print))
    job.mesh = SimpleNamespace(data_size=1)
    job.end_step = lambda goes_on=False: None
    job.place = SimpleNamespace(check_has_updated=lambda: None, begin_pass=lambda: None)
    job.take = lambda *given: None
    job.alone = None
    job.taken_batches = SimpleNamespace(thread=threading.get_ident())
    job.begin_batch = lambda: False
    cut = CutLoader(DataLoader(Drawn(), batch_size=5, shuffle=True, num_workers=workers), 7)
    return loop_job.LoopLoader(job, cut), cut


def test_device_batches_ahead_keep_order_draws_and_position(request):
    loader, _ = loop_over(2)
    torch.manual_seed(3)
    plain = [(batch.tolist(), float(torch.rand(()))) for batch in loader]
    request.getfixturevalue("ahead")
    loader, cut = loop_over(2)
    torch.manual_seed(3)
    found = []
    for batch in loader:
        found.append((batch.tolist(), float(torch.rand(()))))
        assert cut.batch == len(found)
    assert found == plain
    assert Patient.ahead >= 3
