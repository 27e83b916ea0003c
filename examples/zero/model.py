"""The small model: a decoder over characters in plain PyTorch, with a cache of keys and values for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and two linear layers, each behind a layer norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_linear = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: dict[Any, Any] | None = None) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        heads = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, T, C / heads)
        if cache is not None:
            if self in cache:
                key, value = torch.cat([cache[self][0], key], 2), torch.cat([cache[self][1], value], 2)
            cache[self] = (key, value)
        # One query sees all keys; several are those of a prompt or of training, from the first position on.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_linear(x))))


class Decoder(nn.Module):
    """A GPT: tokens (B, T) to logits (B, T, vocabulary).

    Args:
        vocabulary: how many tokens there are.
        positions: the longest sequence.
        layers, heads, width: its sizes.
    """

    def __init__(self, vocabulary: int, positions: int, layers: int = 3, heads: int = 4, width: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Far larger than GPT-2's 0.02, with which this small model takes five times as many steps.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.5)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, tokens: Tensor, cache: dict[Any, Any] | None = None) -> Tensor:
        """Return the logits of the token after each position; with a cache `tokens` follow those in it."""
        begin = 0
        if cache is not None:
            begin = cache.get("length", 0)
            cache["length"] = begin + tokens.shape[1]
        places = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))
