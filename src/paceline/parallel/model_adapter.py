"""A model as one rank of a mesh holds it: whole, in FSDP2's shards, or in pieces and stages.

`ModelAdapter` is what `engine/declared.py` asks of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from paceline.comm.batch_norm import SharedForward, SharedStatistics
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.micro_batches import StepHooks, forward_backward
from paceline.parallel.observer import StepObserver
from paceline.parallel.offload_activations import OffloadedActivations
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.replicate.buffers import KeptBuffers
from paceline.parallel.replicate.replicate_strategy import sparse_names

Autocast = Callable[[], AbstractContextManager[Any]]


class ModelAdapter(Protocol):
    """One rank's model, and how it runs.

    Attributes:
        model: the user's module; its parameters are those that this rank updates, or on the meta device.
        autocast: a function that returns the context of the workload's precision.
        finishes_later: whether gradients are not final when autograd makes them.
        is_captured: whether the user's code runs as graphs, without side effects.
        couples_samples: the operation in which samples meet, where that is known.
        written_buffers: the buffers that the forward pass writes into, batch norm's apart, where that is known.
        counts_loss: whether this rank adds its losses to the sum; of ranks with the same samples one does.
    """

    model: torch.nn.Module
    autocast: Autocast
    finishes_later: bool
    counts_loss: bool
    is_captured: bool
    couples_samples: str
    written_buffers: list[str]

    @property
    def notices(self) -> Sequence[str]:
        """Return notices for the user about how the model was placed."""

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Call `observer` in the steps from here on, and read the other ranks' numbers by `peer_values`."""

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the parameters that this rank's optimizer updates, by name."""

    def sparse(self) -> set[str]:
        """Return the names of parameters with sparse gradients."""

    def begin_step(self) -> None:
        """Make ready for forward passes."""

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Prepare for a backward pass."""

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks, longest: int) -> None:
        """Add up the gradients of the loss sums."""

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Return `microbatches`, filled up where every rank must run as many."""

    def finish_backward(self) -> None:
        """Make gradients sums over every axis but `replicate`."""

    def update_whole(self, names: set[str], optimizer: torch.optim.Optimizer) -> None:
        """From now on, have the optimizer update these parameters as a whole, each on one of the ranks that cut it."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step."""

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """Return whether this rank counts each parameter's gradient in the norm; what the mapping lacks counts."""

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """Return the result of `score(model, batch)`."""

    def local_shards(self) -> dict[str, LocalShard]:
        """Return this rank's shards of tensors that are not whole everywhere.

        Under `optimizer/NAME` stands the optimizer's state of a parameter where it is not cut as the parameter is;
        without holders, where only other ranks have it.
        """

    def of_experts(self) -> set[str]:
        """Return the parameters of which each rank of `expert` holds other experts' weights."""

    def take_expert_rows(self) -> dict[str, torch.Tensor]:
        """Return the rows of this rank's tokens for each expert since the last call: one tensor of counts per layer.

        The same layers on every rank, in the same order.
        """

    def close(self) -> None:
        """Let go of the other ranks."""


class OwnCode:
    """A model that runs by the user's own code, one micro-batch after another.

    Attributes:
        keeps_pace: whether every rank must run as many micro-batches as the others.
        shared: the batch norm statistics that the ranks share; None where each has its own.
        spare: a micro-batch for ranks that have none.
        offloaded: the activations that are in the host's memory, under checkpointing=offload.
    """

    counts_loss = True
    is_captured = False
    model: torch.nn.Module
    couples_samples = ""
    notices: Sequence[str] = ()
    written_buffers: list[str] = []  # noqa: RUF012
    keeps_pace: bool
    shared: SharedStatistics | None
    spare: Any
    autocast: Autocast
    offloaded: OffloadedActivations | None = None

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Have `observer` told of activations that leave; what the strategies around the model do is watched there."""
        if self.offloaded is not None:
            self.offloaded.observer = observer

    def call(self, function: Any, batch: Any) -> Any:
        """Call `function(model, batch)`."""
        raise NotImplementedError

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks, longest: int) -> None:
        """Run this rank's micro-batches, and what fills them up."""
        filled_up = self.in_step(microbatches, longest)
        # The loss is called in the order of `filled_up`: the real ones first.
        real = iter([True] * len(microbatches))

        def run(batch: Any) -> Any:
            counts = next(real, False)
            if self.shared is not None:
                self.shared.counts = counts
            context: AbstractContextManager[Any] = nullcontext() if counts else self._without_traces()
            with context, self.autocast():
                return self.call(loss, batch)

        forward_backward(run, filled_up, hooks, len(filled_up) - len(microbatches))

    @contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Keep the buffers and the random generators: one process has no micro-batch that fills up."""
        devices = {parameter.device for parameter in self.model.parameters() if parameter.is_cuda}
        with KeptBuffers(self.written_alone()), torch.random.fork_rng(devices=list(devices)):
            yield

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Return `microbatches`; where ranks keep pace, with the last one again, or the example, up to the longest."""
        if not self.keeps_pace:
            return list(microbatches)
        if microbatches:
            self.spare = microbatches[-1]
        return [*microbatches, *[self.spare] * (longest - len(microbatches))]

    def take_expert_rows(self) -> dict[str, torch.Tensor]:
        """Return nothing: experts are spread where the model runs as graphs."""
        return {}

    def written_alone(self) -> list[torch.nn.Module]:
        """Return the modules that would write a micro-batch's values into their buffers though it does not count.

        Shared batch norms write the other ranks' values.
        """
        return [module for module in self.model.modules() if not isinstance(module.forward, SharedForward)]


class EagerAdapter(OwnCode):
    """A model of which this rank has every parameter whole."""

    finishes_later = False

    def __init__(
        self, model: torch.nn.Module, autocast: Autocast, shared: SharedStatistics | None = None, spare: Any = None
    ) -> None:
        self.model = model
        self.autocast = autocast
        self.shared = shared
        self.spare = spare
        self.keeps_pace = shared is not None  # batch norm's statistics wait for all ranks
        self.parameters = dict(model.named_parameters())

    def call(self, function: Any, batch: Any) -> Any:
        """Call the user's function on the user's model."""
        return function(self.model, batch)

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """Return all parameters."""
        return self.parameters

    def sparse(self) -> set[str]:
        """Return the weights of embeddings made with sparse=True."""
        return sparse_names(self.model)

    def begin_step(self) -> None:
        """Do nothing."""

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Do nothing."""

    def finish_backward(self) -> None:
        """Do nothing."""

    def update_whole(self, names: set[str], optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: all parameters are whole."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on the parameters themselves."""
        optimizer.step()

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """Return nothing: all parameters are counted."""
        return {}

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """Call the user's function on the user's model."""
        return score(self.model, batch)

    def local_shards(self) -> dict[str, LocalShard]:
        """Return nothing: everything is whole everywhere."""
        return {}

    def of_experts(self) -> set[str]:
        """Return none: experts are spread where the model runs as graphs."""
        return set()

    def close(self) -> None:
        """Do nothing."""
