"""What both sides of `bench strategies` train: the demo's BERT on made-up tokens, the same batches in the same order.

The demo draws which tokens it hides, and picks them by a mask: how many there are depends on values, so no graph of
fixed shapes can be captured of it. Here every sequence hides as many, named by position, as Google's original does.
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
from paceline.nouns.order import DataOrder, share
from paceline.nouns.workload import Workload
from paceline.train.seed import seed_everything

BATCH, MICRO_BATCHES, SEED = 16, 4, 0  # samples of a step over all ranks; pieces of it in a pipeline
HIDDEN, STRIDE = 10, 6  # tokens hidden of a sequence, and how far apart

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
        return {"input_ids": row.index_fill(0, places, MASK), "places": places, "labels": row[places]}


def scores_of(model: Any, batch: Batch) -> Tensor:
    """The model's scores for the hidden tokens: (batch * HIDDEN, vocabulary)."""
    rows = torch.arange(len(batch["places"]), device=batch["places"].device)[:, None]
    scores: Tensor = model(batch["input_ids"], (rows, batch["places"]))
    return scores.flatten(0, 1)


def loss(model: torch.nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Cross entropy of the hidden tokens, added up, and how many there are."""
    labels = batch["labels"].flatten()
    return F.cross_entropy(scores_of(model, batch), labels, reduction="sum"), labels.numel()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch has it by default."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def make_workload(folder: Path) -> Workload:
    """Paceline's side: as a person would declare it."""
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
    """The other side's model, with the values that Paceline's starts from."""
    seed_everything(SEED)
    return Bert(BertConfig())


def batches(folder: Path, part: int = 0, parts: int = 1) -> Iterator[Batch]:
    """The other side's data: a part's samples of every global batch, without end, in Paceline's order."""
    data = HiddenTokens(folder / "train.npy")
    order = DataOrder(SEED, len(data), BATCH)
    positions = order.batches(0, order.position_after(10**6))
    indices: Any = ([order.index(at) for at in share(batch, part, parts)] for batch in positions)
    yield from DataLoader(data, batch_sampler=indices)
