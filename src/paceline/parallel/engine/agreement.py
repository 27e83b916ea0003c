"""Find out before ranks communicate whether all of them are at the same call of a step, and add up their losses.

A call that communicates begins with one small sum over the ranks. In it every rank says what it is about to do, and
what it has done since its last message. Ranks that are at different calls find that out there, before a collective of
one meets another's.

Traffic: for each message one all_reduce of 8 (4 + 6 R + buffers) bytes, R ranks. On GPUs the hosts exchange one more
for each backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.host_copy import HostCopy
from paceline.comm.reducer import Reducer, message_reducer
from paceline.comm.shared_memory import SharedMemory
from paceline.nouns.errors import CollectiveError, LossError, PacelineError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.parallel.peer_values import PeerValues
from paceline.torch_private.operations import FakeTensor

BACKWARD, REDUCE, END, FORWARD, GATHER, SPLIT, READ, UPDATE = range(1, 9)
_CALLS = {
    BACKWARD: "calls job.backward",
    REDUCE: "sums gradients, for optimizer.step(), job.clip or job.gradients",
    END: "ends the step, for the next batch or the end of the loop",
    FORWARD: "calls a model of which each rank has a part",
    GATHER: "enters job.gathered",
    SPLIT: "calls a model for the first time",
    READ: "reads a number of a parameter or gradient that is in parts",
    UPDATE: "updates",
}
# Places in the message: sums over the ranks, and then numbers of each rank; ALIKE and _ARGUMENTS are equal on ranks
# with the same samples, and _SILENT is a checksum of the calls since the last message that had no message of their own.
# At the end of a step STOP means that a rank was asked to stop; before an update, that the step's end needs a message.
# LEFT_OUT says that a loss with weight 0 is not finite.
WEIGHT, LOSS, STOP, LEFT_OUT, FIRST_RANK = range(5)
_CODE, _CHECK, BAD, ALIKE, _ARGUMENTS, _SILENT, _PER_RANK = range(7)
_MOST_OPTIMIZERS = 1000
BAD_WEIGHT = 2  # in the place of BAD, where 1 means the loss
# Relative: GPUs may sum in another order; other samples, or a loss of other values, differ in their first digits.
SUMS_DIFFER = 1e-9
_MAY_DIFFER = {SPLIT: SUMS_DIFFER, BACKWARD: 1e-4}
SAME_SAMPLES = (
    "call models on every rank, not under `if job.rank == 0`; take the samples from the loader that paceline.prepare "
    "returned, or by job.data_rank in place of job.rank; draw with torch, whose random numbers are the same on these "
    "ranks"
)
_NOT_ALIKE = {  # what should be equal, and how to make it so
    SPLIT: ("ranks of one tensor group should call a model with the same arguments", SAME_SAMPLES),
    BACKWARD: (
        "ranks of one tensor group should compute the same loss",
        f"{SAME_SAMPLES}; and compute the loss from what model(...) returns, not from its parameters, of which each "
        "rank has a piece",
    ),
}


class Call(NamedTuple):
    """The call that a rank is about to make.

    Attributes:
        kind: the call's kind: one of the constants above, from BACKWARD to UPDATE.
        number: the number of the optimizer, or of the model for FORWARD and SPLIT, from 1; 0 means all. For BACKWARD 1
            means inside `accumulate`.
        check: a number that is the same on every rank of a correct program.
        differs: the first and the last part of the error, expectation and fix, where `check` differs between ranks.
    """

    kind: int
    number: int = 0
    check: float = 0.0
    differs: tuple[str, str] = ("", "")

    @property
    def code(self) -> int:
        """Return kind and number as one number."""
        return self.kind * _MOST_OPTIMIZERS + self.number


class Agreed(NamedTuple):
    """The knowledge that all ranks share after the message of a call.

    Attributes:
        weight, loss: the sums over the ranks of the weights and of the weighted losses.
        is_stopping: whether a rank was asked to stop.
        changed: for each buffer, the sum over the ranks of what `Buffers.find_changed` returned.
    """

    weight: float
    loss: float
    is_stopping: bool
    changed: list[int]


class _Ahead(NamedTuple):
    """A message that is on its way while a backward pass runs.

    Attributes:
        call: the call that the message announces.
        whole_weight: the number that the ranks' weights should add up to.
    """

    call: Call
    whole_weight: int


class _Message:
    """A vector of numbers, which the ranks add up.

    Args:
        comm: the axis of the ranks that add up.
        shared: the memory that these ranks share; None where there is none.
        length: the number of numbers in the message.
        device: the device of the numbers.

    Attributes:
        offset: the index of this rank's first number.
        reducer: the reducer that sums the message over the ranks; None where there is only one rank.
    """

    def __init__(self, comm: AxisComm, shared: SharedMemory | None, length: int, device: torch.device) -> None:
        self.length = length
        self.device = device
        self.offset = FIRST_RANK + _PER_RANK * comm.rank
        self.reducer = message_reducer(comm, shared, length, device) if comm.size > 1 else None
        self.numbers: list[float] = []
        self.of_device: dict[int, torch.Tensor] = {}  # by index: numbers that the host does not know

    def clear(self, call: Call) -> None:
        """Clear the message, and write the kind, number and check of a call."""
        self.numbers = [0.0] * self.length
        self.of_device = {}
        self.numbers[self.offset + _CODE] = call.code
        self.numbers[self.offset + _CHECK] = call.check

    def write(self, place: int, value: torch.Tensor | float) -> None:
        """Put one number of this rank in its place; a tensor of one number on a device is not read."""
        value = of_host(value)
        if isinstance(value, torch.Tensor):
            self.of_device[place] = value
        else:
            self.of_device.pop(place, None)
            self.numbers[place] = float(value)

    def begin(self) -> None:
        """Send this rank's numbers."""
        if self.reducer is not None:
            self._fill(self.reducer.inboxes[self.reducer.turn])
            self.reducer.begin()

    def finish(self) -> torch.Tensor:
        """Return the sums."""
        if self.reducer is None:
            sums = torch.empty(self.length, dtype=torch.float64, device=self.device)
            self._fill(sums)
            return sums
        self.reducer.finish(None)
        return self.reducer.outbox.clone()

    def _fill(self, numbers: torch.Tensor) -> None:
        # Numbers that the host knows go in one copy: a copy for each would be a kernel for each.
        write_numbers(numbers, self.numbers)
        for place, value in self.of_device.items():
            numbers[place].copy_(value)


