"""A model as one rank of a mesh holds it: whole, in FSDP2's shards, or in pieces and stages.

`PlacedModel` is what `apply.py` asks of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from paceline.comm.batch_norm import SharedStatistics
from paceline.nouns.placement import Held
from paceline.parallel.local import Moments, forward_backward
from paceline.parallel.replicate import sparse_names

Autocast = Callable[[], AbstractContextManager[Any]]


class PlacedModel(Protocol):
    """One rank's model, and how it runs.

    Attributes:
        model: the person's module; its parameters are what this rank updates, or nothing (on the meta device).
        autocast: the workload's precision, as a context.
        is_plain: nothing is split: gradients may be divided before the backward pass.
        finishes_later: gradients are not final when autograd makes them.
        is_captured: the person's code runs as graphs, without side effects.
        couples_samples: the operation in which samples meet, where that is known.
        counts_loss: whether this rank adds its losses to the sum; of ranks with the same samples one does.
    """

    model: torch.nn.Module
    autocast: Autocast
    is_plain: bool
    finishes_later: bool
    counts_loss: bool
    is_captured: bool
    couples_samples: str

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that this rank's optimizer updates, by name."""

    def sparse(self) -> set[str]:
        """Names of parameters with sparse gradients."""

    def begin_step(self) -> None:
        """Make ready for forward passes."""

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """A backward pass begins."""

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], moments: Moments, longest: int) -> None:
        """Gradients of the loss sums."""

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """`microbatches`, filled up where every rank must run as many."""

    def finish_backward(self) -> None:
        """Gradients become sums over every axis but `replicate`."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step."""

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """Whether this rank counts a parameter's gradient in the norm."""

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """What `score(model, batch)` returns."""

    def held(self) -> dict[str, Held]:
        """What this rank holds of tensors that are not whole everywhere."""

    def close(self) -> None:
        """Let go of the other ranks."""


class EagerModel:
    """Every parameter whole; the person's own code runs."""

    is_plain, finishes_later, counts_loss, is_captured = True, False, True, False
    couples_samples = ""

    def __init__(
        self, model: torch.nn.Module, autocast: Autocast, shared: SharedStatistics | None = None, spare: Any = None
    ) -> None:
        self.model, self.autocast, self.shared, self.spare = model, autocast, shared, spare
        self.parameters = dict(model.named_parameters())

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """All of them."""
        return self.parameters

    def sparse(self) -> set[str]:
        """Those of embeddings made with sparse=True."""
        return sparse_names(self.model)

    def begin_step(self) -> None:
        """Nothing to do."""

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Nothing to do."""

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], moments: Moments, longest: int) -> None:
        """One micro-batch after another."""

        both = self.in_step(microbatches, longest)
        real = iter([True] * len(microbatches))

        def run(batch: Any) -> Any:
            if self.shared is not None:
                self.shared.counts = next(real, False)
            with self.autocast():
                return loss(self.model, batch)

        forward_backward(run, both, moments, len(both) - len(microbatches))

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Every rank goes at its own pace, unless batch norm's statistics wait for all of them."""
        if self.shared is None:
            return list(microbatches)
        self.spare = microbatches[-1] if microbatches else self.spare
        return [*microbatches, *[self.spare] * (longest - len(microbatches))]

    def finish_backward(self) -> None:
        """Nothing to do."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """On the parameters themselves."""
        optimizer.step()

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """All of them."""
        return {}

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """The person's function on the person's model."""
        return score(self.model, batch)

    def held(self) -> dict[str, Held]:
        """Everything is whole everywhere."""
        return {}

    def close(self) -> None:
        """Nothing to do."""
