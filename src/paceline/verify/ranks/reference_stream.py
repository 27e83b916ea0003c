"""Read a workload's stream in one process: its samples by their position, and where its epochs end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import is_stream
from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, seed_sample


class StreamedSamples:
    """The samples of all epochs, one after another, read as far as they are asked for.

    Args:
        workload: its seed and batch size.
        data: a stream, or a function that returns an iterator.
    """

    def __init__(self, workload: Workload, data: Any) -> None:
        self.workload = workload
        self.data = data
        self.samples: list[Any] = []
        self.numbers: list[tuple[int, int]] = []  # of each the epoch, and its number there
        self.ends: list[int] = []  # the position after each epoch that has ended
        self.reader = self._read()

    def __getitem__(self, position: int) -> Any:
        while len(self.samples) <= position:
            next(self.reader)
        return self.samples[position]

    def batch_at(self, position: int) -> range:
        """Return the positions of the batch that begins at `position`: it ends where its epoch does."""
        stop = position + self.workload.batch_size
        while len(self.samples) < stop and not any(position < end for end in self.ends):
            next(self.reader)
        after = [end for end in self.ends if position < end < stop]
        return range(position, min([stop, *after]))

    def seed_collate(self, position: int) -> None:
        """Seed what collate draws for samples of which the first is at `position`."""
        seed_sample(self.workload.seed, *self.numbers[position], 1)

    def _read(self) -> Iterator[None]:
        """Read a sample, or find the end of an epoch, at each step."""
        epoch = 0
        while True:
            if hasattr(self.data, "set_epoch"):
                self.data.set_epoch(epoch)
            before = len(self.samples)
            yield from self._read_epoch(epoch)
            if len(self.samples) == before:
                raise WorkloadError(
                    "the workload's data should hold samples",
                    "it is a stream that ends before its first sample",
                    "check the path and the filter that made it",
                )
            self.ends.append(len(self.samples))
            yield
            epoch += 1

    def _read_epoch(self, epoch: int) -> Iterator[None]:
        number = 0
        with kept_random_state():
            seed_sample(self.workload.seed, epoch, number, 0)
            samples = iter(self.data() if callable(self.data) and not is_stream(self.data) else self.data)
        while True:
            with kept_random_state():
                seed_sample(self.workload.seed, epoch, number, 0)
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            self.samples.append(sample)
            self.numbers.append((epoch, number))
            number += 1
            yield


def opened(workload: Workload, data: Any) -> Any:
    """Return the data set, or a stream's samples.

    Args:
        workload: whose data it is.
        data: the data set, or a function that makes one.
    """
    is_data = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, type)
    if is_stream(data):
        return StreamedSamples(workload, data)
    if is_data:
        return data
    made = data()
    if hasattr(made, "__next__"):
        return StreamedSamples(workload, data)
    return StreamedSamples(workload, made) if is_stream(made) else made
