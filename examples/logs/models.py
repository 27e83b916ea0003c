"""Sessions as tensors, and the two models: an LSTM for the next key and a transformer that tells anomalies.

Sessions of a batch are padded at their end. What follows a key can't change what the LSTM says about it, attention is
masked, and the loss counts real positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sessions import Data, Session
from torch import Tensor, nn
from torch.nn import functional as F

PAD, START, UNKNOWN, END = range(4)
_FIRST_KEY = 4
_ROUND_TO = 16  # tensor and pipeline capture the model again for each new shape of a batch


class Keys:
    """Numbers keys from 4 on; one that training has not met is UNKNOWN.

    Args:
        rows: the training sessions.
        gram: 1 numbers keys; 3 numbers each three consecutive keys, those that occur in two sessions at least.
    """

    def __init__(self, rows: Sequence[Session], gram: int = 1) -> None:
        self.gram = gram
        counts: dict[Any, int] = {}
        for row in rows:
            for token in {*self.tokens(row)}:
                counts[token] = counts.get(token, 0) + 1
        kept = sorted(token for token, count in counts.items() if count >= (1 if gram == 1 else 2))
        self.number = {token: at for at, token in enumerate(kept, start=_FIRST_KEY)}

    def __len__(self) -> int:
        return _FIRST_KEY + len(self.number)

    def tokens(self, row: Session) -> list[Any]:
        """Return a session's keys, or its different 3-grams in the order in which they first occur."""
        if self.gram == 1:
            return list(row.keys)
        keys = row.keys if len(row.keys) >= self.gram else row.keys * self.gram
        return list(dict.fromkeys(zip(*(keys[at:] for at in range(self.gram)), strict=False)))

    def encode(self, row: Session) -> list[int]:
        """Return the numbers of a session's tokens."""
        return [self.number.get(token, UNKNOWN) for token in self.tokens(row)]


class Sessions(torch.utils.data.Dataset[dict[str, Any]]):
    """Sessions as tensors; of a longer one the first `window` tokens.

    `hidden` is the share of tokens that are replaced by UNKNOWN, others each time. What is drawn in `[]` depends on the
    seed and the sample's position alone, so that it is the same on any number of ranks.
    """

    def __init__(
        self, rows: Sequence[Session], groups: Sequence[int], keys: Keys, window: int, hidden: float = 0.0
    ) -> None:
        self.hidden = hidden
        self.rows = [torch.tensor(keys.encode(row)[:window]) for row in rows]
        self.ends = [len(keys.tokens(row)) <= window for row in rows]
        self.labels = [float(row.is_anomaly) for row in rows]
        self.groups = groups

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        keys = self.rows[at]
        if self.hidden:
            keys = keys.masked_fill(torch.rand(len(keys)) < self.hidden, UNKNOWN)
        return {"keys": keys, "ends": self.ends[at], "label": self.labels[at], "group": self.groups[at]}


def padded(keys: int) -> int:
    """Return the length of a padded batch whose longest session has `keys` keys, and one more for START or END."""
    return -(-(keys + 1) // _ROUND_TO) * _ROUND_TO


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest session and on to a multiple of 16; `targets` are the keys and END, PAD where nothing is."""
    width = padded(max(len(sample["keys"]) for sample in samples))
    inputs = torch.full((len(samples), width), PAD)
    targets = torch.full((len(samples), width), PAD)
    for row, sample in enumerate(samples):
        keys = sample["keys"]
        inputs[row, 0] = START
        inputs[row, 1 : len(keys) + 1] = keys
        targets[row, : len(keys)] = keys
        if sample["ends"]:
            targets[row, len(keys)] = END
    labels = torch.tensor([sample["label"] for sample in samples])
    groups = torch.tensor([sample["group"] for sample in samples])
    return {"inputs": inputs, "targets": targets, "labels": labels, "groups": groups}


class NextKey(nn.Module):
    """DeepLog's LSTM of two layers (Du et al. 2017, CCS), which sees all earlier keys of the session.

    inputs: (batch, length); returns logits (batch, length, keys).
    """

    def __init__(self, keys: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(keys, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, keys)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(inputs))[0])


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=is_real[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Classifier(nn.Module):
    """A transformer over a session's tokens; the mean and the largest of its outputs give one logit.

    A weight for each token, added up, goes to the logit too: what a linear model of the set of tokens has.

    inputs: (batch, length); returns logits (batch,).
    """

    def __init__(self, keys: int, length: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(keys, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, 1)
        self.weight_of_token = nn.Embedding(keys, 1)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.zeros_(self.weight_of_token.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        is_real = inputs != PAD
        x = self.embedding(inputs) + self.positions[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x, is_real)
        x = self.norm(x)
        hidden = ~is_real[..., None]
        mean = x.masked_fill(hidden, 0).sum(1) / is_real.sum(1, keepdim=True)
        largest = x.masked_fill(hidden, -1e4).amax(1)
        linear = self.weight_of_token(inputs).masked_fill(hidden, 0).sum((1, 2))
        return self.head(torch.cat([mean, largest], 1)).squeeze(1) + linear


def next_key_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of the next key, added up over real positions, and their number."""
    targets = batch["targets"]
    logits = model(batch["inputs"])
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
    return total, (targets != PAD).sum()


def anomaly_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Binary cross entropy, added up over sessions, and their number."""
    logits = model(batch["inputs"])
    return F.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), reduction="sum"), len(logits)


def worst_rank(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (batch,): how many keys the model finds likelier than the one that came, where it was most surprised.

    A key that training has not met was not predicted at all: it ranks behind every key.
    """
    came = logits.gather(2, targets.unsqueeze(2))
    ranks = (logits > came).sum(2)
    ranks = ranks.masked_fill(targets == UNKNOWN, logits.shape[2])
    return ranks.masked_fill(targets == PAD, 0).amax(1)


def groups_of(data: Data) -> tuple[list[Session], list[int]]:
    """Return what is evaluated: the threshold's part and the test set, and each session's group."""
    rows = [*data.threshold, *data.test]
    return rows, [2 * (at >= len(data.threshold)) + row.is_anomaly for at, row in enumerate(rows)]
