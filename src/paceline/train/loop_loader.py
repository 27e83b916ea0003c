"""A user's own DataLoader, cut for the ranks: its batches in its own order, a part of each on every rank.

The loader's batch sampler says which samples are in a batch; every rank asks its own copy of it, and takes its part. So
samplers with weights, batches of one length and collators of one's own stay as they are. Of an iterable data set every
rank reads all samples, and collates its part of each batch.

What the sampler and the data set draw (torch, random, numpy) depends on the seed, the pass over the data and the place
of the sample in it alone; what collate draws depends on the rank's part of the batch too. A resumed job asks the
sampler again for the batches that were taken before, and loads none of them.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from paceline.nouns.errors import CheckpointError, UsageError, WorkloadError
from paceline.nouns.order import mix, share
from paceline.nouns.parts import MAKE_ANEW, read_once
from paceline.train.data import collated
from paceline.train.data_workers import AtHand, ends_with_rank
from paceline.train.seed import cpu_random_state, kept_random_state, seed_sample, set_cpu_random_state

_SAMPLER, _DATA, _WORKERS, _COLLATE = range(4)  # random streams of a pass
# These draw from torch's generators. A class made from one of them may draw from others.
_SAMPLERS_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class Part(NamedTuple):
    """This rank's part of a batch.

    Attributes:
        batch: what the loader's collate made of the samples.
        samples: how many there are.
        of: how many the whole batch has.
        check: a number that is the same on all ranks if their samplers gave the same batch.
        keeps_pace: the rank has no samples here: it has the batch's first one, which is not to count.
    """

    batch: Any
    samples: int
    of: int
    check: int
    keeps_pace: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's part is: `rank` of `size`, in one pass over the data, of a job with a seed."""

    rank: int
    size: int
    seed: int
    number: int

    def own(self, count: int) -> range:
        """Return which of a batch's `count` samples are this rank's."""
        return share(range(count), self.rank, self.size)


