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
from paceline.comm.reducer import message_reducer
from paceline.comm.shared_memory import SharedMemory

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
    changed: list[int]  # for each buffer: the sum of what the ranks said of it, as `Buffers.find_changed` has it

    @property
    def mean(self) -> float:
        """Return the loss of the global batch."""
        return self.loss / self.weight


class StepStatsReducer:
    """Collects this rank's numbers, sends them, reads everybody's.

    Args:
        comm: the axis to sum over.
        shared: shared memory between the ranks, if it is open.
        counts: whether this rank adds losses and weights; others take part with zeros.
        buffers: how many buffers the model has.
        device: where the losses are.
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
        self.mine = torch.zeros(length, dtype=torch.float64, device=device)
        self.reducer = message_reducer(comm, shared, length, device)
        self.copy = None if device.type == "cpu" else HostCopy(length, torch.float64, device)

    def clear(self) -> None:
        """Begin a step with nothing."""
        self.mine.zero_()
        self.scale = None

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add one micro-batch's loss sum and weight, without waiting for the device.

        Of the ranks that see the same samples only one counts them.
        """
        if self.counts:
            self.mine[_LOSS] += loss
            self.mine[_WEIGHT] += weight
        # A place per rank: the sum names the ranks. Stays on the device, as `loss` does: nobody waits here.
        self.mine[_FIRST_RANK + self.comm.rank] += ~torch.isfinite(loss)

    def own_weight(self) -> torch.Tensor:
        """Return the weight of this rank's micro-batches so far, a scalar."""
        return self.mine[_WEIGHT]

    def begin(self, is_stopping: bool, changed: Sequence[int]) -> None:
        """Send this rank's numbers; all its forward passes are done."""
        # On a GPU neither waits for the device, as an assignment of a number or of memory that is not pinned does.
        self.mine[_STOP].fill_(is_stopping)
        if any(changed):
            write_numbers(self.mine[_FIRST_RANK + self.comm.size :], changed)
        self.reducer.inboxes[self.reducer.turn].copy_(self.mine)
        self.reducer.begin()
        if self.copy is not None:
            self.copy.begin(self._finished)

    def _finished(self) -> torch.Tensor:
        self.reducer.finish(None)
        return self.reducer.outbox

    def finish(self) -> torch.Tensor:
        """Wait for the others, once; return the scale that makes gradients of the sum those of the mean, a scalar."""
        if self.scale is None:
            if self.copy is None:
                self.reducer.finish(None)
            else:
                self.copy.hold_device()
            self.scale = self.reducer.outbox[_WEIGHT].reciprocal()
        return self.scale

    def weight(self) -> torch.Tensor:
        """Wait for the others, once; return the weight of the global batch, a scalar."""
        self.finish()
        return self.reducer.outbox[_WEIGHT]

    def read(self) -> StepStats:
        """Return the numbers, after `finish`."""
        numbers = self.reducer.outbox.tolist() if self.copy is None else self.copy.read()
        loss, weight, stop, *rest = numbers
        bad = rest[: self.comm.size]
        changed = rest[self.comm.size :]
        bad_ranks = [self.comm.peers[index] for index, count in enumerate(bad) if count]
        return StepStats(loss, weight, stop > 0, bad_ranks, [round(count) for count in changed])


def write_numbers(into: torch.Tensor, numbers: Sequence[float]) -> None:
    """Write numbers of the host into a tensor, without waiting where that is a GPU's."""
    if type(into) is torch.Tensor and into.device.type == "cpu":
        into.numpy()[:] = numbers  # torch would make a tensor of them first
        return
    of_host = torch.tensor(numbers, dtype=into.dtype, pin_memory=into.is_cuda)
    into.copy_(of_host, non_blocking=True)
