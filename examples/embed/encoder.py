"""A sentence's embedding: a weighted mean of its features' vectors, and a layer on it."""

from __future__ import annotations

import torch
from sentences import BUCKETS
from torch import nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """Features (batch, LENGTH) to unit vectors (batch, width).

    Without training the layer adds nothing, features weigh what they are rare, and their vectors are nearly orthogonal,
    so the cosine is that of words in common. The training begins there.
    """

    def __init__(self, width: int, rarity: torch.Tensor | None = None) -> None:
        super().__init__()
        self.vectors = nn.Embedding(BUCKETS, width)
        # Small, as Adam's steps are of one size: with 1 they would move a vector by too little.
        nn.init.normal_(self.vectors.weight, std=0.1)
        self.weights = nn.Embedding(BUCKETS, 1)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        if rarity is not None:
            self.weights.weight.data[:, 0] = rarity.to(self.weights.weight.dtype)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        shares = self.weights(features).squeeze(-1).masked_fill(features == 0, -torch.inf).softmax(-1)
        mean = (shares[..., None] * self.vectors(features)).sum(-2)
        return F.normalize(mean + self.down(F.gelu(self.up(F.normalize(mean, dim=-1)))), dim=-1)
