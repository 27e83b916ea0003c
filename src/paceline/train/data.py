"""Load this rank's micro-batches of each global batch, in the order of the data that all ranks share.

A sample is loaded with the random generators seeded by (seed, position): masks and augmentations drawn in
the data set's `[]` are the same whichever rank or loader worker makes them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from paceline.comm.pytree import dense_tensors_in, map_tensors, plain_values, signature, tensors_in
from paceline.nouns.data_order import DataOrder, cut, share
from paceline.nouns.errors import CheckpointError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.parts import check_data, is_stream
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.train.loader import (
    AtHand,
    Collate,
    Key,
    Part,
    Place,
    Seeded,
    default_batch,
    load_items,
    load_stream,
    moved,
    on_device,
)
from paceline.train.seed import kept_random_state, random_state, seed_sample
from paceline.train.stream import COLLATE, Head, Numbered, Stream, StreamPlace, as_stream, empty

# Of samples that the loss is tried on. Without a common divisor: a share of the samples, such as that which a router
# sends somewhere, can't be the same in both parts unless it is all or none of them.
_TRIED = (2, 3)
EVALUATION = 0xE7A1  # keeps evaluation's random numbers apart from training's
STREAM = "stream"  # the key of a stream's place in a checkpoint's manifest


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's part of one global batch. It may be empty on some ranks when the last batch is short.

    Attributes:
        microbatches: the results of `collate` for this rank's samples, in micro-batches of `micro_batch_size`, on the
            job's device.
        positions: the positions of the global batch, in the global order of samples.
        longest: the number of micro-batches of the rank that has most of them.
        place: the place of a stream after this batch; None for other data.

    Examples:
        >>> job = paceline.distribute(workload)
        >>> batch = next(job.batches())
        >>> batch.positions
        range(0, 16)
        >>> [inputs.shape for inputs, targets in batch.microbatches]
        [torch.Size([16, 4])]
    """

    microbatches: list[Any]
    positions: range
    longest: int = 1
    place: Any = None

    def __iter__(self) -> NoReturn:
        """Refuse `inputs, targets = batch`, and say what to do."""
        raise WorkloadError(
            "a batch of job.batches() should be handed to job.step as it is",
            "it is taken apart as if it were what `collate` makes",
            "write `job.step(batch)`, which calls the workload's loss; what `collate` made is in batch.microbatches",
        )

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse `batch[0]` and `batch["labels"]` as well."""
        self.__iter__()


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples as one batch, and as two: the first `sizes[0]` of them and the others.

    Attributes:
        sizes: the number of samples of each part.
        batches: the batch of all samples, and the batches of the parts, in the shapes of the whole batch.
        unpadded: the batches of the parts in shapes of their own, where these differ.
    """

    sizes: tuple[int, int]
    batches: list[Any]
    unpadded: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankLoader:
    """Loads what part `rank` of `size` parts needs of each global batch, in micro-batches, on its device.

    `micro_batches_wanted` is the number of micro-batches into which a part is to be cut; 0 leaves it to the workload.
    """

    data: Any
    workload: Workload
    rank: int
    size: int
    device: torch.device
    micro_batches_wanted: int = 0

    def order(self, batch_size: int, shuffle: bool = True) -> DataOrder:
        """Return the global order of the data set."""
        return DataOrder(self.workload.seed, len(self.data), batch_size, shuffle)

    @property
    def samples(self) -> int:
        """Return the length of the data set, 0 if there is none."""
        return len(self.data)

    @property
    def notice(self) -> str:
        """Return a notice for the user about the data; "" where there is none."""
        return ""

    def batch_trained(self, batch: Batch) -> None:
        """Do nothing after a batch: the position says where the data is."""

    def facts(self) -> dict[str, Any]:
        """Return the place in the data, for a checkpoint, beside the position."""
        return {}

    def go_to(self, manifest: dict[str, Any]) -> None:
        """Go to the place of a checkpoint, beside the position."""

    def length(self, step: int = 0, position: int = 0) -> tuple[int, int]:
        """Return the optimizer steps of the training, 0 if unknown, and the position after the last.

        Args:
            step: the number of steps that were taken, perhaps with batches of another size.
            position: the position after these steps.
        """
        if not len(self.data):
            return self.workload.steps or 0, 0  # the loop makes the batches
        order = self.order(self.workload.batch_size)
        if self.workload.steps:
            return self.workload.steps, order.position_after(max(0, self.workload.steps - step), position)
        end = self.workload.epochs * order.samples
        return step + order.steps_between(position, end), end

    def first_sample(self) -> Any:
        """Return the sample at position 0, which should be the same on every rank."""
        with kept_random_state():
            return self._samples(range(1))[0]

    def trials(self) -> list[Trial] | None:
        """Return samples of the first global batch, together and in two parts, to try the loss on; not on the device.

        Empty where a batch has one sample; None where the samples have no common shape, so that none can be taken
        out of a batch.
        """
        count = min(len(self.data), self.workload.batch_size)
        if count < 2:
            return []
        first = self.order(self.workload.batch_size).batch_at(0)
        if count >= sum(_TRIED) and self._smallest_micro_batch(first) >= _TRIED[0]:
            starts = [0]
            sizes = _TRIED
        else:  # small micro-batches: perhaps no more fit into memory. Up to three pairs of samples
            starts = list(range(0, min(count, 6) - 1, 2))
            sizes = (1, 1)
        trials = []
        with kept_random_state():
            for start in starts:
                trial = self._trial(self._samples(range(start, start + sum(sizes))), sizes)
                if trial is not None:
                    trials.append(trial)
        return trials or None

    def doubled(self) -> Trial | None:
        """Return some samples of the first batch, of which each comes twice, in two parts; None where that can't be."""
        count = min(len(self.data), self.workload.batch_size, max(_TRIED))
        if count < 2:
            return None
        samples = self._samples(range(count))
        return self._trial([*samples, *samples], (count, count))

    def _smallest_micro_batch(self, batch: range) -> int:
        """Return the samples of the smallest micro-batch that any part has of a global batch."""
        sizes: list[int] = []
        for part in range(self.size):
            sizes += [len(microbatch) for microbatch in self.micro_batches_of(batch, part)]
        return min(sizes)

    def _trial(self, samples: list[Any], sizes: tuple[int, int]) -> Trial | None:
        """Make a batch and its two parts.

        None where padding, or something else, gives the parts other shapes and they can't be cut out of the batch.
        """
        collate = collate_of(self.workload)
        boundary = sizes[0]
        try:
            batch, is_drawn = _collate_twice(collate, samples)
            parts = [collate(samples[:boundary]), collate(samples[boundary:])]
        except Exception:  # micro-batches of one sample, say, of which each has another shape
            return None
        shapes = _sample_shapes(batch)
        has_same_shapes = all(_sample_shapes(part) == shapes for part in parts)
        if has_same_shapes and not is_drawn:
            return Trial(sizes, [batch, *parts])
        # Padding, or something drawn for each batch, differs: cut the parts out of the batch, along dimension 0.
        for tensor in tensors_in(batch):
            if tensor.is_nested or not tensor.dim() or len(tensor) != sum(sizes):
                return None
        plain = plain_values(batch)
        if any(plain_values(part) != plain for part in parts):  # a number of samples, their names
            return None
        first = map_tensors(batch, lambda tensor: tensor[:boundary])
        second = map_tensors(batch, lambda tensor: tensor[boundary:])
        return Trial(sizes, [batch, first, second], [] if is_drawn else parts)

    def example(self) -> Any:
        """Return the first micro-batch of the first part, not cut for a pipeline: every rank can make it."""
        first = dataclasses.replace(self, rank=0, micro_batches_wanted=0)
        return first.micro_batch(first.micro_batches_of(self.order(self.workload.batch_size).batch_at(0))[0])

    def micro_batch(self, positions: range) -> Any:
        """Load the samples at these positions in this process, and make a micro-batch of them."""
        order = self.order(self.workload.batch_size)
        whole_part = Part(None, len(positions), len(positions), 0, keeps_pace=False), [_keys(order, positions)]
        data, collate = Seeded(self.data, order.seed), collate_of(self.workload)
        part = next(load_items(data, collate, [whole_part], AtHand(), generator=torch.Generator()))
        return moved(part.batch[0], self.device, self.workload.precision == "float64")

    def _samples(self, positions: range) -> list[Any]:
        order = self.order(self.workload.batch_size)
        data = Seeded(self.data, order.seed)
        return [data[key] for key in _keys(order, positions)]

    def training(self, position: int, end: int) -> Iterator[Batch]:
        """Yield this rank's part of every global batch from `position` up to `end`."""
        yield from self._load(self.order(self.workload.batch_size), range(position, end))

    def evaluation(self) -> Iterator[Batch]:
        """Yield each sample once, in the data set's own order."""
        order = self.order(self.workload.batch_size, shuffle=False)
        yield from self._load(order, range(len(self.data)), EVALUATION)

    def _load(self, order: DataOrder, positions: range, *stream: int) -> Iterator[Batch]:
        # One DataLoader for the whole training: worker processes start once, and load ahead across steps and epochs.
        at_hand = AtHand(len(self.micro_batches_of(range(order.batch_size))) or 1)
        parts = load_items(
            Seeded(self.data, order.seed, *stream),
            collate_of(self.workload),
            self._own_keys(order, positions),
            at_hand,
            generator=torch.Generator(),  # its own, so that making a loader does not change the model's random numbers
            **self._options(),
        )
        yield from self._batches(parts, positions.start, at_hand)

    def _own_keys(self, order: DataOrder, positions: range) -> Iterator[tuple[Part, list[list[Key]]]]:
        """Yield this rank's parts, as yet without samples, and their keys, as asked for: there may be millions."""
        for batch in order.batches(positions.start, positions.stop):
            own_positions = share(batch, self.rank, self.size)
            microbatches = self.micro_batches_of(batch) or [batch[:1]]
            yield (
                Part(None, len(own_positions), len(batch), 0, not own_positions),
                [_keys(order, microbatch) for microbatch in microbatches],
            )

    def _options(self) -> dict[str, Any]:
        return {"num_workers": self.workload.loader_workers, "pin_memory": self.device.type == "cuda"}

    def _batches(self, parts: Iterator[Part], position: int, at_hand: AtHand) -> Iterator[Batch]:
        """Yield parts as batches on the device, of which the first begins at a position."""
        loaded = ((part._replace(batch=None), [] if part.keeps_pace else part.batch) for part in parts)
        for part, batch in on_device(loaded, self.device, self.workload.precision == "float64", at_hand):
            positions = range(position, position + part.of)
            longest = len(self.micro_batches_of(positions, 0))  # part 0 is never smaller than another
            yield Batch(batch.take(), positions, longest)
            position = positions.stop

    def micro_batches_of(self, batch: range, part: int | None = None) -> list[range]:
        """Return the positions of a part's micro-batches of a global batch; this rank's if `part` is None."""
        positions = share(batch, self.rank if part is None else part, self.size)
        return cut_part(positions, self.micro_batches_wanted, self.workload.micro_batch_size)


