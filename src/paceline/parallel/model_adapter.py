"""A model as one rank of a mesh holds it: whole, in FSDP2's shards, or in pieces and stages.

`ModelAdapter` is what `apply.py` asks of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from paceline.comm.batch_norm import SharedForward, SharedStatistics
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.micro_batches import StepHooks, forward_backward
from paceline.parallel.replicate.buffers import KeptBuffers
from paceline.parallel.replicate.strategy import sparse_names

Autocast = Callable[[], AbstractContextManager[Any]]


class ModelAdapter(Protocol):
    """One rank's model, and how it runs.

    Attributes:
        model: the person's module; its parameters are what this rank updates, or nothing (on the meta device).
        autocast: the workload's precision, as a context.
        is_plain: nothing is split: gradients may be divided before the backward pass.
        finishes_later: gradients are not final when autograd makes them.
        is_captured: the person's code runs as graphs, without side effects.
        couples_samples: the operation in which samples meet, where that is known.
        notices: what the person should know of how the model was placed.
        written_buffers: what the forward pass writes into beside batch norm's statistics, where that is known.
        counts_loss: whether this rank adds its losses to the sum; of ranks with the same samples one does.
    """

    model: torch.nn.Module
    autocast: Autocast
    is_plain: bool
    finishes_later: bool
    counts_loss: bool
    is_captured: bool
    couples_samples: str
    notices: Sequence[str]
    written_buffers: list[str]

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that this rank's optimizer updates, by name."""

    def sparse(self) -> set[str]:
        """Names of parameters with sparse gradients."""

    def begin_step(self) -> None:
        """Make ready for forward passes."""

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """A backward pass begins."""

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks, longest: int) -> None:
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

    def held(self) -> dict[str, LocalShard]:
        """What this rank holds of tensors that are not whole everywhere."""

    def close(self) -> None:
        """Let go of the other ranks."""


class OwnCode:
    """A model that runs by the person's own code, one micro-batch after another.

    Attributes:
        keeps_pace: every rank must run as many micro-batches as the others.
        shared: batch norm's statistics over the ranks.
        spare: a micro-batch for ranks that have none.
    """

    counts_loss, is_captured = True, False
    model: torch.nn.Module
    couples_samples = ""
    notices: Sequence[str] = ()
    written_buffers: list[str] = []  # noqa: RUF012
    keeps_pace: bool
    shared: SharedStatistics | None
    spare: Any
    autocast: Autocast

    def call(self, function: Any, batch: Any) -> Any:
        """`function(model, batch)`."""
        raise NotImplementedError

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks, longest: int) -> None:
        """This rank's micro-batches, and what fills them up."""
        both = self.in_step(microbatches, longest)
        real = iter([True] * len(microbatches))

        def run(batch: Any) -> Any:
            counts = next(real, False)
            if self.shared is not None:
                self.shared.counts = counts
            with nullcontext() if counts else KeptBuffers(self._written_alone()), self.autocast():
                return self.call(loss, batch)

        forward_backward(run, both, hooks, len(both) - len(microbatches))

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """With the last micro-batch again, or the example, where ranks keep pace."""
        if not self.keeps_pace:
            return list(microbatches)
        self.spare = microbatches[-1] if microbatches else self.spare
        return [*microbatches, *[self.spare] * (longest - len(microbatches))]

    def _written_alone(self) -> list[torch.nn.Module]:
        """The modules that would write a micro-batch's values into their buffers though it does not count.

        Shared batch norms write the other ranks' values.
        """
        return [module for module in self.model.modules() if not isinstance(module.forward, SharedForward)]


class EagerAdapter(OwnCode):
    """Every parameter whole."""

    is_plain, finishes_later = True, False

    def __init__(
        self, model: torch.nn.Module, autocast: Autocast, shared: SharedStatistics | None = None, spare: Any = None
    ) -> None:
        self.model, self.autocast, self.shared, self.spare = model, autocast, shared, spare
        self.keeps_pace = shared is not None  # batch norm's statistics wait for all ranks
        self.parameters = dict(model.named_parameters())

    def call(self, function: Any, batch: Any) -> Any:
        """The person's function on the person's model."""
        return function(self.model, batch)

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

    def held(self) -> dict[str, LocalShard]:
        """Everything is whole everywhere."""
        return {}

    def close(self) -> None:
        """Nothing to do."""
