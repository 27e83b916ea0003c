"""nanoGPT's optimizer and schedule, which do not depend on Paceline."""

from __future__ import annotations

import math

import torch


def make_optimizer(model: torch.nn.Module, peak: float) -> torch.optim.Optimizer:
    """AdamW; biases and norms are not decayed."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.99), fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then half a cosine down to a tenth of the peak."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
