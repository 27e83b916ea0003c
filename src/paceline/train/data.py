"""Load this rank's micro-batches of each global batch, in the order of the data that all ranks share.

A sample is loaded with the random generators seeded by (seed, position): masks and augmentations drawn in
the data set's `[]` are the same whichever rank or loader worker makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.comm.pytree import dense_tensors_in, map_tensors, plain_values, signature, tensors_in
from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.order import DataOrder, cut, share
from paceline.nouns.parts import check_data, is_stream
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.train.data_workers import AtHand, ends_with_rank
from paceline.train.device_batches import on_device
from paceline.train.seed import kept_random_state, random_state, seed_sample
from paceline.train.stream import as_stream

# Of samples that the loss is tried on. Without a common divisor: a share of the samples, such as that which a router
# sends somewhere, can't be the same in both parts unless it is all or none of them.
_TRIED = (2, 3)
EVALUATION = 0xE7A1  # keeps evaluation's random numbers apart from training's


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's part of one global batch. It may be empty on some ranks when the last batch is short.

    Attributes:
        microbatches: what `collate` makes of this rank's samples, in pieces of `micro_batch_size`, on the job's device.
        positions: of the global batch, in the global order of samples.
        longest: micro-batches of the rank that has most of them.
        place: of a stream, where it is after this batch.

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
        sizes: how many samples the parts have.
        batches: all together, and the parts in the shapes of the whole batch.
        unpadded: the parts in shapes of their own, where these are others.
    """

    sizes: tuple[int, int]
    batches: list[Any]
    unpadded: list[Any] = dataclasses.field(default_factory=list)


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the loader's processes.

    torch imports a part of its profiler when a region is first recorded, as the loader does for each batch. A process
    that dies during that import raises in it, by torch's handler of SIGCHLD, and torch logs a traceback. So the import
    comes before there are processes.
    """
    if loader.num_workers:
        with torch.profiler.record_function("paceline: data"):
            pass
    return iter(loader)


class _Positioned(Dataset[Any]):
    """A data set read by position in the order."""

    def __init__(self, data: Any, order: DataOrder, *stream: int) -> None:
        self.data, self.order, self.stream = data, order, (order.seed, *stream)

    def __getitem__(self, position: int) -> Any:
        seed_sample(*self.stream, position)
        return self.data[self.order.index(position)]


@dataclass(frozen=True, slots=True)
class RankLoader:
    """Loads what part `rank` of `size` parts needs of each global batch, in micro-batches, on its device.

    `pieces_wanted` is how many micro-batches a part is to be cut into; 0 leaves it to the workload.
    """

    data: Any
    workload: Workload
    rank: int
    size: int
    device: torch.device
    pieces_wanted: int = 0

    def order(self, batch_size: int, shuffle: bool = True) -> DataOrder:
        """Return the global order of the data set."""
        return DataOrder(self.workload.seed, len(self.data), batch_size, shuffle)

    @property
    def samples(self) -> int:
        """Return the length of the data set, 0 if there is none."""
        return len(self.data)

    @property
    def notice(self) -> str:
        """Return what the user should know of the data; "" where there is nothing."""
        return ""

    def note(self, batch: Batch) -> None:
        """Hear that a batch was trained on: the position says where the data is."""

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the place in the data beside the position."""
        return {}

    def go_to(self, manifest: dict[str, Any]) -> None:
        """Go to the place of a checkpoint, beside the position."""

    def length(self, step: int = 0, position: int = 0) -> tuple[int, int]:
        """Return the optimizer steps of the training, 0 if unknown, and the position after the last.

        Args:
            step: that were taken, perhaps with batches of another size.
            position: after them.
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
            return _Positioned(self.data, self.order(self.workload.batch_size))[0]

    def trials(self) -> list[Trial] | None:
        """Return samples of the first global batch, together and in two parts, to try the loss on; not on the device.

        Empty where a batch has one sample; None where the samples have no common shape, so that none can be taken
        out of a batch.
        """
        count = min(len(self.data), self.workload.batch_size)
        if count < 2:
            return []
        first = self.order(self.workload.batch_size).batch_at(0)
        if count >= sum(_TRIED) and self._smallest_piece(first) >= _TRIED[0]:
            starts = [0]
            sizes = _TRIED
        else:  # small micro-batches: perhaps no more fit into memory. Up to three pairs of samples
            starts = list(range(0, min(count, 6) - 1, 2))
            sizes = (1, 1)
        data = _Positioned(self.data, self.order(self.workload.batch_size))
        trials = []
        with kept_random_state():
            for start in starts:
                samples = [data[start + offset] for offset in range(sum(sizes))]
                trial = self._trial(samples, sizes)
                if trial is not None:
                    trials.append(trial)
        return trials or None

    def doubled(self) -> Trial | None:
        """Return some samples of the first batch, of which each comes twice, in two parts; None where that can't be."""
        count = min(len(self.data), self.workload.batch_size, max(_TRIED))
        if count < 2:
            return None
        data = _Positioned(self.data, self.order(self.workload.batch_size))
        samples = [data[position] for position in range(count)]
        return self._trial([*samples, *samples], (count, count))

    def _smallest_piece(self, batch: range) -> int:
        """Return the samples of the smallest micro-batch that any part has of a global batch."""
        sizes: list[int] = []
        for part in range(self.size):
            sizes += [len(piece) for piece in self.pieces(batch, part)]
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
        first = dataclasses.replace(self, rank=0, pieces_wanted=0)
        order = self.order(self.workload.batch_size)
        with kept_random_state():
            return next(first._load(order, 0, order.batch_at(0).stop)).microbatches[0]

    def training(self, position: int, end: int) -> Iterator[Batch]:
        """Yield this rank's part of every global batch from `position` up to `end`."""
        order = self.order(self.workload.batch_size)
        yield from self._load(order, position, end)

    def evaluation(self) -> Iterator[Batch]:
        """Yield each sample once, in the data set's own order."""
        order = self.order(self.workload.batch_size, shuffle=False)
        yield from self._load(order, 0, len(self.data), EVALUATION)

    def _load(self, order: DataOrder, position: int, end: int, *stream: int) -> Iterator[Batch]:
        at_hand = AtHand(len(self.pieces(range(order.batch_size))))
        loaded = self._on_host(order, position, end, stream, at_hand)
        for positions, batch in on_device(loaded, self.device, self.workload.precision == "float64", at_hand):
            longest = len(self.pieces(positions, 0))  # part 0 is never smaller than another
            yield Batch(batch.take(), positions, longest)

    def _on_host(
        self, order: DataOrder, position: int, end: int, stream: tuple[int, ...], at_hand: AtHand
    ) -> Iterator[tuple[range, list[Any]]]:
        """Yield the positions of every global batch, and this rank's micro-batches of it as they are loaded."""
        workers = self.workload.loader_workers
        # One for the whole training: worker processes start once, and load ahead across steps and epochs.
        loader = DataLoader(
            _Positioned(self.data, order, *stream),
            batch_sampler=_Pieces(self, order, position, end),  # type: ignore[arg-type]
            collate_fn=collate_of(self.workload),
            num_workers=workers,
            worker_init_fn=ends_with_rank(),
            generator=torch.Generator(),  # its own, so that making a loader leaves the model's random numbers alone
            pin_memory=self.device.type == "cuda",
        )
        batches = at_hand.of(_started(loader))
        for positions in order.batches(position, end):
            # The sampler yields in the same order as this loop asks.
            pieces = self.pieces(positions)
            if workers:
                loaded = [next(batches) for _ in pieces]
            else:  # the data set's code runs in this process, and is not to touch the model's random numbers
                with kept_random_state():
                    loaded = [next(batches) for _ in pieces]
            yield positions, loaded

    def pieces(self, batch: range, part: int | None = None) -> list[range]:
        """Return the positions of a part's micro-batches of a global batch; this rank's if `part` is None."""
        positions = share(batch, self.rank if part is None else part, self.size)
        return cut_part(positions, self.pieces_wanted, self.workload.micro_batch_size)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The batch sampler of a loader. It makes positions as they are asked for: a run may be a million steps long."""

    loader: RankLoader
    order: DataOrder
    position: int
    end: int

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.order.batches(self.position, self.end):
            for piece in self.loader.pieces(batch):
                yield list(piece)


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


def _collate_twice(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, bool]:
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


def _is_equal(batch: Any, other: Any) -> bool:
    if signature(batch) != signature(other):
        return False
    pairs = zip(dense_tensors_in(batch), dense_tensors_in(other), strict=True)
    return all(torch.equal(tensor, counterpart) for tensor, counterpart in pairs)


def cut_part(part: range, pieces_wanted: int, micro_batch_size: int | None) -> list[range]:
    """Return the micro-batches of a rank's part of a batch.

    Args:
        part: positions.
        pieces_wanted: how many; 0 leaves it to the size.
        micro_batch_size: the samples of one; all where None.
    """
    size = micro_batch_size or len(part)
    if pieces_wanted:
        size = -(-len(part) // pieces_wanted)  # rounded up
    return cut(part, max(size, 1))


def collate_of(workload: Workload) -> Callable[[list[Any]], Any]:
    """Return what makes a batch of a list of samples."""
    return workload.collate or _default_collate


def _default_collate(samples: list[Any]) -> Any:
    return collated(samples, "hand in collate=...")


def collated(samples: list[Any], where: str) -> Any:
    """Make a batch as torch does, whose errors don't say what to do.

    Args:
        samples: of the batch.
        where: what an error says of the place for another function.

    Raises:
        WorkloadError: the samples make no batch so.
    """
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError) as error:
        raise WorkloadError(
            "torch's default collate should make a batch of the samples",
            f"it can't: {str(error).splitlines()[0]:.200}",
            f"{where}, a function of a list of samples that pads them, say, and returns a batch",
        ) from error


def cut_into(plan: Plan, mesh: Mesh, workload: Workload) -> int:
    """Return how many micro-batches a pipeline wants of a rank's part of a batch; 0 if there is no pipeline."""
    if mesh.size("pipeline") == 1:
        return 0
    # 0 leaves it to the workload's micro_batch_size.
    if plan.micro_batches or workload.micro_batch_size:
        return plan.micro_batches
    return 2 * mesh.size("pipeline")


def cut_without_changing(plan: Plan, micro_batches: int, coupling: str) -> int:
    """Return into how many micro-batches a pipeline cuts a batch, once it is known whether samples meet in the model.

    Args:
        plan: its own number stands as it is.
        micro_batches: what `cut_into` said.
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