@dataclass(slots=True)
class Progress:
    """The place after the last step."""

    place: StreamPlace = field(default_factory=StreamPlace)


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
        """Return a notice about the length of a stream."""
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
        yield from self._read(Numbered(self.data.stream, self.workload.seed ^ EVALUATION, 0), 0, 0)

    def batch_trained(self, batch: Batch) -> None:
        """Move to the place after a batch; a batch that the loop made itself does not move it."""
        if batch.place is not None:
            self.progress.place = batch.place

    def facts(self) -> dict[str, Any]:
        """Return the place, as a checkpoint keeps it."""
        return {STREAM: dataclasses.asdict(self.progress.place)}

    def go_to(self, manifest: dict[str, Any]) -> None:
        """Go to the place of a checkpoint; to the beginning where it has none.

        Raises:
            CheckpointError: it is in the middle of an epoch, counted in batches of another size.
        """
        place = StreamPlace(**(manifest.get(STREAM) or {}))
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
        for count, batch in enumerate(self._read(numbered, 0 if is_there else place.batch, position), 1):
            # A worker process has a copy of the data set, whose state is not known here.
            state = None if self.workload.loader_workers else stream.state()
            after = StreamPlace(place.epoch, place.batch + count, place.taken + count, state)
            yield dataclasses.replace(batch, place=after)

    def _read(self, numbered: Numbered, skip: int, position: int) -> Iterator[Batch]:
        """Yield the parts of an epoch's batches without the first `skip`; the next one begins at `position`."""
        at_hand = AtHand()
        place = Place(self.rank, self.size, numbered.seed, numbered.epoch)
        options = {**self._options(), "batch_size": self.workload.batch_size}
        parts = load_stream(numbered, _MicroBatches(self, numbered), place, at_hand, **options)
        yield from self._batches(itertools.islice(parts, skip, None), position, at_hand)


