"""A transformer that scores chunks, and contracts as tensors. A contract's odds are the sum of its chunks' odds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import solidity
import torch
from contracts import Contract
from torch import Tensor, nn
from torch.nn import functional as F

_ROUND_TO = 16  # chunks of a batch: `tensor` captures the model again for each new shape


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)  # attention doesn't change by it: its gradient is rounding
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        y = self.norm_1(x)
        query, key, value = (
            layer(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_real[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Encoder(nn.Module):
    """A transformer over a chunk's tokens; the mean and the largest of its outputs give one logit.

    tokens: (chunks, length); returns logits (chunks,).
    """

    def __init__(self, length: int, width: int = 64, layers: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(solidity.VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, 1)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        is_real = tokens != solidity.PAD
        x = self.embedding(tokens) + self.places
        for block in self.blocks:
            x = block(x, is_real)
        x = self.norm(x)
        padding = ~is_real[..., None]
        mean = x.masked_fill(padding, 0).sum(1) / is_real.sum(1, keepdim=True).clamp(min=1)
        largest = x.masked_fill(padding, -1e4).amax(1)
        return self.head(torch.cat([mean, largest], 1)).squeeze(1)


def logits_of_contracts(chunks: Tensor, owners: Tensor, number: int) -> Tensor:
    """Return (number,): the logarithm of the summed odds of each contract's chunks, a smooth maximum.

    chunks: logits (chunks,); owners: the contract of each, (chunks,), -1 for padding.
    """
    is_own = owners == torch.arange(number, device=owners.device)[:, None]
    return chunks.expand(number, -1).masked_fill(~is_own, -torch.inf).logsumexp(1)


class Contracts(torch.utils.data.Dataset[dict[str, Any]]):
    """Contracts as chunks of tokens, with a weight in the loss of each model.

    With `most`, a contract shows that many of its chunks, others each time, and `hidden` of their tokens are unknown.
    What is drawn in `[]` depends on the seed and the sample's position alone: the same on any number of ranks.
    """

    def __init__(
        self, rows: Sequence[Contract], weights: Tensor, length: int, most: int | None = None, hidden: float = 0.0
    ) -> None:
        self.weights, self.most, self.hidden = weights, most, hidden
        self.labels = torch.tensor([float(row.is_reentrant) for row in rows])
        self.chunks = [tensor_of(chunks_of(row, length), length) for row in rows]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: int) -> dict[str, Any]:
        chunks = self.chunks[at]
        if self.most is not None and len(chunks) > self.most:
            chunks = chunks[torch.randperm(len(chunks))[: self.most]]
        if self.hidden:
            is_hidden = (torch.rand(chunks.shape) < self.hidden) & (chunks != solidity.PAD)
            chunks = chunks.masked_fill(is_hidden, solidity.UNKNOWN)
        return {"chunks": chunks, "label": self.labels[at], "weights": self.weights[at]}


def chunks_of(row: Contract, length: int) -> list[list[solidity.Token]]:
    """Return a contract's chunks."""
    return solidity.chunks_of(solidity.read_tokens(row.source), length)


def tensor_of(chunks: Sequence[Sequence[solidity.Token]], length: int) -> Tensor:
    """Return (chunks, length): the numbers of the tokens, padded at the end of each chunk."""
    tokens = torch.full((len(chunks), length), solidity.PAD)
    for at, chunk in enumerate(chunks):
        tokens[at, : len(chunk)] = torch.tensor(solidity.encode(chunk))
    return tokens


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Put the chunks of all contracts one after another, with the contract that each is of."""
    chunks = torch.cat([sample["chunks"] for sample in samples])
    owners = torch.repeat_interleave(torch.tensor([len(sample["chunks"]) for sample in samples]))
    more = -len(chunks) % _ROUND_TO
    return {
        # Not PAD: attention over nothing is no number.
        "chunks": F.pad(chunks, (0, 0, 0, more), value=solidity.UNKNOWN),
        "owners": F.pad(owners, (0, more), value=-1),
        "labels": torch.stack([sample["label"] for sample in samples]),
        "weights": torch.stack([sample["weights"] for sample in samples]),
    }


def loss_of(models: Sequence[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over a batch's contracts of the weighted losses of all models, added up."""
    total = 0.0
    for model, weights in zip(models, batch["weights"].unbind(1), strict=True):
        logits = logits_of_contracts(model(batch["chunks"]), batch["owners"], len(weights))
        each = F.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits.dtype), reduction="none")
        total = total + (weights.to(logits.dtype) * each).mean()
    return total


def weights_of(rows: Sequence[Contract], folds: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Return (contracts, models): what a contract counts in each model's loss; nothing in that which it tests.

    Both classes count equally, and a contract of a training set 1 on average. These are numbers of the whole training
    set, not of a batch, so that they are the same however a batch is split.
    """
    labels, fold_of = torch.tensor([row.is_reentrant for row in rows]), torch.tensor(folds)
    weights = torch.zeros(len(rows), len(chosen))
    for column, fold in enumerate(chosen):
        is_train = fold_of != fold
        for kind in (False, True):
            those = is_train & (labels == kind)
            weights[those, column] = float(is_train.sum()) / (2 * float(those.sum()))
    return weights
