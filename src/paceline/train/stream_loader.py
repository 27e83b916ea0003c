"""Load this rank's micro-batches of each global batch of a stream.

Every rank reads the whole stream, as it does in a loop of the user's own (`loop_loader.py` cuts the batches), so that
batch N has the same samples on any number of ranks. A batch ends where the stream does; the next epoch begins with a
new one. A job that resumes has the data set go to its place, where that can do so exactly; else the stream is read on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.nouns.errors import CheckpointError, WorkloadError
from paceline.nouns.order import DataOrder
from paceline.nouns.workload import Workload
from paceline.train.data import EVALUATION, Batch, RankLoader, collate_of, cut_part
from paceline.train.data_workers import AtHand, ends_with_rank
from paceline.train.device_batches import Arrived, on_device
from paceline.train.loop_loader import Part, Place, load_pass
from paceline.train.seed import kept_random_state, seed_sample
from paceline.train.stream import COLLATE, Numbered, Stream, empty

KEY = "stream"  # in a checkpoint's manifest


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A place between two batches of a stream.

    Attributes:
        epoch: from 0.
        batch: batches taken in it.
        taken: batches taken in all epochs.
        state: what the data set says of its place; None where it can't.
    """

    epoch: int = 0
    batch: int = 0
    taken: int = 0
    state: dict[str, Any] | None = None


@dataclass(slots=True)
class Progress:
    """The place after the last step."""

    place: StreamPlace = field(default_factory=StreamPlace)


class Head(Sequence[Any]):
    """The samples of a stream's first batch, with their numbers: what is tried out before the first step.

    Args:
        stream: it.
        seed: of the job.
        most: the samples of a batch.
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


@dataclass(frozen=True, slots=True)
class StreamLoader(RankLoader):
    """A `RankLoader` of a stream. `data` is the stream's `Head`, from which a loss is tried and a model captured."""

    progress: Progress = field(default_factory=Progress)

    def order(self, batch_size: int, shuffle: bool = True) -> DataOrder:
        """Return the order of the head: as it comes."""
        return DataOrder(self.workload.seed, len(self.data), batch_size, shuffle=False)

    @property
    def samples(self) -> int:
        """Return 0: nobody knows how many there are."""
        return 0

    @property
    def notice(self) -> str:
        """Return what the user should know."""
        if self.workload.steps:
            return ""
        return "the data is a stream: its end shows how many steps an epoch has, so no total and no time left is shown"

    def length(self, step: int = 0, position: int = 0) -> tuple[int, int]:
        """Return the steps that the workload asks for, 0 if the stream's end decides; the position is not known."""
        return self.workload.steps or 0, 0

    def training(self, position: int, end: int) -> Iterator[Batch]:
        """Yield this rank's part of every global batch from the place on, up to the workload's steps or epochs.

        Raises:
            WorkloadError: the stream is empty.
        """
        self.data.forget()
        place = self.progress.place
        steps = self.workload.steps
        while place.taken < steps if steps else place.epoch < self.workload.epochs:
            for batch in self._epoch(place, position):
                yield batch
                assert batch.place is not None
                place = batch.place
                position = batch.positions.stop
                if place.taken == steps:
                    return
            if not place.batch:
                raise empty()
            place = StreamPlace(place.epoch + 1, 0, place.taken)

    def evaluation(self) -> Iterator[Batch]:
        """Yield each sample once."""
        seed = self.workload.seed ^ EVALUATION
        position = 0
        for part, arrived in self._parts(Numbered(self.data.stream, seed, 0), 0):
            yield self._batch(part, arrived, position)
            position += part.of

    def note(self, batch: Batch) -> None:
        """Be at the place after a batch; one of the loop's own leaves it."""
        if batch.place is not None:
            self.progress.place = batch.place

    def facts(self) -> dict[str, Any]:
        """Return the place, as a checkpoint keeps it."""
        return {KEY: dataclasses.asdict(self.progress.place)}

    def go_to(self, manifest: dict[str, Any]) -> None:
        """Go to the place of a checkpoint; to the beginning where it has none.

        Raises:
            CheckpointError: it is in the middle of an epoch, counted in batches of another size.
        """
        place = StreamPlace(**(manifest.get(KEY) or {}))
        saved = manifest.get("batch_size", self.workload.batch_size)
        if place.batch and saved != self.workload.batch_size:
            raise CheckpointError(
                "a stream should go on at the samples that come next",
                f"the checkpoint is after {place.batch} batches of {saved} in an epoch, and the workload's batch_size "
                f"is {self.workload.batch_size}",
                f"resume with batch_size={saved}, or from a checkpoint at the end of an epoch",
            )
        self.progress.place = place

    def _epoch(self, place: StreamPlace, position: int) -> Iterator[Batch]:
        """Yield the batches of an epoch that come after a place."""
        stream: Stream = self.data.stream
        stream.begin_epoch(place.epoch)
        is_there = stream.go_on(place.state)
        first = place.batch * self.workload.batch_size if is_there else 0
        numbered = Numbered(stream, self.workload.seed, place.epoch, first)
        for count, (part, arrived) in enumerate(self._parts(numbered, 0 if is_there else place.batch), 1):
            # A worker process has a copy of the data set, whose state is not known here.
            state = None if self.workload.loader_workers else stream.state()
            after = StreamPlace(place.epoch, place.batch + count, place.taken + count, state)
            batch = self._batch(part, arrived, position)
            yield dataclasses.replace(batch, place=after)
            position = batch.positions.stop

    def _parts(self, numbered: Numbered, skip: int) -> Iterator[tuple[Part, Arrived]]:
        loader = DataLoader(
            numbered,
            batch_size=self.workload.batch_size,
            collate_fn=_Collate(
                collate_of(self.workload),
                (numbered.seed, numbered.epoch),
                (self.pieces_wanted, self.workload.micro_batch_size),
            ),
            num_workers=self.workload.loader_workers,
            worker_init_fn=ends_with_rank(),
            pin_memory=self.device.type == "cuda",
        )
        at_hand = AtHand()
        place = Place(self.rank, self.size, numbered.seed, numbered.epoch)
        parts = load_pass(loader, place, skip, at_hand=at_hand)
        # A part that keeps pace has a sample of another rank.
        loaded = ((part, [] if part.keeps_pace else part.batch) for part in parts)
        yield from on_device(loaded, self.device, self.workload.precision == "float64", at_hand)

    def _batch(self, part: Part, arrived: Arrived, position: int) -> Batch:
        positions = range(position, position + part.of)
        return Batch(arrived.take(), positions, len(self.pieces(positions, 0)))