def check_loader(loader: DataLoader[Any]) -> None:
    """Raise WorkloadError where a loader's batches can't be cut."""
    if isinstance(loader.sampler, DistributedSampler) or isinstance(
        getattr(loader.batch_sampler, "sampler", None), DistributedSampler
    ):
        raise WorkloadError(
            "paceline.prepare gives each rank its part of the loader's batches",
            "the loader has a DistributedSampler, which gives it a part of the samples already",
            "leave the sampler out and write shuffle=True; batch_size is that of all ranks together",
        )
    if isinstance(loader.dataset, IterableDataset) and (iterator := read_once(loader.dataset)):
        raise WorkloadError(
            "the loader's data set should be one that can be iterated over in each pass, and on each rank",
            f"its __iter__ returns one {iterator} again and again, which can be read once",
            MAKE_ANEW,
        )
    if type(loader.sampler) is SequentialSampler and not hasattr(loader.dataset, "__len__"):
        raise WorkloadError(
            "the loader's data set should have len() and [], or be an IterableDataset",
            f"{type(loader.dataset).__name__} has no __len__",
            "add def __len__(self): ... that returns the number of samples",
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise WorkloadError(
            "paceline.prepare gives each rank its part of the loader's batches",
            "the loader has batch_size=None: its data set makes the batches, and they can't be cut",
            "let the data set give samples and the loader make batches, with batch_size and collate_fn; or make each "
            "rank's batch in the loop, leave the loader out, and hand job.backward the number of samples",
        )


def first_of(loader: DataLoader[Any], seed: int) -> tuple[int, Any]:
    """Return how many samples a loader's data set has, and the first; 0 and None where it has no samples by number."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        return 0, None
    try:
        with kept_random_state():
            return len(data), _Seeded(data, Place(0, 1, seed, 0))[0, 0, 0]
    except Exception:  # it has other keys, say; a sample that fails says so when the loop takes it
        return 0, None


class CutLoader:
    """A user's loader and the place in its passes.

    Args:
        loader: the user's.
        seed: of the order and of what the data set draws.

    Attributes:
        number: of the pass, from 0.
        batch: batches taken in it.
        begun: passes that the loop has begun since the start of the process.
        passes: of the whole training; None where only the loop knows.
        limit: batches of each pass that are taken; None: all.
        is_idle: the pass has given batches, and none of them was trained on.
        has_ended: a pass has come to its end.
        epoch: the number that `job.epochs` yielded last; None outside of its loop.
        jumps: counts what makes earlier iterators useless.
        opened_at: pass and batch at which the newest pass was begun.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.loader = loader
        self.seed = seed
        self.number = 0
        self.batch = 0
        self.begun = 0
        self.passes: int | None = None
        self.limit: int | None = None
        self.replayed = 0  # passes for which the sampler was asked
        self.is_open = False
        self.is_idle = False
        self.has_ended = False
        self.epoch: int | None = None
        self.jumps = 0
        self.opened_at = (0, 0)
        self.first_states = [(each, each.get_state()) for each in _generators(loader)]

    def go_to(self, number: int, batch: int) -> None:
        """Go on in a pass, after so many batches of it."""
        self.number = number
        self.batch = batch
        self.is_open = False
        self.is_idle = False
        self.jumps += 1
        self.epoch = None
        if number < self.replayed:  # samplers are asked for all passes again
            for generator, state in self.first_states:
                generator.set_state(state)
            self.replayed = 0

    def note_batch(self) -> None:
        """Count a batch that the loop gets."""
        # Of a pass that a resumed job ends, the loop may leave out the batches that are left, such as a short last one.
        self.is_idle = self.is_idle or self.batch == 0
        self.batch += 1

    def check_trained(self) -> None:
        """Raise UsageError if the loop has made a pass without training: it would count as one of `epochs`."""
        if self.is_idle:
            raise UsageError(
                "every pass over the loader of paceline.prepare should train: the passes are counted",
                "the loop took batches of the last pass, and job.backward was not called",
                "evaluate, and look at single batches, by a DataLoader of its own that paceline.prepare is not handed",
            )

    def check_has_batches(self, notice: Callable[[str], None]) -> None:
        """Raise WorkloadError if the first pass has come to its end without a batch; say so of a later one."""
        self.has_ended = True
        if self.batch:  # of a pass that a resumed job ends, those before the checkpoint too
            return
        if self.number:
            notice(
                f"pass {self.number + 1} over the data had no batch, so nothing is trained in it; if the data set can "
                "be iterated over once, make what it iterates over anew in __iter__"
            )
            return
        sampler: Any = self.loader.batch_sampler
        fix = "see why the data set, or the sampler, has no samples: the path, the filter that made it"
        if getattr(sampler, "drop_last", False):
            fix = f"lower the loader's batch_size of {sampler.batch_size}, or leave out drop_last=True; or {fix}"
        raise WorkloadError("the loader should give batches to train on", "the first pass over it had none", fix)

    def begin_pass(self) -> bool:
        """Begin a pass; return False if it is one that was made before the job resumed."""
        if self.is_open:  # the loop left the last one by `break`
            self.end_pass()
        if self.passes is None and self.begun < self.number:
            self.begun += 1
            return False
        # A sampler with a generator of its own has moved on in earlier passes.
        while self.replayed < self.number:
            replay(self.loader, Place(0, 1, self.seed, self.replayed), self.limit)
            self.replayed += 1
        self.begun += 1
        self.replayed += 1
        self.is_open = True
        self.jumps += 1
        self.opened_at = self.number, self.batch
        return True

    def end_pass(self) -> None:
        """Be at the beginning of the next pass."""
        self.number += 1
        self.batch = 0
        self.is_open = False

    def batches_left(self) -> int | None:
        """Return how many batches are left of all passes; None where nobody knows."""
        each = self._batches_of_pass()
        if self.passes is None or each is None:
            return None
        if self.limit is not None:
            each = min(each, self.limit)
        return (self.passes - self.number) * each - self.batch

    def check_place(self, folder: Path, batch: int) -> None:
        """Raise CheckpointError where a checkpoint is after more batches of a pass than passes have."""
        each = self._batches_of_pass()
        if each is None or type(self.loader.batch_sampler) is not BatchSampler:
            return  # passes may have other lengths
        if batch > each + 1:  # one more where the loader now leaves out a last batch that is short
            raise CheckpointError(
                f"the checkpoint {folder} should be at a place in this loader's passes",
                f"it is after {batch} batches of a pass, and a pass has {each}",
                "resume with the loader that it was saved with, or use an earlier checkpoint",
            )

    def _batches_of_pass(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:  # an iterable data set
            return None

    def batch_after(self, batch: int, saved: int | None, now: int | None) -> int | None:
        """Return how many batches of `now` samples are those of a pass's first `batch` of `saved`; None if none are."""
        if not saved or not now or type(self.loader.batch_sampler) is not BatchSampler or batch * saved % now:
            return None
        return batch * saved // now

    def has_short_batch(self) -> bool:
        """Return whether the last batch of a pass is known to be shorter than the others."""
        sampler: Any = self.loader.batch_sampler
        if isinstance(self.loader.dataset, IterableDataset) or type(sampler) is not BatchSampler or sampler.drop_last:
            return False
        samples: Any = sampler.sampler
        return hasattr(samples, "__len__") and len(samples) % sampler.batch_size != 0


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the random generators that the loader's samplers own."""
    samplers = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found: list[torch.Generator] = []
    for sampler in samplers:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not each for each in found):
            found.append(generator)
    return found


def load_pass(
    loader: DataLoader[Any], place: Place, skip: int, limit: int | None = None, at_hand: AtHand | None = None
) -> Iterator[Part]:
    """Yield this rank's part of each batch of one pass, without the first `skip` batches.

    Args:
        loader: the user's.
        place: the rank and the pass.
        skip: batches that were taken before the job resumed.
        limit: batches of the pass, those left out included; the sampler is not asked for more. None: all.
        at_hand: is to say whether the next part is there.
    """
    check_loader(loader)
    at_hand = at_hand or AtHand()
    if isinstance(loader.dataset, IterableDataset):
        parts = _load_stream(loader, place, skip, at_hand)
        yield from itertools.islice(parts, None if limit is None else max(limit - skip, 0))
    else:
        yield from _load_items(loader, place, skip, limit, at_hand)


def replay(loader: DataLoader[Any], place: Place, limit: int | None = None) -> None:
    """Ask the sampler for a pass that was taken before: one with a generator of its own has moved on by it."""
    if not isinstance(loader.dataset, IterableDataset):
        for _ in itertools.islice(_indices(loader, place), limit):
            pass


def _load_items(loader: DataLoader[Any], place: Place, skip: int, limit: int | None, at_hand: AtHand) -> Iterator[Part]:
    """Load from a data set with `[]`."""
    asked: deque[tuple[int, int, int, bool]] = deque()  # of batches that the new loader has asked for

    def own_indices() -> Iterator[list[Any]]:
        for number, indices in enumerate(itertools.islice(_indices(loader, place), limit)):
            if number < skip:
                continue
            own = place.own(len(indices))
            keeps_pace = not own
            chosen = own if own else range(1)
            check = zlib.crc32(repr(indices).encode())
            asked.append((len(own), len(indices), check, keeps_pace))
            items: list[Any] = []
            for at in chosen:
                items.append((indices[at], number, at))
            yield items

    data: Any = _Seeded(loader.dataset, place)
    if hasattr(loader.dataset, "__getitems__"):
        data = _SeededBatches(loader.dataset, place)
    collate = _collate_of(loader)
    batches = iter(_like(loader, data, place, batch_sampler=_Once(own_indices), collate_fn=collate))
    # When a part is taken, the sampler is asked for one more. A sampler of the user's may look at what the steps do.
    if _is_fixed(loader):
        at_hand.of(batches)
    while True:
        try:
            batch = _next(batches, loader)
        except StopIteration:
            return
        yield Part(batch, *asked.popleft())


def _collate_of(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Return what makes batches; in place of torch's default one whose errors say what to do."""
    return loader.collate_fn if loader.collate_fn is not default_collate else _default_collate


def _default_collate(samples: list[Any]) -> Any:
    return collated(samples, "hand the DataLoader collate_fn=...")


def _is_fixed(loader: DataLoader[Any]) -> bool:
    """True if the loader's samplers are torch's own and have drawn the order of a pass when it begins."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def _load_stream(loader: DataLoader[Any], place: Place, skip: int, at_hand: AtHand) -> Iterator[Part]:
    """Load from an iterable data set."""
    collate = _CollatePart(_collate_of(loader), place)
    options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "collate_fn": collate}
    stream = _like(loader, loader.dataset, place, **options)
    # Worker processes have random numbers of their own, from the loader's generator.
    batches = at_hand.of(iter(stream)) if loader.num_workers else _in_stream(lambda: iter(stream), place, _DATA)
    for number, (batch, samples, of, keeps_pace) in enumerate(batches):
        if number >= skip:
            yield Part(batch, samples, of, number, keeps_pace)


def _indices(loader: DataLoader[Any], place: Place) -> Iterator[list[Any]]:
    """Yield the indices of each batch of a pass, as the user's batch sampler gives them."""
    sampler: Any = loader.batch_sampler
    draws_by_torch = type(sampler) is BatchSampler and type(sampler.sampler) in _SAMPLERS_OF_TORCH
    # With a generator of its own a sampler may draw from it later, and that may be torch's own.
    draws_first = _is_fixed(loader) and not _generators(loader)
    for batch in _in_stream(lambda: iter(sampler), place, _SAMPLER, draws_by_torch, draws_first):
        yield list(batch)


def _next(batches: Iterator[Any], loader: DataLoader[Any]) -> Any:
    if loader.num_workers:
        return next(batches)
    with kept_random_state():  # the data set's code runs in this process
        return next(batches)


def _like(loader: DataLoader[Any], data: Any, place: Place, **options: Any) -> DataLoader[Any]:
    """Return a loader with the user's options over other data."""
    generator = torch.Generator().manual_seed(mix(place.seed, place.number, _WORKERS) >> 1)
    if loader.num_workers:
        options |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
            "worker_init_fn": ends_with_rank(loader.worker_init_fn, loader.multiprocessing_context),
        }
    return DataLoader(
        data, num_workers=loader.num_workers, pin_memory=loader.pin_memory, generator=generator, **options
    )


class _Once:
    """A batch sampler that yields from a function."""

    def __init__(self, function: Callable[[], Iterator[list[Any]]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[list[Any]]:
        return self.function()


class _Seeded(torch.utils.data.Dataset[Any]):
    """A data set whose random numbers depend on the sample's place alone."""

    def __init__(self, data: Any, place: Place) -> None:
        self.data = data
        self.place = place

    def __getitem__(self, key: tuple[Any, int, int]) -> Any:
        index, batch, at = key
        seed_sample(self.place.seed, self.place.number, _DATA, batch, at)
        return self.data[index]


class _SeededBatches(_Seeded):
    """The same for a data set that gives many samples at once, as those of Hugging Face do."""

    def __getitems__(self, keys: list[tuple[Any, int, int]]) -> Any:
        _, batch, at = keys[0]
        seed_sample(self.place.seed, self.place.number, _DATA, batch, at)
        return self.data.__getitems__([index for index, _, _ in keys])


class _CollatePart:
    """Collate this rank's part of a batch's samples."""

    def __init__(self, collate: Callable[[Any], Any], place: Place) -> None:
        self.collate = collate
        self.place = place
        self.calls = 0  # in this process

    def __call__(self, samples: list[Any]) -> tuple[Any, int, int, bool]:
        own = self.place.own(len(samples))
        chosen = samples[own.start : own.stop] or samples[:1]
        worker = get_worker_info()
        self.calls += 1
        # What collate draws, for a part of another size on each rank, is not to change what the stream draws next.
        with kept_random_state():
            seed_sample(self.place.seed, self.place.number, _COLLATE, worker.id if worker else 0, self.calls)
            batch = self.collate(chosen)
        return batch, len(own), len(samples), not own


def _in_stream(
    make: Callable[[], Iterator[Any]],
    place: Place,
    stream: int,
    draws_by_torch: bool = False,
    draws_first: bool = False,
) -> Iterator[Any]:
    """Yield what an iterator does, with random numbers of its own: what the loop draws between two items is no part.

    Args:
        make: makes the iterator, and may draw from them too.
        place: the seed and the pass.
        stream: which of the pass's random streams.
        draws_by_torch: the iterator draws from torch's generator alone.
        draws_first: it draws nothing after its first item.
    """
    with kept_random_state():
        seed_sample(place.seed, place.number, stream)
        items = make()
        state = cpu_random_state(draws_by_torch)
    while True:
        with kept_random_state(draws_by_torch):
            set_cpu_random_state(state)
            try:
                item = next(items)
            except StopIteration:
                return
            state = cpu_random_state(draws_by_torch)
        yield item
        if draws_first:  # to save states and put them back takes longer than the next item
            yield from items
            return
