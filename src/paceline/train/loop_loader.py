"""A user's own DataLoader, cut for the ranks: its batches in its own order, a part of each on every rank.

The loader's batch sampler says which samples are in a batch; every rank asks its own copy of it, and takes its part. So
samplers with weights, batches of one length and collators of one's own stay as they are. Of an iterable data set every
rank reads all samples, and collates its part of each batch.

What the sampler and the data set draw (torch, random, numpy) depends on the seed, the pass over the data and the place
of the sample in it only; what collate draws depends on the rank's part of the batch too. A resumed job asks the
sampler again for the batches that were taken before, and loads none of them.
"""

from __future__ import annotations

import gc
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

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
)
from torch.utils.data.distributed import DistributedSampler

from paceline.nouns.errors import CheckpointError, UsageError, WorkloadError
from paceline.nouns.parts import MAKE_ANEW, read_once
from paceline.train.loader import (
    DATA,
    SAMPLER,
    AtHand,
    Key,
    Part,
    Place,
    Seeded,
    SeededBatches,
    default_batch,
    in_random_stream,
    load_items,
    load_stream,
    options_of,
)
from paceline.train.seed import kept_random_state

# These draw from torch's generators. A class made from one of them may draw from others.
_SAMPLERS_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


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
    """Return the length of a loader's data set, and its first sample; 0 and None where it has no samples by number."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        return 0, None
    try:
        with kept_random_state():
            return len(data), Seeded(data, seed, 0, DATA)[0, 0, 0]
    except Exception:  # it has other keys, say; a sample that fails says so when the loop takes it
        return 0, None


class CutLoader:
    """A user's loader and the place in its passes.

    Args:
        loader: the user's loader.
        seed: the seed of the order and of the data set's draws.

    Attributes:
        number: the number of the pass, from 0.
        batch: the number of batches taken in it.
        begun: the number of passes that the loop has begun since the start of the process.
        passes: the number of passes of the whole training; None where only the loop knows.
        limit: the most batches of a pass that are taken; None: all.
        is_idle: True if the pass has given batches, and none of them was trained on.
        has_ended: True if a pass has come to its end.
        epoch: the number that `job.epochs` yielded last; None outside of its loop.
        jumps: the number of jumps in the data, each of which makes earlier iterators useless.
        opened_at: the pass and the batch at which the newest pass was begun.
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
        self.first_states = [(generator, generator.get_state()) for generator in _generators(loader)]

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

    def count_batch(self) -> None:
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
        """Return the number of batches that are left of all passes; None where it is not known."""
        length = self._batches_of_pass()
        if self.passes is None or length is None:
            return None
        if self.limit is not None:
            length = min(length, self.limit)
        return (self.passes - self.number) * length - self.batch

    def check_place(self, folder: Path, batch: int) -> None:
        """Raise CheckpointError where a checkpoint is after more batches of a pass than passes have."""
        length = self._batches_of_pass()
        if length is None or type(self.loader.batch_sampler) is not BatchSampler:
            return  # passes may have other lengths
        if batch > length + 1:  # one more where the loader now leaves out a last batch that is short
            raise CheckpointError(
                f"the checkpoint {folder} should be at a place in this loader's passes",
                f"it is after {batch} batches of a pass, and a pass has {length}",
                "resume with the loader that it was saved with, or use an earlier checkpoint",
            )

    def _batches_of_pass(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:  # an iterable data set
            return None

    def batch_after(self, batch: int, saved: int | None, current: int | None) -> int | None:
        """Convert the first `batch` batches of `saved` samples to batches of `current`; None if that leaves a rest."""
        if not saved or not current or type(self.loader.batch_sampler) is not BatchSampler or batch * saved % current:
            return None
        return batch * saved // current

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
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def load_pass(
    loader: DataLoader[Any], place: Place, skip: int, limit: int | None = None, at_hand: AtHand | None = None
) -> Iterator[Part]:
    """Yield this rank's part of each batch of one pass, without the first `skip` batches.

    Args:
        loader: the user's loader.
        place: the rank and the pass.
        skip: the number of batches that were taken before the job resumed.
        limit: the most batches of the pass, those left out included; the sampler is not asked for more. None: all.
        at_hand: the object that says whether the next part is there.
    """
    check_loader(loader)
    at_hand = at_hand or AtHand()
    collate: Any = loader.collate_fn
    if collate is default_collate:
        collate = partial(default_batch, "hand the DataLoader collate_fn=...")
    options = options_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        parts = load_stream(loader.dataset, collate, place, at_hand, **options)
        yield from itertools.islice(parts, skip, None if limit is None else max(limit, skip))
        return
    options["generator"] = place.worker_generator()
    kind = SeededBatches if hasattr(loader.dataset, "__getitems__") else Seeded
    data = kind(loader.dataset, place.seed, place.number, DATA)
    # When a part is taken, the sampler is asked for one more. A sampler of the user's may look at what the steps do.
    at_hand = at_hand if _is_fixed(loader) else AtHand()
    for part in load_items(data, collate, _own_keys(loader, place, skip, limit), at_hand, **options):
        yield part._replace(batch=part.batch[0])


def replay(loader: DataLoader[Any], place: Place, limit: int | None = None) -> None:
    """Ask the sampler for a pass that was taken before: one with a generator of its own has moved on by it."""
    if not isinstance(loader.dataset, IterableDataset):
        for _ in itertools.islice(_indices(loader, place), limit):
            pass


def _own_keys(
    loader: DataLoader[Any], place: Place, skip: int, limit: int | None
) -> Iterator[tuple[Part, list[list[Key]]]]:
    """Yield this rank's part of each batch of a pass, as yet without samples, and the keys of its only micro-batch."""
    for number, indices in enumerate(itertools.islice(_indices(loader, place), limit)):
        if number < skip:
            continue
        own_positions = place.own_samples(len(indices))
        check = zlib.crc32(repr(indices).encode())
        keys: list[Key] = []
        for at in own_positions or range(1):
            keys.append((indices[at], number, at))
        yield Part(None, len(own_positions), len(indices), check, not own_positions), [keys]


def _is_fixed(loader: DataLoader[Any]) -> bool:
    """True if the loader's samplers are torch's own and have drawn the order of a pass when it begins."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def _indices(loader: DataLoader[Any], place: Place) -> Iterator[list[Any]]:
    """Yield the indices of each batch of a pass, as the user's batch sampler gives them."""
    sampler: Any = loader.batch_sampler
    draws_by_torch = type(sampler) is BatchSampler and type(sampler.sampler) in _SAMPLERS_OF_TORCH
    # With a generator of its own a sampler may draw from it later, and that may be torch's own.
    draws_first = _is_fixed(loader) and not _generators(loader)
    for batch in in_random_stream(lambda: iter(sampler), place, SAMPLER, draws_by_torch, draws_first):
        yield list(batch)


class Counted:
    """An iterator whose numbers of `enumerate` go on where a resumed pass does.

    A resumed job leaves out the batches of a pass that were taken before. `enumerate` counts what it is given, from 0:
    the loop would accumulate in other groups, or set another learning rate, than without the interruption. So
    `enumerate` is handed as many empty items before the first batch, which nobody else sees. In CPython it asks for the
    item first, and takes its number then: it may be asked for others meanwhile.

    Args:
        items: the iterator of the items.
        left_out: a function that returns the number of items before the first.
        report: a function that is called where there were some, with the name of their counter from 0: `enumerate` if
            that can't be reached, as behind a progress bar; else "" if nothing does that is known.
    """

    def __init__(self, items: Iterator[Any], left_out: Callable[[], int], report: Callable[[str], None]) -> None:
        self.items = items
        self.left_out: Callable[[], int] | None = left_out
        self.report = report
        self.empty = 0  # items to come

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        """Return the next item; before the first let `enumerate` count those that were left out."""
        if self.empty:
            self.empty -= 1
            return None
        item = next(self.items)
        if self.left_out is not None:
            count, self.left_out = self.left_out(), None
            if count:
                self._count(count, _caller())
        return item

    def _count(self, count: int, caller: FrameType | None) -> None:
        for counter in gc.get_referrers(self):
            if type(counter) is enumerate:
                start = counter.__reduce__()[1][1]  # type: ignore[index]
                self.empty = 0 if start == count > 1 else count  # the loop has begun there itself
                while self.empty:
                    next(counter)
                return
        self.report("enumerate" if _is_enumerated(caller) else "")


def _caller() -> FrameType | None:
    """Return the frame that asks for an item."""
    return sys._getframe(2)


def _is_enumerated(frame: FrameType | None) -> bool:
    """Return whether `enumerate` counts what the generator of this frame yields."""
    for counter in gc.get_objects():
        if type(counter) is enumerate and any(
            getattr(item, "gi_frame", None) is frame for item in gc.get_referents(counter)
        ):
            return True
    return False
