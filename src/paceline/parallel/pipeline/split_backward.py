"""The backward pass in two halves, for zero-bubble schedules: inputs first, weights later (Qi et al. 2024).

torch.distributed.pipelining takes the autograd graph apart for its own schedules, by the functions called here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from paceline.torch_private import pipelining


@dataclass(slots=True)
class Halves:
    """The result of the first half of a backward pass, which the second starts from."""

    weights: list[torch.Tensor]
    groups: list[dict[str, Any]]
    roots: list[torch.Tensor]


def backward_of_inputs(
    roots: list[torch.Tensor], gradients: list[torch.Tensor], inputs: list[torch.Tensor], states: list[torch.Tensor]
) -> Halves:
    """Put the gradients of a stage's inputs into their `.grad`; those of its weights wait for `backward_of_weights`."""
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
        beside_gradients = torch.autograd.grad(roots, beside, gradients, retain_graph=True, allow_unused=True)
        for weight, gradient in zip(beside, beside_gradients, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        done_ids = {id(weight) for weight in beside}
        weights = [weight for weight in weights if id(weight) not in done_ids]
    # It leaves the inputs' gradients in `.grad`; `groups` is what the weights' half starts from.
    _, groups = pipelining.stage_backward_input(roots, gradients, inputs, iter(weights))  # type: ignore[arg-type]
    return Halves(weights, groups, roots)


def _beside_inputs(
    roots: list[torch.Tensor], inputs: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return weights that torch's grouping would leave out: none of their operations lies on a way to an input."""
    edges = pipelining.construct_reverse_graph(_autograd_nodes(roots))
    accumulators = {get_gradient_edge(weight).node: weight for weight in weights}
    grouped = set()
    for group in pipelining.get_param_groups(_autograd_nodes(inputs), list(accumulators), edges):
        grouped.update(group["params"])
    return [weight for node, weight in accumulators.items() if node not in grouped]


def _autograd_nodes(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the autograd nodes that the tensors come from, those without one left out."""
    return [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]


def backward_of_weights(halves: Halves) -> None:
    """Add the gradients of the weights to their `.grad`."""
    if halves.weights:
        pipelining.stage_backward_weight(iter(halves.weights), halves.groups)  # type: ignore[arg-type]
