"""From the data order to this rank's micro-batches.

A sample is loaded with the random generators seeded by (seed, position): masks and augmentations drawn in
the data set's `[]` are the same whichever rank or loader worker makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.comm.leaves import map_tensors, tensors_in
from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.order import DataOrder, cut, share
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, seed_sample

_EVALUATION = 0xE7A1  # keeps evaluation's random numbers apart from training's


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's part of one global batch. It may be empty on some ranks when the last batch is short."""

    microbatches: list[Any]
    positions: range  # of the global batch
    longest: int = 1  # micro-batches of the rank that has most of them


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

    def two_samples(self) -> list[Any] | None:
        """The first two samples as one batch and as two, on the device; None where they have no common shapes."""
        if len(self.data) < 2 or self.workload.batch_size < 2:
            return None
        data = _Positioned(self.data, self.order(self.workload.batch_size))
        collate = self.workload.collate or default_collate
        with kept_random_state():
            batches = [collate([data[0], data[1]]), collate([data[0]]), collate([data[1]])]
        shapes = [[tuple(tensor.shape[1:]) for tensor in tensors_in(batch)] for batch in batches]
        if shapes[0] != shapes[1] or shapes[1] != shapes[2]:
            return None
        return [moved(batch, self.device, self.workload.precision == "float64") for batch in batches]

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
            collate_fn=self.workload.collate,
            num_workers=workers,
            generator=torch.Generator(),  # its own, so that making a loader leaves the model's random numbers alone
            pin_memory=self.device.type == "cuda",
        )
        ready = iter(loader)
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
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise WorkloadError(
            f"the workload's {name} should be a data set with len() and []",
            f"its function returned a {type(data).__name__}",
            "return a map-style Dataset or a list; wrap a stream in one that knows its length",
        )
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
