"""Define what both sides of `bench strategies` train: the benchmarks' BERT on made-up tokens, in the same batches.

Like the demo, every sequence hides as many tokens, named by position, as Google's original does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline.demo.bert import Bert, BertConfig
from paceline.demo.corpus import MASK
from paceline.nouns.data_order import DataOrder, share
from paceline.nouns.workload import Workload
from paceline.train.seed import seed_everything

BATCH = 16  # samples of a step over all ranks
MICRO_BATCHES = 4  # of a step in a pipeline
SEED = 0
HIDDEN = 10  # tokens hidden of a sequence of 64, about 15 % as in the demo
STRIDE = 6  # tokens from one hidden token to the next

Batch = dict[str, Tensor]


class HiddenTokens(Dataset[Batch]):
    """Sequences with HIDDEN tokens hidden, at places that depend on the index alone."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        row = torch.from_numpy(self.rows[index].astype(np.int64))
        places = (torch.arange(HIDDEN) * STRIDE + index) % len(row)
        hidden = row.index_fill(0, places, MASK)
        return {"input_ids": hidden, "places": places, "labels": row[places]}


def scores_of(model: Any, batch: Batch) -> Tensor:
    """Return the model's scores for the hidden tokens: (batch * HIDDEN, vocabulary)."""
    scores: Tensor = model(batch["input_ids"], batch["places"])
    return scores


def loss(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the cross entropy of the hidden tokens, added up, and their number."""
    labels = batch["labels"].flatten()
    return F.cross_entropy(scores_of(model, batch), labels, reduction="sum"), labels.numel()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both sides, AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def make_workload(folder: Path) -> Workload:
    """Return Paceline's side, as a user would declare it."""
    return Workload(
        model=lambda: Bert(BertConfig()),
        loss=loss,
        optimizer=make_optimizer,
        data=lambda: HiddenTokens(folder / "train.npy"),
        batch_size=BATCH,
        steps=10**6,
        seed=SEED,
    )


def make_model() -> Bert:
    """Return the other side's model, with the values that Paceline's starts from."""
    seed_everything(SEED)
    return Bert(BertConfig())


def batches(folder: Path, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Yield the other side's batches without end: a rank's samples of each global batch, in Paceline's order."""
    data = HiddenTokens(folder / "train.npy")
    sampler: Any = _indices(len(data), rank, ranks)
    yield from DataLoader(data, batch_sampler=sampler)


def _indices(num_samples: int, rank: int, ranks: int) -> Iterator[list[int]]:
    order = DataOrder(SEED, num_samples, BATCH)
    for positions in order.batches(0, order.position_after(10**6)):
        yield [order.index(position) for position in share(positions, rank, ranks)]
