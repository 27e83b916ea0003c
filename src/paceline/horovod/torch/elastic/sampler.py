"""A sampler that shares out again, in the middle of an epoch, what no rank has processed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from paceline.horovod.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Share the samples of a data set among the ranks, without those that were processed in this epoch.

    Args:
        dataset: the data set.
        shuffle: True to draw another order in each epoch.
        seed: the seed of the order, the same on all ranks.

    Attributes:
        epoch: the number of the epoch.
        processed_indices: the samples that this rank knows to be processed in this epoch.
        indices: the samples of this rank that are left.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no sample is processed yet.

        Args:
            epoch: the number of the epoch, from 0.
        """
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch was processed.

        Args:
            batch_idx: the number of the batch since the sampler was last reset.
            batch_size: the number of samples in each batch of this rank.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: list[int]) -> None:
        """Note that samples were processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of a batch of this rank."""
        first = batch_idx * batch_size
        return self.indices[first : first + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and what is processed in it."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` returned, and share out the rest."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the present ranks: to each the same number, some samples twice."""
        self.num_replicas = size()
        self.rank = rank()
        remaining = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(remaining)
        self.remaining_indices = remaining
        self.num_samples = -(-len(remaining) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        padded = remaining[:]
        while remaining and len(padded) < self.total_size:
            padded += remaining[: self.total_size - len(padded)]
        self.indices = padded[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of this rank that are left."""
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