@dataclass(frozen=True, slots=True)
class _Collate:
    """Makes the micro-batches of a rank's part of a batch. A loader's process may be handed it, so it has no more.

    Args:
        collate: makes one of a list of samples.
        seeds: of the epoch. What collate draws depends on them and on the number of its first sample.
        sizes: what `cut_part` takes beside the part.
    """

    collate: Callable[[list[Any]], Any]
    seeds: tuple[int, int]
    sizes: tuple[int, int | None]

    def __call__(self, samples: list[tuple[int, Any]]) -> list[Any]:
        microbatches = []
        for piece in cut_part(range(len(samples)), *self.sizes):
            members = samples[piece.start : piece.stop]
            seed_sample(*self.seeds, members[0][0], COLLATE)
            microbatches.append(self.collate([sample for _, sample in members]))
        return microbatches


def rank_loader(
    data: Any, workload: Workload, part: tuple[int, int], device: torch.device, pieces_wanted: int = 0
) -> RankLoader:
    """Return the loader of one part, of how many, of what `open_data` returned.

    Raises:
        WorkloadError: several processes should read a stream.
    """
    if not isinstance(data, Stream):
        return RankLoader(data, workload, *part, device, pieces_wanted)
    if workload.loader_workers > 1:
        raise WorkloadError(
            f"{workload.loader_workers} processes per rank should load samples (loader_workers)",
            "the data is a stream: each of them would read all of it, and every sample come more than once",
            "write loader_workers=1, which reads ahead, or leave it out",
        )
    return StreamLoader(Head(data, workload.seed, workload.batch_size), workload, *part, device, pieces_wanted)
