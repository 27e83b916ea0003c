"""Optimizers that look beyond an element, as people write them, and a small model for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline


class Lamb(torch.optim.Optimizer):
    """LAMB, You et al. 2019, algorithm 2, with the identity as its phi: each parameter is a layer."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(parameter.grad, 1 - first)
        state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
        mean = state["exp_avg"] / (1 - first ** state["step"])
        variance = state["exp_avg_sq"] / (1 - second ** state["step"])
        update = mean / (variance.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        length, update_length = parameter.norm(), update.norm()
        ratio = length / update_length if length > 0 and update_length > 0 else 1.0
        parameter -= group["lr"] * ratio * update


class MuonAdamW(torch.optim.Muon):
    """Muon for matrices, AdamW for all others."""

    needs_whole_parameters = True

    def __init__(self, model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__([parameter for parameter in trained if parameter.dim() == 2], lr=0.01)
        self.others = torch.optim.AdamW([parameter for parameter in trained if parameter.dim() != 2], lr=0.01)

    def step(self, closure=None):
        super().step()
        self.others.step()


class GlobalStep(torch.optim.Optimizer):
    """Its steps are as long as the norm over all parameters."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter -= self.param_groups[0]["lr"] * parameter.grad / length


class CountsInGroups(torch.optim.Optimizer):
    """Its steps get shorter with what it counts in groups, but for empty ones; they are as long as the parameter."""

    def __init__(self, params, lr=1e-1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        one = torch.ones((), device=self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                if parameter.grad is not None:
                    self.state[parameter]["sum"] += parameter.grad
                    ratio = parameter.norm() / self.state[parameter]["sum"].norm()
                    parameter -= one * group["lr"] / group["step"] * ratio * self.state[parameter]["sum"]


OPTIMIZERS = {
    "lamb": lambda model: Lamb(model.parameters()),
    "muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01),
    "muon and adamw": MuonAdamW,
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


def muon_and_adamw(model):
    """Return two, of which each has parameters of its own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() == 2]
    others = [parameter for parameter in trained if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


WORDS, WIDTH, INNER = 97, 32, 67


class Small(nn.Module):
    """Matrices and vectors whose sizes don't divide, tied weights, a frozen matrix, a row, and a scalar."""

    def __init__(self, words: int = WORDS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.first = nn.Linear(width, inner)
        self.second = nn.Linear(inner, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.row = nn.Parameter(torch.full((1, width), 0.5))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.back = nn.Linear(width, words, bias=False)
        self.back.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        hidden = hidden + self.second(torch.tanh(self.first(hidden)))
        hidden = self.norm(hidden + self.frozen(hidden)) * self.row
        return self.back(hidden) * self.gain


def loss(model: Any, batch: Any) -> Any:
    scores = model(batch["ids"])
    labels = batch["labels"].reshape(-1)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels, reduction="sum"), labels.numel()


def data() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(24):
        ids = torch.randint(0, WORDS, (6,), generator=random)
        rows.append({"ids": ids, "labels": torch.randint(0, WORDS, (6,), generator=random)})
    return rows


def workload(kind: str, **parts: Any) -> paceline.Workload:
    """Five steps in float64, with clipping; `kind` is one of OPTIMIZERS, or "list"."""
    usual = {
        "model": Small,
        "loss": loss,
        "optimizer": muon_and_adamw if kind == "list" else OPTIMIZERS[kind],
        "data": data(),
        "batch_size": 8,
        "steps": 5,
        "precision": "float64",
        "clip_norm": 0.5,
    }
    return paceline.Workload(**{**usual, **parts})
