"""What is known of the gradients of a loop whose pieces are called one by one: by whom they were made, and changed.

One object for each parameter: a tensor as the key of a dictionary is hashed by Python code, which a step of many
parameters would spend most of its host time on.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from paceline.comm.fully_shard import local


@dataclass(slots=True, eq=False)
class KnownGradient:
    """A parameter of the loop's optimizers, and what is known of its gradient.

    Attributes:
        noted: the gradient that the last backward pass left.
        version, part_version: of it, and of this rank's part of it, when it was noted.
        norm: of a part's, where torch's foreach functions change it without a new version.
        summed: the gradient, where it is a sum over the ranks, the same on all of them.
        is_unsummed: the parameter was trained in a backward pass whose gradients are not summed yet: it may have been
            frozen since.
    """

    parameter: torch.nn.Parameter
    name: str
    noted: weakref.ref[torch.Tensor] | None = None
    version: int = 0
    part_version: int = 0
    norm: torch.Tensor | None = None
    summed: torch.Tensor | None = None
    is_unsummed: bool = False

    def note(self, gradient: torch.Tensor, has_norm: bool = False) -> None:
        """Note the gradient as it is now; with its norm where its version is not enough."""
        self.noted = weakref.ref(gradient)
        self.version = gradient._version
        if type(gradient) is not torch.Tensor:
            self.part_version = local(gradient)._version
        self.norm = local(gradient).norm() if has_norm else None

    def is_noted(self, gradient: torch.Tensor) -> bool:
        """Return True if the parameter's gradient is the noted one, with the same values."""
        if self.noted is None or self.noted() is not gradient:
            return False
        if self.version != gradient._version:
            return False
        if type(gradient) is not torch.Tensor and self.part_version != local(gradient)._version:
            return False
        return self.norm is None or torch.equal(self.norm, local(gradient).norm())
