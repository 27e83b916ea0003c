"""Experts in a loop over those that are chosen, which no graph of operations has."""

from __future__ import annotations

import torch
from torch import nn


class LoopedExperts(nn.Module):
    """A router with one choice for each row, and experts of one layer, as transformers' Switch has them."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        made = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            (where,) = torch.where(chosen == expert)
            made.index_add_(0, where, self.experts[expert](rows[where]) * weights[where, None])
        return made.view_as(x)
