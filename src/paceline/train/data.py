"""From the data order to this rank's micro-batches.

A sample is loaded with the random generators seeded by (seed, position): masks and augmentations drawn in
the data set's `[]` are the same whichever rank or loader worker makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.nouns.errors import WorkloadError
from paceline.nouns.order import DataOrder, cut, share
from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, seed_sample

_EVALUATION = 0xE7A1  # keeps evaluation's random numbers apart from training's


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's part of one global batch. It may be empty on some ranks when the last batch is short."""

    microbatches: list[Any]
    positions: range  # of the global batch


class _Positioned(Dataset[Any]):
    """A data set read by position in the order."""

    def __init__(self, data: Any, order: DataOrder, *stream: int) -> None:
        self.data, self.order, self.stream = data, order, (order.seed, *stream)

    def __getitem__(self, position: int) -> Any:
        seed_sample(*self.stream, position)
        return self.data[self.order.index(position)]


@dataclass(frozen=True, slots=True)
class RankLoader:
    """Loads what one rank of `size` needs of each global batch, in micro-batches, on its device."""

    data: Any
    workload: Workload
    rank: int
    size: int
    device: torch.device

    def order(self, batch_size: int, shuffle: bool = True) -> DataOrder:
        """The global order of the data set."""
        return DataOrder(self.workload.seed, len(self.data), batch_size, shuffle)

    def first_sample(self) -> Any:
        """The sample at position 0, as every rank should find it."""
        with kept_random_state():
            return _Positioned(self.data, self.order(self.workload.batch_size))[0]

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
            yield Batch([moved(one, self.device, double) for one in loaded], batch)

    def pieces(self, batch: range) -> list[range]:
        """The positions of this rank's micro-batches of a global batch."""
        mine = share(batch, self.rank, self.size)
        return cut(mine, self.workload.micro_batch_size or max(len(mine), 1))


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


def moved(batch: Any, device: torch.device, to_float64: bool) -> Any:
    """`batch` with its tensors on `device`; floating ones in float64 where asked."""
    if isinstance(batch, torch.Tensor):
        dtype = torch.float64 if to_float64 and batch.is_floating_point() else None
        return batch.to(device, dtype, non_blocking=True)
    if isinstance(batch, Mapping):
        items = {key: moved(value, device, to_float64) for key, value in batch.items()}
        return type(batch)(items) if type(batch) is not dict else items  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device, to_float64) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device, to_float64) for value in batch)
    return batch


def open_data(name: str, value: Any) -> Any:
    """The workload's data set: itself, or made by its function.

    Raises:
        WorkloadError: it has no length or no items, or it is empty.
    """
    is_data = hasattr(value, "__getitem__") and hasattr(value, "__len__")
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