class Agreement:
    """The messages of the ranks that take a step together.

    Args:
        comm: the axis of these ranks.
        shared: the memory that these ranks share; None where there is none.
        device: the device on which this rank computes.
        mesh: the plan's mesh, which says which ranks see the same samples.
        buffers: the number of the models' buffers.

    Attributes:
        peer_values: the reader of the numbers that the other ranks have sent.
        digest: a function that returns a digest of the models' inputs, equal on ranks with the same samples; None where
            no ranks have the same samples.
        finish_failed: a function that finishes a backward pass that has raised, called before the next message; None
            where there is none.
        is_end_agreed: whether by this step's newest message no rank needs a message at the step's end.
        is_doubtful: whether a rank had a loss of weight 0 that is not finite.
    """

    def __init__(
        self, comm: AxisComm, shared: SharedMemory | None, device: torch.device, mesh: Mesh, buffers: int
    ) -> None:
        self.comm = comm
        self.mesh = mesh
        self.peer_values = PeerValues()
        self.digest: Callable[[], torch.Tensor] | None = None
        self.finish_failed: Callable[[], None] | None = None
        self.is_end_agreed = False
        self.is_doubtful = False
        self.is_closed = False
        self.buffers_at = FIRST_RANK + _PER_RANK * comm.size
        length = self.buffers_at + buffers
        # What the host knows by itself travels without the device, which the answer would have to wait for.
        self.on_device = _Message(comm, shared, length, device)
        host = torch.device("cpu")
        self.on_host = self.on_device if device == host else _Message(comm, None, length, host)
        self.message = self.on_device
        self.silent_calls: list[int] = []  # codes of the calls since the last message, which had none
        self.last_silent_calls: list[int] = []  # those that the last message announced
        self.ahead: _Ahead | None = None
        self.unread: list[tuple[Call, Callable[[], list[float]]]] = []  # reads the sums
        self.losses: list[Agreed] = []  # of the step's backward passes

    @property
    def reducers(self) -> list[Reducer]:
        """Return the reducers of the messages."""
        messages = {self.on_device, self.on_host}
        return [message.reducer for message in messages if message.reducer is not None]

    def begin(self, call: Call) -> _Message:
        """Begin the message of a call with what every message says, and return it.

        The caller adds numbers of the constants above; those from BAD on are this rank's, and come after `own`.
        """
        if self.finish_failed is not None:
            self.finish_failed()
        # A loss is the device's, and so is the digest of what models are called with under `tensor`.
        is_of_host = call.kind != BACKWARD and self.digest is None
        message = self.message = self.on_host if is_of_host else self.on_device
        message.clear(call)
        if self.silent_calls:
            message.write(message.offset + _SILENT, zlib.crc32(repr(self.silent_calls).encode()) + 1)
        self.last_silent_calls, self.silent_calls = self.silent_calls, []
        if self.digest is not None:
            message.write(message.offset + _ARGUMENTS, self.digest())
        return message

    def sum(self) -> torch.Tensor:
        """Send the message; return the sum of those of all ranks."""
        self.message.begin()
        return self._finish_sum()

    def send_ahead(self, call: Call, whole_weight: int) -> None:
        """Send the message of a backward pass, which `read_ahead` reads after it."""
        self.message.begin()
        self.ahead = _Ahead(call, whole_weight)

    def read_ahead(self) -> None:
        """Read the message that was sent before the backward pass.

        Raises:
            LossError: a loss is not finite.
            CollectiveError: another rank is at another call, or the weights add up to something else.
        """
        ahead, self.ahead = self.ahead, None
        assert ahead is not None
        self.read_later(ahead.call, self._finish_sum())
        self.read_all()
        self._check_weights(self.losses[-1].weight, ahead.whole_weight)

    def _finish_sum(self) -> torch.Tensor:
        sums = self.message.finish()
        if self.peer_values.are_there:
            return sums
        own_numbers = slice(self.message.offset, self.message.offset + _PER_RANK)
        return self.peer_values.message(sums, slice(FIRST_RANK, self.buffers_at), own_numbers)

    def _check_weights(self, found: float, expected: int) -> None:
        if found != expected and self.peer_values.are_there:
            raise CollectiveError(
                "the weights of a loss should add up to the number of the batch's samples where it is left out",
                f"they add up to {found:g}, and the batch has {expected} samples",
                "hand in the weight on every rank, or on none",
            )

    def meet_on_host(self, call: Call) -> None:
        """Check that all ranks are at a call, before the device is given work that waits for the others' devices."""
        if self.on_host is self.on_device or self.comm.size == 1 or self.digest is not None:
            return
        self.message = self.on_host
        self.message.clear(call)
        self._check_same(call, self._by_rank(self.sum().tolist()))

    def meet(self, call: Call) -> None:
        """Check that all ranks are at a call that adds nothing up. Collective."""
        if self.is_closed:
            return
        self.begin(call)
        sums = self.sum()
        self.read_later(call, sums)
        if sums.device.type == "cpu":
            self.read_all()

    def agree(self, call: Call) -> Agreed:
        """Add up the ranks' messages, and check that all are at the same call.

        Raises:
            CollectiveError: they are not, or were not before.
            LossError: a loss is not finite, or nothing counts.
        """
        sums = self.sum()
        if self.unread and sums.device.type == "cpu":
            # First: if another rank is at another call, those of a backward pass on a device may never come.
            agreed = self.read(call, sums.tolist())
            self.read_all()
            return agreed
        self.read_all()
        return self.read(call, sums.tolist())

    def read_later(self, call: Call, sums: torch.Tensor) -> None:
        """Have `read_all` read these sums; a device goes on meanwhile with what comes after."""
        if sums.device.type == "cpu":
            self.unread.append((call, sums.tolist))
            return
        copy = HostCopy(sums.numel(), sums.dtype, sums.device)
        copy.begin(lambda: sums)
        self.unread.append((call, copy.read))

    def read_all(self) -> None:
        """Read the sums that have not been read, of backward passes for example.

        Raises:
            CollectiveError: another rank was at another call.
            LossError: a loss is not finite, or nothing counts.
        """
        unread, self.unread = self.unread, []
        for call, read in unread:
            agreed = self.read(call, read())
            if call.kind == BACKWARD:
                self.losses.append(agreed)

    def read(self, call: Call, sums: Sequence[float]) -> Agreed:
        """Check the sums of a call's message, and return what they say to all ranks.

        Raises:
            CollectiveError: another rank is at another call.
            LossError: a loss is not finite, or nothing counts.
            WorkloadError: another rank can't split a model.
        """
        weight, loss, stop, left_out = sums[:FIRST_RANK]
        by_rank = self._by_rank(sums)
        is_bad = self._check_same(call, by_rank)
        self.is_doubtful |= left_out > 0
        if call.kind in (BACKWARD, REDUCE):
            self.is_end_agreed = not stop  # no rank has more to say
        if is_bad:
            raise self._bad(call, by_rank)
        if call.kind == BACKWARD and weight <= 0:
            raise LossError(
                "can't take the mean loss over the ranks",
                f"its weights add up to {weight:g}",
                "make sure that every batch has something to predict, and hand in its number: job.backward(loss, n)",
            )
        if self.digest is not None:
            self._check_alike(SPLIT, [numbers[_ARGUMENTS] for numbers in by_rank])
            if call.kind in _MAY_DIFFER:
                self._check_alike(call.kind, [numbers[ALIKE] for numbers in by_rank])
        return Agreed(weight, loss, stop > 0, list(map(round, sums[self.buffers_at :])))

    def take_losses(self) -> tuple[float, float]:
        """Return the weight and the weighted loss of the step's backward passes, added up, and forget them."""
        weight = loss = 0.0
        for agreed in self.losses:
            weight += agreed.weight
            loss += agreed.loss
        self.losses = []
        return weight, loss

    def _bad(self, call: Call, by_rank: Sequence[Sequence[float]]) -> PacelineError:
        """Return the error to raise where ranks have marked a number as bad."""
        bad_ranks = [self.comm.peers[index] for index, numbers in enumerate(by_rank) if numbers[BAD]]
        if call.kind == SPLIT:
            return WorkloadError(
                "every rank should be able to split the model by tensor",
                f"rank {bad_ranks[0]} can't, by what it was called with there",
                "see the error of that rank",
            )
        if any(numbers[BAD] == BAD_WEIGHT for numbers in by_rank):
            return LossError(
                "the weight of a loss should be a number, 0 or more",
                f"that of rank {bad_ranks[0]} is negative, NaN or infinite; the parameters were left as they were",
                "write over how many samples or tokens the loss is a mean",
            )
        return _not_finite(bad_ranks)

    def _by_rank(self, sums: Sequence[float]) -> list[Sequence[float]]:
        """Return the numbers of each rank."""
        by_rank = []
        for start in range(FIRST_RANK, self.buffers_at, _PER_RANK):
            by_rank.append(sums[start : start + _PER_RANK])
        return by_rank

    def _check_same(self, call: Call, by_rank: Sequence[Sequence[float]]) -> bool:
        """Check that all ranks are at the same call; return True if one has marked a number as bad."""
        is_bad = False
        own_code = call.code
        silent_calls = by_rank[self.comm.rank][_SILENT]
        for rank, numbers in zip(self.comm.peers, by_rank, strict=True):
            code, check = numbers[_CODE], numbers[_CHECK]
            if numbers[_SILENT] != silent_calls:
                raise CollectiveError(
                    "every rank should call the same pieces of a step, in the same order",
                    f"before this one, where it {_shown(own_code)}, this rank {_listed(self.last_silent_calls)}; rank "
                    f"{rank} did something else",
                    _fix(call, int(code)),
                )
            if code != own_code:
                raise CollectiveError(
                    "every rank should call the same pieces of a step, in the same order",
                    f"this rank {_shown(own_code)}, rank {rank} {_shown(int(code))}",
                    _fix(call, int(code)),
                )
            if check != call.check:
                expectation, fix = call.differs
                raise CollectiveError(expectation, f"those of rank {rank} are not those of this rank", fix)
            is_bad |= bool(numbers[BAD])
        return is_bad

    def _check_alike(self, kind: int, numbers: Sequence[float]) -> None:
        """Check numbers that should be equal on ranks of `tensor`, which see the same samples.

        All ranks look at all numbers: none goes on while another stops.
        """
        first: dict[int, tuple[int, float]] = {}  # rank and number, by the ranks' samples
        for rank, number in zip(self.comm.peers, numbers, strict=True):
            first_rank, expected = first.setdefault(self.mesh.data_part(rank), (rank, number))
            if abs(number - expected) <= _MAY_DIFFER[kind] * abs(expected):
                continue
            expectation, fix = _NOT_ALIKE[kind]
            shown = f": {expected:.6g} and {number:.6g}" if kind == BACKWARD else ""
            raise CollectiveError(expectation, f"those of rank {first_rank} and rank {rank} differ{shown}", fix)


