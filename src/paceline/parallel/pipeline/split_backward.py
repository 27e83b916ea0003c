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
    # They are detached in place, which what is a view, or saved for the weights' half, does not survive.
    roots = [root.clone() for root in roots]
    beside = _beside_inputs(roots, inputs, weights)
    if beside:  # no way to them leads past what the inputs wait for
        made = torch.autograd.grad(roots, beside, gradients, retain_graph=True, allow_unused=True)
        for weight, gradient in zip(beside, made, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        apart = {id(weight) for weight in beside}
        weights = [weight for weight in weights if id(weight) not in apart]
    _, groups = torch_halves.stage_backward_input(roots, gradients, inputs, iter(weights))  # type: ignore[arg-type]
    return Halves(weights, groups, roots)


def _beside_inputs(
    roots: list[torch.Tensor], inputs: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Weights that torch's grouping would leave out: none of their operations lies on a way to an input."""
    ends = [torch_halves._get_grad_fn_or_grad_acc(tensor) for tensor in roots]
    edges = torch_halves.construct_reverse_graph([end for end in ends if end is not None])
    starts = [node for tensor in inputs if (node := torch_halves._get_grad_fn_or_grad_acc(tensor)) is not None]
    accumulators = {torch_halves._get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    groups = torch_halves.get_param_groups(starts, [node for node in accumulators if node is not None], edges)
    grouped = {node for group in groups for node in group["params"]}
    return [weight for node, weight in accumulators.items() if node not in grouped]


def backward_of_weights(halves: Halves) -> None:
    """Add the gradients of the weights to their `.grad`."""
    if halves.weights:
        torch_halves.stage_backward_weight(iter(halves.weights), halves.groups)  # type: ignore[arg-type]
