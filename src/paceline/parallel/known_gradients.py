"""What is known of the gradients of a loop whose pieces are called one by one: by whom they were made, and changed.

One object for each parameter: a tensor as the key of a dictionary is hashed by Python code, which a step of many
parameters would spend most of its host time on.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.comm.fully_shard import local

if TYPE_CHECKING:
    from paceline.parallel.replicate.early import EarlySums


class NotedGradient(NamedTuple):
    """A gradient, as a backward pass left it."""

    gradient: weakref.ref[torch.Tensor]
    version: tuple[int, int]
    norm: torch.Tensor | None  # of a part's, where torch's foreach functions change it without a new version

    @classmethod
    def of(cls, gradient: torch.Tensor, has_norm: bool = False) -> NotedGradient:
        """Note a gradient; with its norm where its version is not enough."""
        norm = local(gradient).norm() if has_norm else None
        return cls(weakref.ref(gradient), _version(gradient), norm)

    def is_unchanged(self, gradient: torch.Tensor) -> bool:
        """Return True if the parameter's gradient is this one, with the same values."""
        if self.gradient() is not gradient or self.version != _version(gradient):
            return False
        return self.norm is None or torch.equal(self.norm, local(gradient).norm())


@dataclass(slots=True, eq=False)
class KnownGradient:
    """A parameter of the loop's optimizers, and what is known of its gradient.

    Attributes:
        noted: the gradient, as the last backward pass left it.
        summed: the gradient, where it is a sum over the ranks, the same on all of them.
        is_unsummed: the parameter was trained in a backward pass whose gradients are not summed yet: it may have been
            frozen since.
        early: while a backward pass begins sums, whose bucket the gradient fills, and its number.
    """

    parameter: torch.nn.Parameter
    name: str
    noted: NotedGradient | None = None
    summed: torch.Tensor | None = None
    is_unsummed: bool = False
    early: tuple[EarlySums, int] | None = None


def _version(gradient: torch.Tensor) -> tuple[int, int]:
    version = gradient._version
    if type(gradient) is torch.Tensor:
        return version, version
    return version, local(gradient)._version
