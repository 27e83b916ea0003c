"""The model's parts: a tower for pictures, a tower for captions, and the temperature."""

from __future__ import annotations

import math

import captions
import torch
from pictures import CANVAS
from torch import nn
from torch.nn import functional as F


class ImageTower(nn.Module):
    """Three convolutions with stride 2 and two linear layers: a picture (1, 32, 32) to a unit vector."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.hidden = nn.Linear(4 * width * (CANVAS // 8) ** 2, 4 * embedding)
        self.out = nn.Linear(4 * embedding, embedding)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        features = self.convolutions(pictures).flatten(1)
        return F.normalize(self.out(F.gelu(self.hidden(features))), dim=1)


class TextTower(nn.Module):
    """A transformer block over the tokens: a caption to a unit vector."""

    HEADS = 4

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.words = nn.Embedding(captions.VOCABULARY, width)
        self.places = nn.Embedding(captions.LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.out = nn.Linear(width, embedding)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight
        is_word = tokens != 0
        heads = self.attention_in(self.norm(x)).unflatten(-1, (3, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=is_word[:, None, None, :])
        x = x + self.attention_out(seen.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second_norm(x))))
        mean = (x * is_word[..., None]).sum(1) / is_word.sum(1, keepdim=True)
        return F.normalize(self.out(mean), dim=1)


class Temperature(nn.Module):
    """What similarities are divided by. It is learned as the logarithm of 1 / temperature, as CLIP's."""

    LEAST = 0.01  # as in CLIP: the training is unstable below

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([-math.log(initial)]))

    def forward(self, similarities: torch.Tensor) -> torch.Tensor:
        return similarities * self.log_scale.clamp(max=-math.log(self.LEAST)).exp()
