"""The few numbers that every rank must agree on in each step, added up by one small all_reduce.

It starts after the last forward pass and runs under the backward pass, so it costs no time of its own. On a GPU the
host reads it before the update without waiting for the backward pass: all that the host decides by it (to stop at a
loss that is not finite, before anything is changed) is known when the forward passes are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.host_copy import HostCopy
from paceline.comm.reducer import Reducer, message_reducer
from paceline.comm.shared_memory import SharedMemory
from paceline.parallel.engine.agreement import write_numbers

# Places in the message; a number per rank and then one per buffer follow.
_LOSS = 0
_WEIGHT = 1
_STOP = 2
_FIRST_RANK = 3


@dataclass(frozen=True, slots=True)
class StepStats:
    """The numbers that all ranks know after a step's forward passes."""

    loss: float  # summed over the global batch
    weight: float  # what the mean is divided by
    is_stopping: bool  # some rank was asked to stop
    bad_ranks: list[int]  # ranks whose loss is not finite
    changed: list[int]  # for each buffer: the sum over the ranks of what `Buffers.find_changed` returned

    @property
    def mean(self) -> float:
        """Return the loss of the global batch."""
        return self.loss / self.weight


class StepStatsReducer:
    """Collects this rank's numbers, sends them, and reads the sums.

    Args:
        comm: the axis to sum over.
        shared: the memory that the ranks share; None where there is none.
        counts: whether this rank adds losses and weights; others take part with zeros.
        buffers: the number of the model's buffers.
        device: the device of the losses.
    """

    def __init__(
        self, comm: AxisComm, shared: SharedMemory | None, buffers: int, device: torch.device, counts: bool = True
    ) -> None:
        self.comm = comm
        self.buffers = buffers
        self.counts = counts
        self.scale: torch.Tensor | None = None
        # float64 adds up whole numbers exactly up to 2**53: flags of buffers are sums of 2**20 and 1 over the ranks.
        length = _FIRST_RANK + comm.size + buffers
        self.own_numbers = torch.zeros(length, dtype=torch.float64, device=device)
        self.reducer = message_reducer(comm, shared, length, device) if comm.size > 1 else None
        self.sums = self.own_numbers if self.reducer is None else self.reducer.outbox
        self.copy = None if device.type == "cpu" else HostCopy(length, torch.float64, device)

    @property
    def reducers(self) -> list[Reducer]:
        """Return the reducers of the numbers."""
        return [] if self.reducer is None else [self.reducer]

    def clear(self) -> None:
        """Begin a step with nothing."""
        self.own_numbers.zero_()
        self.scale = None

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add one micro-batch's loss sum and weight, without waiting for the device.

        Of the ranks that see the same samples only one counts them.
        """
        if self.counts:
            self.own_numbers[_LOSS] += loss
            self.own_numbers[_WEIGHT] += weight
        # A place per rank: the sum names the ranks. Stays on the device, as `loss` does: nobody waits here.
        self.own_numbers[_FIRST_RANK + self.comm.rank] += ~torch.isfinite(loss)

    def own_weight(self) -> torch.Tensor:
        """Return the weight of this rank's micro-batches so far, a scalar."""
        return self.own_numbers[_WEIGHT]

    def begin(self, is_stopping: bool, changed: Sequence[int]) -> None:
        """Send this rank's numbers; all its forward passes are done."""
        # On a GPU neither waits for the device, as an assignment of a number or of memory that is not pinned does.
        self.own_numbers[_STOP].fill_(is_stopping)
        if any(changed):
            write_numbers(self.own_numbers[_FIRST_RANK + self.comm.size :], changed)
        if self.reducer is not None:
            self.reducer.inboxes[self.reducer.turn].copy_(self.own_numbers)
            self.reducer.begin()
        if self.copy is not None:
            self.copy.begin(self._finished)

    def _finished(self) -> torch.Tensor:
        if self.reducer is not None:
            self.reducer.finish(None)
        return self.sums

    def finish(self) -> torch.Tensor:
        """Wait for the others, once; return the scale that makes gradients of the sum those of the mean, a scalar."""
        if self.scale is None:
            if self.copy is not None:
                self.copy.hold_device()
            elif self.reducer is not None:
                self.reducer.finish(None)
            self.scale = self.sums[_WEIGHT].reciprocal()
        return self.scale

    def weight(self) -> torch.Tensor:
        """Wait for the others, once; return the weight of the global batch, a scalar."""
        self.finish()
        return self.sums[_WEIGHT]

    def read(self) -> StepStats:
        """Return the numbers, after `finish`."""
        numbers = self.sums.tolist() if self.copy is None else self.copy.read()
        loss, weight, stop, *flags = numbers
        bad = flags[: self.comm.size]
        changed = flags[self.comm.size :]
        bad_ranks = [self.comm.peers[index] for index, count in enumerate(bad) if count]
        return StepStats(loss, weight, stop > 0, bad_ranks, [round(count) for count in changed])
