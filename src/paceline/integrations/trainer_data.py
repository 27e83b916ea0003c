"""The batches of a Trainer: one batch of the loader that `paceline.prepare` gets is a whole step.

Every rank takes its part of the step's samples and makes micro-batches of it. So the count of samples, the place in the
data and the checkpoints are those of steps, and what a step divides by is known before its first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from paceline.nouns.errors import WorkloadError
from paceline.train.data import cut_part
from paceline.train.loader import options_of


class SeededOrder(Sampler[int]):
    """Samples in another random order in each pass: that of accelerate's SeedableRandomSampler, which transformers has.

    Args:
        data: the data set.
        seed: of the first pass; the next has one more.

    Attributes:
        generator: its seed is that of the next pass. Paceline puts it back where a job resumes.
    """

    def __init__(self, data: Sized, seed: int) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of all samples."""
        seed = self.generator.initial_seed()
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(seed))
        self.generator.manual_seed(seed + 1)
        yield from order.tolist()


class StepBatches(Sampler[list[Any]]):
    """The samples of each step: those of several batches of a loader; the last step of a pass has what is left.

    Args:
        batches: a batch sampler.
        count: batches of a step.
    """

    def __init__(self, batches: Any, count: int) -> None:
        self.batches = batches
        self.count = count
        self.sampler = getattr(batches, "sampler", None)  # Paceline puts back its generator where a job resumes
        self.generator = getattr(batches, "generator", None)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.count)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the keys of each step's samples."""
        step: list[Any] = []
        for number, batch in enumerate(self.batches, 1):
            step += batch
            if number % self.count == 0:
                yield step
                step = []
        if step:
            yield step


class MicroBatches:
    """Collate a rank's samples of a step to micro-batches.

    Args:
        collate: makes a batch of samples.
        size: samples of a micro-batch; None: as many in each.
        count: micro-batches of a step, at most.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], size: int | None, count: int) -> None:
        self.collate = collate
        self.size = size
        self.count = count

    def __call__(self, samples: list[Any]) -> list[Any]:
        """Return the micro-batches."""
        found = []
        for piece in cut_part(range(len(samples)), 0 if self.size else self.count, self.size):
            batch = self.collate(samples[piece.start : piece.stop])
            found.append(dict(batch) if isinstance(batch, Mapping) else batch)
        return found


def batches_of(loader: DataLoader[Any]) -> int | None:
    """Return how many batches a loader has; None for a stream."""
    try:
        return len(loader)
    except TypeError:
        return None


def steps_of(loader: DataLoader[Any], count: int, parts: int) -> DataLoader[Any]:
    """Return a loader whose batches are steps.

    Args:
        loader: its batches are those of all ranks together.
        count: batches of a step.
        parts: parts into which the ranks cut a batch.

    Raises:
        WorkloadError: it is none, or makes no batches.
    """
    if not isinstance(loader, DataLoader) or (loader.batch_size is None and loader.batch_sampler is None):
        raise WorkloadError(
            "get_train_dataloader should return a torch.utils.data.DataLoader that makes batches",
            f"it returned a {type(loader).__name__}"
            + (" with batch_size=None" if isinstance(loader, DataLoader) else ""),
            "return DataLoader(data, batch_size=..., collate_fn=self.data_collator); batch_size is that of all ranks",
        )
    size = None if loader.batch_size is None else -(-loader.batch_size // parts)
    options: dict[str, Any] = {"collate_fn": MicroBatches(loader.collate_fn, size, count)}
    if isinstance(loader.dataset, IterableDataset):
        assert loader.batch_size is not None
        options |= {"batch_size": loader.batch_size * count, "drop_last": loader.drop_last}
    else:
        options["batch_sampler"] = StepBatches(loader.batch_sampler, count)
    return DataLoader(loader.dataset, generator=loader.generator, **options_of(loader), **options)
