"""Follow a simulated step: name what it allocates, and answer for ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from paceline.comm.dtensor_parts import is_part
from paceline.comm.host_copy import HostCopy
from paceline.comm.reducer import Reducer
from paceline.nouns.profile import ACTIVATIONS, BUFFERS, COMMUNICATION, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS
from paceline.parallel.low_precision_states import memory_of
from paceline.parallel.observer import StepObserver
from paceline.parallel.optimizer_parts import state_of
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.replicate.replicate_strategy import Replicate
from paceline.parallel.shard.grad_usage import GradUsage
from paceline.parallel.step_stats import StepStats, StepStatsReducer
from paceline.profile.allocation_trace import Allocations
from paceline.profile.simulate_offload import HostMemory
from paceline.torch_private.tensors import tree_iter

Parameters = Mapping[str, torch.nn.Parameter]


class MemoryObserver(StepObserver):
    """Tells the recorder the phases of a step, and names tensors as soon as they can be told from temporaries.

    Args:
        recorder: the recorder of the step's allocations.
        host: the record of host memory under offload=on or checkpointing=offload, if that is simulated.
    """

    def __init__(self, recorder: Allocations, host: HostMemory | None) -> None:
        self.recorder = recorder
        self.host = host

    def phase_begins(self, phase: str) -> None:
        """Enter the phase."""
        self.recorder.phase = phase

    def block_gathered(self, prefix: str, module: torch.nn.Module) -> None:
        """Name FSDP2's full parameters, which are allocated and freed in every step."""
        full = []
        for name, parameter in module.named_parameters():
            if not is_part(parameter):
                full.append((f"{prefix}{name}", parameter))
        self.recorder.record_all(full, GATHERED)

    def gradients_reduced(self, parameters: Parameters) -> None:
        """Name the gradients: fresh ones can't be told from temporaries before."""
        self.recorder.record_all(_gradients(parameters), GRADIENTS)
        if self.host is not None:
            self.host.record(gradient for _, gradient in _gradients(parameters))

    def parameters_updated(self, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        """Name the optimizer's states, which its first step makes."""
        self.recorder.record_all(states_of(parameters, optimizer), OPTIMIZER)

    def host_memory_taken(self, memory: torch.Tensor) -> None:
        """Record that the memory is the host's."""
        if self.host is not None:
            self.host.record_pinned(memory)

    def activations_copied(self, nbytes: int) -> None:
        """Count the bytes."""
        if self.host is not None:
            self.host.copied_bytes += nbytes

    def activations_return(self, tensors: Sequence[torch.Tensor]) -> None:
        """Count the bytes, and name the memory: a backward pass made it, and it is none of its temporaries."""
        for tensor in tensors:
            self.recorder.record(tensor, ACTIVATIONS)
            if self.host is not None:
                self.host.copied_bytes += tensor.nbytes


class AbsentPeers(PeerValues):
    """Says that all is well, and that the other ranks did what this one does: otherwise a step would raise.

    Args:
        ranks: the number of ranks that take the step together.
        sums_on_cpu: False if a GPU's step is simulated.
    """

    are_there = False

    def __init__(self, ranks: int, sums_on_cpu: bool) -> None:
        self.ranks = ranks
        self.sums_on_cpu = sums_on_cpu

    def step_stats(self, stats: StepStatsReducer, changed: Sequence[bool]) -> StepStats:
        """Return a finite loss, and every change of a buffer as made by all ranks."""
        ranks_changed = [self.ranks if is_changed else 0 for is_changed in changed]
        return StepStats(1.0, 1.0, False, [], ranks_changed)

    def has_overflown(self, flag: torch.Tensor) -> bool:
        """Return False: the gradients have no values."""
        return False

    def norm(self, copy: HostCopy) -> float:
        """Return a finite norm."""
        return 1.0

    def unused(self, usage: GradUsage) -> list[str]:
        """Send what `GradUsage.find_unused` sends, and return this rank's own answer."""
        usage.comm.all_reduce(torch.zeros(len(usage.used) + 1 + usage.comm.size, dtype=torch.int64))
        return [name for name, is_used in usage.used.items() if not is_used]


def _gradients(parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            yield name, parameter.grad


def states_of(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the optimizer's tensors for each parameter, by the parameter's name."""
    for name, parameter in parameters.items():
        for value in tree_iter(state_of(optimizer, parameter)):
            if isinstance(value, torch.Tensor):
                for tensor in memory_of(value):
                    yield name, tensor


def reducers_of(replicates: Iterable[Replicate]) -> list[Reducer]:
    """Return the reducers that sum the buckets of gradients."""
    reducers = []
    for replicate in replicates:
        reducers += [bucket.reducer for bucket in replicate.buckets]
    return reducers


def name_what_stays(recorder: Allocations, model: torch.nn.Module, reducers: Iterable[Reducer]) -> None:
    """Name what is there between steps: parameters, buffers, and the memory of reducers."""
    recorder.record_all(model.named_parameters(), PARAMETERS)
    recorder.record_all(model.named_buffers(), BUFFERS)
    for reducer in reducers:
        for buffer in (*reducer.inboxes, reducer.outbox):
            recorder.record_all([("gradient buckets", buffer)], COMMUNICATION)
