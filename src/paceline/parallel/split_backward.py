"""The backward pass in two halves, for zero-bubble schedules: inputs first, weights later (Qi et al. 2024).

torch.distributed.pipelining takes the autograd graph apart for its own schedules; its two functions are private, so
they are called here alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import _backward as torch_halves  # noqa: TID251


@dataclass(slots=True)
class Halves:
    """What the second half needs."""

    weights: list[torch.Tensor]
    groups: list[dict[str, Any]]
    roots: list[torch.Tensor]


def backward_of_inputs(
    roots: list[torch.Tensor], gradients: list[torch.Tensor], inputs: list[torch.Tensor], states: list[torch.Tensor]
) -> Halves:
    """Gradients of a stage's inputs, into their `.grad`; those of its weights wait for `backward_of_weights`."""
    weights = [state for state in states if state.requires_grad]
    if not roots:
        return Halves([], [], [])
    if not inputs or not weights:  # the first stage: nobody waits for its inputs
        torch.autograd.backward(roots, gradients)
        return Halves([], [], [])
    roots = [root.clone() if root._is_view() else root for root in roots]  # torch cuts them off, in place
    _, groups = torch_halves.stage_backward_input(roots, gradients, inputs, iter(weights))
    return Halves(weights, groups, roots)


def backward_of_weights(halves: Halves) -> None:
    """Add the gradients of the weights to their `.grad`."""
    if halves.weights:
        torch_halves.stage_backward_weight(iter(halves.weights), halves.groups)