class _MicroBatches:
    """Makes the micro-batches of a rank's part of a batch of a stream. What collate draws depends on its first sample.

    A loader's process may be handed it, so it does not hold the loader, which has the samples of the head.
    """

    def __init__(self, loader: StreamLoader, numbered: Numbered) -> None:
        self.collate = collate_of(loader.workload)
        self.sizes = loader.micro_batches_wanted, loader.workload.micro_batch_size
        self.seeds = numbered.seed, numbered.epoch

    def __call__(self, samples: list[tuple[int, Any]]) -> list[Any]:
        microbatches = []
        for positions in cut_part(range(len(samples)), *self.sizes):
            members = samples[positions.start : positions.stop]
            seed_sample(*self.seeds, members[0][0], COLLATE)
            microbatches.append(self.collate([sample for _, sample in members]))
        return microbatches


def rank_loader(
    data: Any, workload: Workload, part: tuple[int, int], device: torch.device, micro_batches_wanted: int = 0
) -> RankLoader:
    """Return the loader of one part, of how many, of what `open_data` returned.

    Raises:
        WorkloadError: several processes should read a stream.
    """
    if not isinstance(data, Stream):
        return RankLoader(data, workload, *part, device, micro_batches_wanted)
    if workload.loader_workers > 1:
        raise WorkloadError(
            f"{workload.loader_workers} processes per rank should load samples (loader_workers)",
            "the data is a stream: each of them would read all of it, and every sample come more than once",
            "write loader_workers=1, which reads ahead, or leave it out",
        )
    return StreamLoader(Head(data, workload.seed, workload.batch_size), workload, *part, device, micro_batches_wanted)


