"""Streams of samples, as people write them, and a workload that reads them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import paceline

LENGTH = 37  # 5 batches of 8, the last one of 5
BATCH = 8


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A sample with noise that is drawn while it is read."""
    inputs = torch.arange(6, dtype=torch.float64) * (number % 5) / 10 + torch.randn(6, dtype=torch.float64) / 10
    return inputs, torch.tensor(float(number % 7) + random.random() / 10, dtype=torch.float64), number


class Plain(IterableDataset):
    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Any:
        for number in range(self.length):
            yield sample(number)


class Sized(Plain):
    """Says a length too, as some do; it inherits torch's [], which raises."""

    def __len__(self) -> int:
        return 5 * self.length


class Reread:
    """Not torch's class, and in another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = list(range(LENGTH))
        random.Random(self.epoch).shuffle(order)
        return map(sample, order)


def generated() -> Any:
    """A generator function, which is itself the workload's data."""
    order = torch.randperm(LENGTH).tolist()  # the same on every rank, another in each epoch
    for number in order:
        yield sample(number)


class WithState(Reread, IterableDataset):
    """Has its own state, as Hugging Face's streams have."""

    def __init__(self) -> None:
        super().__init__()
        self.place: dict[str, Any] = {"epoch": 0, "inner": {"read": 0, "shard": None}}
        self.start: dict[str, Any] | None = None
        self.reads = 0

    def state_dict(self) -> dict[str, Any]:
        return {**self.place, "inner": dict(self.place["inner"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state

    def __iter__(self) -> Any:
        first = 0
        if self.start is not None and self.start["epoch"] == self.epoch:
            first = self.start["inner"]["read"]
        order = list(range(LENGTH))
        random.Random(self.epoch).shuffle(order)
        for count, number in enumerate(order[first:], first + 1):
            self.reads += 1
            self.place = {"epoch": self.epoch, "inner": {"read": count, "shard": None}}
            yield sample(number)


class BufferShuffled:
    """What of a stream of Hugging Face's says that it shuffles by a buffer."""


class WithBuffer(WithState):
    """Its state has not what is in the buffer: after it has been loaded, other samples come."""

    def __init__(self) -> None:
        super().__init__()
        self._ex_iterable = BufferShuffled()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("the state is not exact")


STREAMS = {
    "plain": Plain(),
    "sized": Sized(),
    "reread": Reread(),
    "generated": generated,
    "function of a stream": Reread,
    "with a state": WithState,
    "with a buffer": WithBuffer,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(inputs))))


def loss(model: Any, batch: Any) -> Any:
    inputs, targets, _ = batch
    return (model(inputs)[:, 0] - targets).square().sum(), targets.numel()


def noisy(samples: list[Any]) -> Any:
    """A collate function that draws."""
    inputs, targets, numbers = torch.utils.data.default_collate(samples)
    return inputs + torch.rand(1, dtype=torch.float64) / 100, targets, numbers


def workload(kind: str, **parts: Any) -> paceline.Workload:
    """Three epochs in float64; `kind` is one of STREAMS."""
    usual = {
        "model": Net,
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": STREAMS[kind],
        "batch_size": BATCH,
        "epochs": 3,
        "precision": "float64",
        "clip_norm": 1.0,
    }
    return paceline.Workload(**{**usual, **parts})
