"""From the data order to this rank's micro-batches.

A sample is loaded with the random generators seeded by (seed, position): masks and augmentations drawn in
the data set's `[]` are the same whichever rank or loader worker makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.comm.pytree import map_tensors, plain_values, signature, tensors_in
from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.order import DataOrder, cut, share
from paceline.nouns.parts import check_data
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, random_state, seed_sample

# Of samples that the loss is tried on. Without a common divisor: a share of the samples, such as that which a router
# sends somewhere, can't be the same in both parts unless it is all or none of them.
_TRIED = (2, 3)
_EVALUATION = 0xE7A1  # keeps evaluation's random numbers apart from training's


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's part of one global batch. It may be empty on some ranks when the last batch is short."""

    microbatches: list[Any]
    positions: range  # of the global batch
    longest: int = 1  # micro-batches of the rank that has most of them


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
        """The global order of the data set."""
        return DataOrder(self.workload.seed, len(self.data), batch_size, shuffle)

    def length(self) -> tuple[int, int]:
        """Optimizer steps of the whole training, 0 where nobody has said, and the position after the last."""
        if not len(self.data):
            return self.workload.steps or 0, 0  # the loop makes the batches
        order = self.order(self.workload.batch_size)
        steps = self.workload.steps or self.workload.epochs * -(-order.samples // order.batch_size)
        return steps, order.position_after(steps)

    def first_sample(self) -> Any:
        """The sample at position 0, as every rank should find it."""
        with kept_random_state():
            return _Positioned(self.data, self.order(self.workload.batch_size))[0]

    def trials(self) -> list[Trial] | None:
        """Samples of the first global batch, together and in two parts, to try the loss on. Not on the device yet.

        Empty where a batch has one sample; None where the samples have no common shape, so that none can be taken
        out of a batch.
        """
        count = min(len(self.data), self.workload.batch_size)
        if count < 2:
            return []
        first = self.order(self.workload.batch_size).batch_at(0)
        smallest = min(len(piece) for part in range(self.size) for piece in self.pieces(first, part))
        if count >= sum(_TRIED) and smallest >= _TRIED[0]:
            starts, sizes = [0], _TRIED
        else:  # small micro-batches: perhaps no more fit into memory
            starts, sizes = list(range(0, min(count, 6) - 1, 2)), (1, 1)
        data = _Positioned(self.data, self.order(self.workload.batch_size))
        with kept_random_state():
            made = [self._trial([data[start + at] for at in range(sum(sizes))], sizes) for start in starts]
        found = [trial for trial in made if trial is not None]
        return found or None

    def _trial(self, samples: list[Any], sizes: tuple[int, int]) -> Trial | None:
        """None where padding, or something else, gives the parts other shapes and they can't be cut out."""
        collate = self.workload.collate or _default_collate
        try:
            whole, is_drawn = _whole_batch(collate, samples)
            batches = [whole, *(collate(piece) for piece in (samples[: sizes[0]], samples[sizes[0] :]))]
        except Exception:  # micro-batches of one sample, say, of which each has another shape
            return None
        shapes = [[tuple(tensor.shape[1:]) for tensor in tensors_in(batch)] for batch in batches]
        if shapes[0] == shapes[1] == shapes[2] and not is_drawn:
            return Trial(sizes, batches)
        if any(not tensor.dim() or len(tensor) != sum(sizes) for tensor in tensors_in(whole)):
            return None
        if len({plain_values(batch) for batch in batches}) > 1:  # a number of samples, their names
            return None
        first = map_tensors(whole, lambda tensor: tensor[: sizes[0]])
        cut_out = [whole, first, map_tensors(whole, lambda tensor: tensor[sizes[0] :])]
        return Trial(sizes, cut_out, [] if is_drawn else batches[1:])

    def example(self) -> Any:
        """The first micro-batch of the first part, not cut for a pipeline: what every rank can make, to learn from."""
        first = dataclasses.replace(self, rank=0, pieces_wanted=0)
        order = self.order(self.workload.batch_size)
        with kept_random_state():
            return next(first._load(order, 0, order.batch_at(0).stop)).microbatches[0]

    def training(self, position: int, end: int) -> Iterator[Batch]:
        """Every global batch from `position` up to `end`: this rank's part of it."""
        order = self.order(self.workload.batch_size)
        yield from self._load(order, position, end)

    def evaluation(self) -> Iterator[Batch]:
        """Each sample once, in the data set's own order."""
        order = self.order(self.workload.batch_size, shuffle=False)
        yield from self._load(order, 0, len(self.data), _EVALUATION)

    def _load(self, order: DataOrder, position: int, end: int, *stream: int) -> Iterator[Batch]:
        workers = self.workload.loader_workers
        loader = DataLoader(
            _Positioned(self.data, order, *stream),
            batch_sampler=_Pieces(self, order, position, end),  # type: ignore[arg-type]
            collate_fn=self.workload.collate or _default_collate,
            num_workers=workers,
            generator=torch.Generator(),  # its own, so that making a loader leaves the model's random numbers alone
            pin_memory=self.device.type == "cuda",
        )
        ready = _started(loader)
        for batch in order.batches(position, end):
            parts = self.pieces(batch)
            if workers:
                loaded = [next(ready) for _ in parts]
            else:
                with kept_random_state():
                    loaded = [next(ready) for _ in parts]
            double = self.workload.precision == "float64"
            yield Batch([moved(one, self.device, double) for one in loaded], batch, len(self.pieces(batch, 0)))

    def pieces(self, batch: range, part: int | None = None) -> list[range]:
        """The positions of a part's micro-batches of a global batch; this rank's where `part` is None."""
        mine = share(batch, self.rank if part is None else part, self.size)
        size = self.workload.micro_batch_size or max(len(mine), 1)
        if self.pieces_wanted:
            size = max(-(-len(mine) // self.pieces_wanted), 1)
        return cut(mine, size)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What the loader is to load next, made as it asks: a run may be a million steps long."""

    loader: RankLoader
    order: DataOrder
    position: int
    end: int

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.order.batches(self.position, self.end):
            for piece in self.loader.pieces(batch):
                yield list(piece)


def _whole_batch(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, bool]:
    """A batch, and whether one of the same samples may differ: a mask, or what they are mixed with, may be drawn."""
    cpu = torch.device("cpu")
    state = random_state(cpu)
    batch = collate(samples)
    if any(not torch.equal(state[name], now) for name, now in random_state(cpu).items() if name in state):
        return batch, True
    again = collate(samples)  # it may have a random generator of its own
    tensors = zip(tensors_in(batch), tensors_in(again), strict=True)
    return batch, signature(batch) != signature(again) or not all(torch.equal(*pair) for pair in tensors)


def _default_collate(samples: list[Any]) -> Any:
    """torch's, whose errors don't say what to do.

    Raises:
        WorkloadError: the samples make no batch so.
    """
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError) as error:
        raise WorkloadError(
            "torch's default collate should make a batch of the samples",
            f"it can't: {str(error).splitlines()[0]:.200}",
            "hand in collate=..., a function of a list of samples that pads them, say, and returns a batch",
        ) from error


def cut_into(plan: Plan, mesh: Mesh, workload: Workload) -> int:
    """How many micro-batches a pipeline wants of a rank's part of a batch; 0 where there is none."""
    if mesh.size("pipeline") == 1:
        return 0
    if plan.micro_batches or workload.micro_batch_size:
        return plan.micro_batches
    return 2 * mesh.size("pipeline")


def moved(batch: Any, device: torch.device, to_float64: bool) -> Any:
    """`batch` with its tensors on `device`; floating ones in float64 where asked."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if to_float64 and tensor.is_floating_point() else None
        return tensor.to(device, dtype, non_blocking=True)

    return map_tensors(batch, move)


def open_data(name: str, value: Any) -> Any:
    """The workload's data set: itself, or made by its function.

    Raises:
        WorkloadError: there is none, or it has no length or no items, or it is empty.
    """
    if value is None:
        raise no_data(name)
    is_data = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, type)
    data = value if is_data else value()
    check_data(name, data, is_made=True)
    if len(data) == 0:
        raise WorkloadError(
            f"the workload's {name} should hold samples", "it is empty", "check the path and the filter that made it"
        )
    return data


def no_data(name: str = "data") -> WorkloadError:
    """The error of what needs a data set, for a workload whose loop makes the batches."""
    return WorkloadError(
        f"the workload's {name} is needed here",
        "it is None: the batches are those that your own loop hands to job.step",
        f"write {name}=... in the Workload, or leave out what needs it, such as job.batches()",
    )