def _keys(order: DataOrder, positions: range) -> list[Key]:
    return list(zip(order.indices(positions), positions, strict=True))


def _sample_shapes(batch: Any) -> list[tuple[int, ...]]:
    """Return the shape of one sample in each of the batch's tensors."""
    return [_sample_shape(tensor) for tensor in tensors_in(batch)]


def _sample_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a sample's shape; -1 where each of a nested tensor has its own size, and nothing is padded."""
    if not tensor.is_nested:
        return tuple(tensor.shape[1:])
    sizes = []
    for dim in range(1, tensor.dim()):
        try:
            size = tensor.size(dim)
        except RuntimeError:  # of the layout strided
            size = -1
        sizes.append(size if type(size) is int else -1)
    return tuple(sizes)


def _collate_twice(collate: Collate, samples: list[Any]) -> tuple[Any, bool]:
    """Return a batch, and True if one of the same samples may differ: a mask, or what they are mixed with, is drawn."""
    cpu = torch.device("cpu")
    # Two ways to notice a draw: a generator of torch, Python or numpy moves, or a second batch differs.
    before = random_state(cpu)
    batch = collate(samples)
    for name, state in random_state(cpu).items():
        if name in before and not torch.equal(before[name], state):
            return batch, True
    again = collate(samples)  # it may have a random generator of its own
    return batch, not _is_equal(batch, again)


def _is_equal(batch: Any, second: Any) -> bool:
    if signature(batch) != signature(second):
        return False
    pairs = zip(dense_tensors_in(batch), dense_tensors_in(second), strict=True)
    return all(torch.equal(tensor, counterpart) for tensor, counterpart in pairs)


def cut_part(part: range, micro_batches_wanted: int, micro_batch_size: int | None) -> list[range]:
    """Return the micro-batches of a rank's part of a batch.

    Args:
        part: the positions of the part.
        micro_batches_wanted: the number of micro-batches; 0 leaves it to the size.
        micro_batch_size: the number of samples of a micro-batch; None: all of them.
    """
    size = micro_batch_size or len(part)
    if micro_batches_wanted:
        size = -(-len(part) // micro_batches_wanted)  # rounded up
    return cut(part, max(size, 1))


def collate_of(workload: Workload) -> Collate:
    """Return the function that makes a batch of a list of samples."""
    return workload.collate or partial(default_batch, "hand in collate=...")


def cut_into(plan: Plan, mesh: Mesh, workload: Workload) -> int:
    """Return the number of micro-batches of a rank's part that a pipeline wants; 0 if there is no pipeline."""
    if mesh.size("pipeline") == 1:
        return 0
    # 0 leaves it to the workload's micro_batch_size.
    if plan.micro_batches or workload.micro_batch_size:
        return plan.micro_batches
    return 2 * mesh.size("pipeline")


def cut_without_changing(plan: Plan, micro_batches: int, coupling: str) -> int:
    """Return into how many micro-batches a pipeline cuts a batch, once it is known whether samples meet in the model.

    Args:
        plan: the plan, whose own number of micro-batches is not changed.
        micro_batches: the number that `cut_into` returned.
        coupling: the operation in which samples meet, or "".
    """
    if coupling and micro_batches and not plan.micro_batches:
        return 1
    return micro_batches


def open_data(name: str, value: Any) -> Any:
    """Return the workload's data set: `value` itself, or made by it if it is a function; a `Stream` of a stream.

    Raises:
        WorkloadError: there is none, or it has no length or no items, or it is empty.
    """
    if value is None:
        raise no_data(name)
    check_data(name, value)  # also of what `job.evaluate` is handed
    is_data = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, type)
    is_made = is_data or is_stream(value)
    data = value if is_made else value()
    stream = as_stream(name, data, None if is_made else value)
    if stream is not None:
        return stream
    check_data(name, data, is_made=True)
    if len(data) == 0:
        raise WorkloadError(
            f"the workload's {name} should hold samples", "it is empty", "check the path and the filter that made it"
        )
    return data


def no_data(name: str = "data") -> WorkloadError:
    """Return the error for what needs a data set, of a workload whose loop makes the batches."""
    return WorkloadError(
        f"the workload's {name} is needed here",
        "it is None: the batches are those that your own loop hands to job.step",
        f"write {name}=... in the Workload, or leave out what needs it, such as job.batches()",
    )
