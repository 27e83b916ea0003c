"""A data set that is read from its beginning to its end: no length, no sample by its number.

Every rank reads all of it, and keeps its part of each batch (`stream_loader.py`). What is drawn while a sample is read
(torch, random, numpy) depends on the seed, the epoch and the sample's number in it alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import is_stream
from paceline.nouns.reading import LARGEST
from paceline.train.seed import seed_sample

READ, COLLATE = range(2)  # random streams of a sample


@dataclass(frozen=True, slots=True)
class Stream:
    """What a workload's data is read from, once in each epoch.

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
        """Return where the data set is in its epoch, if it can say so and can be put there again exactly; else None."""
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


def as_stream(name: str, value: Any, makes: Callable[[], Any] | None = None) -> Stream | None:
    """Return the stream that a workload's data set is, or that its function makes; None if it is none.

    Args:
        name: "data" or "evaluation".
        value: the data set, or what the function returned.
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
        stream: it.
        seed: of the job.
        epoch: from 0.
        first: number of the sample with which the iteration begins.
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


def empty(name: str = "data") -> WorkloadError:
    """Return the error of a stream that has no sample."""
    return WorkloadError(
        f"the workload's {name} should hold samples",
        "it is a stream that ends before its first sample",
        "check the path and the filter that made it; an iterator can be read once, so hand in a data set or a function",
    )
