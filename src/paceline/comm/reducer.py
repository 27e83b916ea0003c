"""Sum one flat tensor over an axis: by the process group, by a message to each rank, or through shared memory.

A reducer has one or two *inboxes*, filled in turn, and gives back an *outbox*. `begin` and `finish` are
apart so that the sum runs while the backward pass goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.comm.collectives import AxisComm, Completed, Pending
from paceline.comm.shared_memory import SharedMemory, Slot, open_slot
from paceline.comm.step_times import COMMUNICATION, Timed

MAX_EXCHANGING = 8  # ranks: each of more would send too many messages


class Reducer(Protocol):
    """An object that sums one flat tensor over an axis, once for each step."""

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """Flat tensors to fill, in turn."""

    @property
    def outbox(self) -> torch.Tensor:
        """The flat tensor in which the sum will stand."""

    @property
    def turn(self) -> int:
        """The index of the inbox that is filled next."""

    def begin(self) -> None:
        """Start the sum; the inbox is filled."""

    def finish(self, scale: torch.Tensor | None) -> None:
        """Wait until the sum, times `scale` (a scalar) if there is one, stands in the outbox."""

    @property
    def is_scaled_first(self) -> bool:
        """True if the inbox must be filled with numbers times the scale already, to stay in range."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return tensors, by name, that the next sums depend on, such as the error that compression left."""


class _Exact:
    """What all reducers share that do not compress."""

    __slots__ = ()

    @property
    def is_scaled_first(self) -> bool:
        """False: the sum is exact, so it can be scaled afterwards."""
        return False

    def state(self) -> dict[str, torch.Tensor]:
        """Return nothing: no sum depends on an earlier one."""
        return {}


@dataclass(slots=True)
class GroupReducer(_Exact):
    """Sums in place by the process group (NCCL, Gloo). Exact."""

    comm: AxisComm
    outbox: torch.Tensor
    pending: Pending = field(default_factory=Completed)

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """The tensor itself."""
        return [self.outbox]

    @property
    def turn(self) -> int:
        """Always the one inbox."""
        return 0

    def begin(self) -> None:
        """Start the all_reduce."""
        if self.comm.size > 1:
            self.pending = self.comm.begin_all_reduce(self.outbox)

    def finish(self, scale: torch.Tensor | None) -> None:
        """Wait for the all_reduce."""
        if self.comm.size > 1:
            self.pending.wait()
        # After the sum, in one pass over the bucket; the scale (1 / weight) is known only after the last forward pass.
        if scale is not None:
            self.outbox *= scale


@dataclass(slots=True)
class SharedMemoryReducer(_Exact):
    """Sums through memory that the ranks of one host share. Exact."""

    slot: Slot
    outbox: torch.Tensor

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """Two halves of shared memory."""
        return self.slot.inboxes

    @property
    def turn(self) -> int:
        """The index of the half that is filled next."""
        return self.slot.turn % 2

    def begin(self) -> None:
        """Tell the others; the ledger counts it as the all_reduce that it is."""
        comm = self.slot.shared.comm
        comm.ledger.add("all_reduce", comm.axis, self.outbox.nbytes)
        self.slot.begin()

    def finish(self, scale: torch.Tensor | None) -> None:
        """Add up all ranks' halves."""
        with Timed(f"{COMMUNICATION} {self.slot.shared.comm.axis}", "all_reduce"):
            self.slot.finish(self.outbox, scale)


@dataclass(slots=True)
class ExchangeReducer(_Exact):
    """Sums a few numbers of the host, which each rank sends to each other one. Exact, with the same bits everywhere."""

    comm: AxisComm
    rows: list[torch.Tensor]  # (numel,) each: what the ranks have sent
    outbox: torch.Tensor
    pending: Pending = field(default_factory=Completed)

    @property
    def inboxes(self) -> list[torch.Tensor]:
        """This rank's row."""
        return [self.rows[self.comm.rank]]

    @property
    def turn(self) -> int:
        """Always the one inbox."""
        return 0

    def begin(self) -> None:
        """Start the exchange."""
        self.pending = self.comm.begin_exchange(self.rows)

    def finish(self, scale: torch.Tensor | None) -> None:
        """Wait for the exchange, and add up in rank order."""
        self.pending.wait()
        first, second, *remaining = self.rows
        torch.add(first, second, out=self.outbox)
        for row in remaining:
            self.outbox += row
        if scale is not None:
            self.outbox *= scale


def message_reducer(comm: AxisComm, shared: SharedMemory | None, numel: int, device: torch.device) -> Reducer:
    """Make the reducer of a few numbers of float64, on which ranks agree in each step."""
    # A step that is predicted has no other ranks, and what they would send has no place in its memory.
    is_predicted = comm.size > 1 and comm.backend() == "fake"
    if shared is None and device.type == "cpu" and 1 < comm.size <= MAX_EXCHANGING and not is_predicted:
        # Memory of Python's: a few hundred bytes that predictions of torch's memory need not follow.
        rows = [torch.frombuffer(bytearray(numel * torch.float64.itemsize), dtype=torch.float64) for _ in comm.peers]
        return ExchangeReducer(comm, rows, torch.zeros(numel, dtype=torch.float64))
    return exact_reducer(comm, shared, numel, torch.float64, device)


def exact_reducer(
    comm: AxisComm, shared: SharedMemory | None, numel: int, dtype: torch.dtype, device: torch.device
) -> Reducer:
    """Make the reducer without compression: shared memory where it is open and the tensor is on the CPU."""
    outbox = torch.zeros(numel, dtype=dtype, device=device)
    # Shared memory is the host's: a tensor on a GPU goes through the process group.
    if shared is not None and device.type == "cpu":
        return SharedMemoryReducer(open_slot(shared, numel, dtype), outbox)
    return GroupReducer(comm, outbox)