def of_host(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return a value as a number if the host can read it without waiting, else as a float64 tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    has_value = value.device.type == "cpu" and not isinstance(value, FakeTensor)
    return float(value) if has_value else value.double()


def write_numbers(into: torch.Tensor, numbers: Sequence[float]) -> None:
    """Write numbers of the host into a tensor, without waiting where that is a GPU's."""
    if type(into) is torch.Tensor and into.device.type == "cpu":
        into.numpy()[:] = numbers  # torch would make a tensor of them first
        return
    on_host = torch.tensor(numbers, dtype=into.dtype, pin_memory=into.is_cuda)
    into.copy_(on_host, non_blocking=True)


def _listed(codes: Sequence[int]) -> str:
    """Return the text of the calls that a rank has made, such as `updates (optimizer 1)`."""
    return ", ".join(map(_shown, codes)) or "did nothing"


def _shown(code: int) -> str:
    kind, number = divmod(code, _MOST_OPTIMIZERS)
    which = ""
    if kind == BACKWARD:
        return _CALLS[kind] + (" inside job.accumulate" if number else "")
    if number:
        which = f" (model {number})" if kind in (FORWARD, SPLIT) else f" (optimizer {number})"
    return f"{_CALLS.get(kind, 'does something else')}{which}"


def _fix(call: Call, other_code: int) -> str:
    if FORWARD in (call.kind, other_code // _MOST_OPTIMIZERS):
        return (
            "let no rank leave out a call of a model; inside `with job.gathered():` each rank may call models as often "
            "as it likes"
        )
    if READ in (call.kind, other_code // _MOST_OPTIMIZERS):
        return (
            "read it on every rank, such as norm = float(gradient.norm()), and print the number under "
            "`if job.rank == 0`"
        )
    return (
        "let no rank leave out a batch, a backward pass or an update; one without samples hands in its loss with "
        "weight 0"
    )


def _not_finite(ranks: Sequence[int]) -> LossError:
    plural = "s" if len(ranks) > 1 else ""
    error = LossError(
        "the loss should be a finite number",
        f"it is NaN or infinite on rank{plural} {', '.join(map(str, ranks))}; the parameters were left as they were",
        "lower the learning rate, clip the gradients with job.clip(1.0), or look for bad samples in this batch",
    )
    error.rank = ranks[0]
    return error
