"""Optimizers in float32 beside a model in half precision, as DeepSpeed (ZeRO-1, 2), apex and InternEvo keep them.

What a rank holds of them: its part of a flat float32 copy and of Adam's two states, its gradients in half precision,
and, while it updates, its gradients in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.nouns.profile import COMMUNICATION, OPTIMIZER
from published.stage import Stage


@dataclass(frozen=True, slots=True)
class Keeping:
    """What an implementation holds.

    Attributes:
        parts: ranks that share the optimizer's state.
        shares_gradients: each keeps its own part of the gradients (ZeRO-2).
        buckets, bucket: so many buffers of so many gradients that are being summed; 0 for none.
        flattens: own gradients are made one tensor before they are widened.
        keeps_wide: whole gradients in float32 stay beside those in half precision.
        widens_for_norm: all gradients are widened at once for their norm.
        plain_update: Adam by plain operations, with temporaries of the state's size; else one fused kernel.
    """

    parts: int = 1
    shares_gradients: bool = False
    buckets: int = 0
    bucket: int = 0
    flattens: bool = True
    keeps_wide: bool = False
    widens_for_norm: bool = False
    plain_update: bool = False


class FlatOptimizer:
    """Float32 state for the trained parameters of a model in half precision.

    Args:
        model: its parameters have their dtype.
        keeping: how.
        made: where.
    """

    def __init__(self, model: nn.Module, keeping: Keeping, made: Stage) -> None:
        self.keeping = keeping
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.count = sum(one.numel() for one in self.trained)
        self.own = -(-self.count // keeping.parts)
        self.states = [torch.empty(self.own, dtype=torch.float32) for _ in range(3)]
        self.averaged: dict[int, Tensor] = {}
        dtype = self.trained[0].dtype
        self.wide = [torch.empty_like(one, dtype=torch.float32) for one in self.trained] if keeping.keeps_wide else []
        self.pending = [
            torch.empty(keeping.bucket, dtype=dtype) for _ in range(keeping.buckets if keeping.bucket else 0)
        ]
        made.note(self.states + self.wide, OPTIMIZER)
        made.note(self.pending, COMMUNICATION)
        if keeping.shares_gradients:
            self.owned = self._owned()
            for one in self.trained:
                one.register_post_accumulate_grad_hook(self._reduced)

    def _owned(self) -> dict[int, int]:
        """Of each parameter, how many numbers are in this rank's part: the first."""
        left, owned = self.own, {}
        for one in self.trained:
            owned[id(one)] = min(left, one.numel())
            left -= owned[id(one)]
        return owned

    def _reduced(self, one: Tensor) -> None:
        """A gradient is there: what other ranks hold of it goes."""
        part = self.owned[id(one)]
        if part and id(one) not in self.averaged:
            assert one.grad is not None
            self.averaged[id(one)] = one.grad.flatten()[:part].clone()
        one.grad = None

    def step(self) -> None:
        """Update, and forget the gradients."""
        gradients = list(self.averaged.values()) or [one.grad.flatten() for one in self.trained if one.grad is not None]
        if self.keeping.widens_for_norm:
            wide = [one.float() for one in gradients]
            del wide
        if self.keeping.flattens:
            flat = torch.cat(gradients)[: self.own]
            self.averaged.clear()
            wide_flat = flat.float()
            del flat
        else:
            wide_flat = torch.empty(0)
        gradients.clear()
        if self.keeping.plain_update:
            root = self.states[2].sqrt()
            root = root / 0.5
            del root
        del wide_flat
        for one in self.trained:
            one.grad = None
