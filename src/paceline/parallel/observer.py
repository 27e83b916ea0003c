"""Watch a step from outside, without changing what runs.

A profiler, the planner or a timeline subclasses `StepObserver` and hands it to `Parallel.observe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

GATHER = "gather"
FORWARD = "forward"  # forward and backward passes
REDUCE = "reduce"
UPDATE = "update"
PHASES = (GATHER, FORWARD, REDUCE, UPDATE)


class StepObserver:
    """Follows the steps of one rank. Every method does nothing here: override those that matter.

    The methods run inside the step, in the thread that trains: they must not change tensors, and must not begin
    collectives. An error in one ends the step.
    """

    def phase_begins(self, phase: str) -> None:
        """Called when one of PHASES begins: `gather` and `forward` once, or `forward` alone; `reduce`; `update`."""

    def block_gathered(self, prefix: str, module: torch.nn.Module) -> None:
        """Called in each forward pass when `shard` has gathered a block's parameters.

        Args:
            prefix: of the names of its parameters in the model, such as "layers.0."; "" for the model itself.
            module: the block. Parameters of inner blocks may still be sharded.
        """

    def gradients_reduced(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Called when gradients are those of the global batch's mean loss, before they are clipped.

        Args:
            parameters: what this rank updates, by name, with gradients in `.grad`.
        """

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Called after the optimizer's step."""

    def host_memory_taken(self, memory: torch.Tensor) -> None:
        """Called when `checkpointing=offload` has taken pinned memory, which it keeps from step to step.

        Args:
            memory: bytes, on the CPU.
        """

    def activations_copied(self, nbytes: int) -> None:
        """Called when a block's activations are being copied to the host.

        Args:
            nbytes: of all of them.
        """

    def activations_return(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when a block's activations are being copied back.

        Args:
            tensors: on the device, flat; their values may not be there yet.
        """


class Observers(StepObserver):
    """Several observers as one, called in the order in which they were added."""

    def __init__(self) -> None:
        self.observers: list[StepObserver] = []

    def phase_begins(self, phase: str) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.phase_begins(phase)

    def block_gathered(self, prefix: str, module: torch.nn.Module) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.block_gathered(prefix, module)

    def gradients_reduced(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.gradients_reduced(parameters)

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.parameters_updated(parameters, optimizer)

    def host_memory_taken(self, memory: torch.Tensor) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.host_memory_taken(memory)

    def activations_copied(self, nbytes: int) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.activations_copied(nbytes)

    def activations_return(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand it on."""
        for observer in self.observers:
            observer.activations_return(tensors)
