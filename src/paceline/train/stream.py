"""A data set that is read from its beginning to its end: no length, no sample by its number.

Every rank reads all of it, and keeps its part of each batch (`loader.load_stream`). So batch N has the same samples on
any number of ranks. A batch ends where the stream does; the next epoch begins with a new one. A job that resumes has
the data set go to its place, where that can do so exactly; else the stream is read on.

What is drawn while a sample is read (torch, random, numpy) depends only on the seed, the epoch and the sample's number
in it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import is_stream
from paceline.nouns.reading import LARGEST
from paceline.train.seed import kept_random_state, seed_sample

READ, COLLATE = range(2)  # random streams of a sample


@dataclass(frozen=True, slots=True)
class Stream:
    """The source of a workload's data, read once in each epoch.

    Args:
        data: a data set that can be iterated over again and again; None where `make` makes each epoch's.
        make: a function that returns an iterator, such as a generator function.
    """

    data: Any
    make: Callable[[], Iterator[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data) if self.make is None else iter(self.make())

    def begin_epoch(self, epoch: int) -> None:
        """Tell the data set the epoch, by which it may shuffle."""
        set_epoch = getattr(self.data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def state(self) -> dict[str, Any] | None:
        """Return the place of the data set in its epoch, if it has one that it can go back to exactly; else None."""
        if not self._can_go_on():
            return None
        state = self.data.state_dict()
        # A checkpoint keeps JSON. What that would change (a tuple, a tensor) is left out, and the stream read on.
        return copy.deepcopy(state) if isinstance(state, dict) and _is_plain(state) else None

    def go_on(self, state: Mapping[str, Any] | None) -> bool:
        """Have the next iteration begin where `state` was taken; return False if it begins at the beginning."""
        if state is None or not self._can_go_on():
            return False
        self.data.load_state_dict(dict(state))
        return True

    def _can_go_on(self) -> bool:
        is_able = all(callable(getattr(self.data, name, None)) for name in ("state_dict", "load_state_dict"))
        return is_able and not _has_buffer(self.data)


def _has_buffer(data: Any) -> bool:
    """True if a stream of Hugging Face's shuffles by a buffer: its state has none of the samples that are in it."""
    inner = getattr(data, "_ex_iterable", None)
    while inner is not None:
        if "Buffer" in type(inner).__name__:
            return True
        inner = getattr(inner, "ex_iterable", None)
    return False


def _is_plain(value: Any) -> bool:
    """True if JSON gives it back as it is."""
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if type(value) is int:
        return -LARGEST <= value <= LARGEST
    return value is None or type(value) in (str, bool) or (type(value) is float and math.isfinite(value))


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A place between two batches of a stream.

    Attributes:
        epoch: the number of the epoch, from 0.
        batch: the number of batches taken in it.
        taken: the number of batches taken in all epochs.
        state: the data set's own state of its place; None where it has none.
    """

    epoch: int = 0
    batch: int = 0
    taken: int = 0
    state: dict[str, Any] | None = None


def as_stream(name: str, value: Any, makes: Callable[[], Any] | None = None) -> Stream | None:
    """Return the stream that a workload's data set is, or that its function makes; None if it is none.

    Args:
        name: "data" or "evaluation".
        value: the data set, or the result of the function.
        makes: the function, if there is one.

    Raises:
        WorkloadError: it can be read only once, or gives each rank a part already.
    """
    if makes is not None and hasattr(value, "__next__"):
        if makes() is value:
            raise WorkloadError(
                f"the workload's {name} is read from its beginning in each epoch",
                f"its function returns the same {type(value).__name__} again, which can be read once",
                "have the function make a new one each time, as a generator function does",
            )
        return Stream(None, makes)
    if not is_stream(value):
        return None
    if getattr(value, "_distributed", None) is not None:  # of Hugging Face's data sets
        raise WorkloadError(
            f"paceline gives each rank its part of every batch of the workload's {name}",
            f"the {type(value).__name__} gives this rank a part already (split_dataset_by_node)",
            "leave split_dataset_by_node out: every rank reads the whole stream; batch_size is that of all ranks",
        )
    return Stream(value)


class Numbered(IterableDataset[Any]):
    """The samples of an epoch with their numbers, each read with random numbers of its own.

    Args:
        stream: the stream of samples, as the workload or the loop yields them.
        seed: the seed of the job.
        epoch: the number of the epoch, from 0.
        first: the number of the sample with which the iteration begins.
    """

    def __init__(self, stream: Stream, seed: int, epoch: int, first: int = 0) -> None:
        self.stream = stream
        self.seed = seed
        self.epoch = epoch
        self.first = first

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = self.first
        seed_sample(self.seed, self.epoch, number, READ)
        samples = iter(self.stream)
        while True:
            seed_sample(self.seed, self.epoch, number, READ)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield number, sample
            number += 1


class Head(Sequence[Any]):
    """The samples of a stream's first batch, with their numbers: what is tried out before the first step.

    Args:
        stream: the samples, as the workload or the loop yields them.
        seed: the seed of the job.
        most: the number of samples of a batch.
    """

    def __init__(self, stream: Stream, seed: int, most: int) -> None:
        self.stream = stream
        self.seed = seed
        self.most = most
        self.samples: list[Any] | None = None

    def _read(self) -> list[Any]:
        if self.samples is None:
            self.samples = []
            with kept_random_state():
                for numbered in Numbered(self.stream, self.seed, 0):
                    self.samples.append(numbered)
                    if len(self.samples) == self.most:
                        break
            if not self.samples:
                raise empty()
        return self.samples

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index][1]

    def forget(self) -> None:
        """Let the samples go; they are read again if they are asked for."""
        self.samples = None


def empty(name: str = "data") -> WorkloadError:
    """Return the error of a stream that has no sample."""
    return WorkloadError(
        f"the workload's {name} should hold samples",
        "it is a stream that ends before its first sample",
        "check the path and the filter that made it; an iterator can be read once, so hand in a data set or a function",
    )
