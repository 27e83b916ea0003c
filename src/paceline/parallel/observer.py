"""Watch a step from outside, without changing what runs.

A profiler, the planner or a timeline subclasses `StepObserver` and hands it to `Parallel.observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        """Called when one of PHASES begins: `gather` and `forward` once, or only `forward`; `reduce`; `update`.

        In a loop of the user's own: `reduce` and `update` with each of its calls, and `reduce` when the step ends.
        """

    def block_gathered(self, prefix: str, module: torch.nn.Module) -> None:
        """Called in each forward pass when `shard` has gathered a block's parameters.

        Args:
            prefix: the prefix of its parameters' names in the model, such as "layers.0."; "" for the model itself.
            module: the block's module. Parameters of inner blocks may still be sharded.
        """

    def backward_ended(self, model: torch.nn.Module) -> None:
        """Called after each backward pass of a loop of the user's own; gradients may be those of this rank's samples.

        Args:
            model: all of the loop's models, as one module.
        """

    def gradients_reduced(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Called when gradients are those of the global batch's mean loss, before they are clipped.

        Args:
            parameters: the parameters that this rank updates, by name, with gradients in `.grad`.
        """

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Called after the optimizer's step."""

    def host_memory_taken(self, memory: torch.Tensor) -> None:
        """Called when `checkpointing=offload` has taken pinned memory, which it keeps from step to step.

        Args:
            memory: the pinned bytes, on the CPU.
        """

    def activations_copied(self, nbytes: int) -> None:
        """Called when a block's activations are being copied to the host.

        Args:
            nbytes: the number of bytes of all of them.
        """

    def activations_return(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called when a block's activations are being copied back.

        Args:
            tensors: the tensors on the device, flat; their values may not be there yet.
        """


class Observers(StepObserver):
    """Several observers as one, called in the order in which they were added."""

    def __init__(self) -> None:
        self.observers: list[StepObserver] = []


def _handing_on(name: str) -> Callable[..., None]:
    def hand_on(self: Observers, *arguments: Any) -> None:
        for observer in self.observers:
            getattr(observer, name)(*arguments)

    return hand_on


for _name in [name for name in vars(StepObserver) if not name.startswith("_")]:
    setattr(Observers, _name, _handing_on(_name))


class BlocksOf(StepObserver):
    """Names the blocks of one of several models, for an observer, by their names among all.

    Args:
        observer: the observer that is called.
        prefix: the prefix of the model's names.
    """

    def __init__(self, observer: StepObserver, prefix: str) -> None:
        self.observer = observer
        self.prefix = prefix

    def block_gathered(self, prefix: str, module: torch.nn.Module) -> None:
        """Call the observer with the full prefix."""
        self.observer.block_gathered(f"{self.prefix}{prefix}", module)
