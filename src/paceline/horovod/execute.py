"""Execute what the coordinator answered, on the ranks of one process set.

Sums of float32 and float64 go through memory that the ranks of one host share, other sums through the process group.
What is not a sum is sent as bytes, so that any dtype passes.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.comm.collectives import AxisComm, close_subset, open_subset, split_rows
from paceline.comm.shared_memory import SharedMemory, Slot, open_shared_memory, open_slot
from paceline.horovod.negotiation import ADASUM, Answer, Entry, Request

_SLOT_NUMBERS = 2**20  # of a half: it stays in a core's cache between writing and reading
_LARGE_BYTES = 2**22  # a tensor of more is summed where it stands: a copy would cost more than a message
_SHARED = (torch.float32, torch.float64)
_TAG = 1 << 22
_OPS = {"Min": "min", "Max": "max", "Product": "product"}


@dataclass(slots=True)
class Task:
    """A collective of this rank under way.

    Attributes:
        request: what was submitted.
        tensor: its input, None where there is none.
        output: where the result stands once it is done.
        destination: the user's own tensor, of which `output` is a view.
        extra: the second result, such as the rows received from each rank.
        error: the reason why it failed.
    """

    request: Request
    tensor: torch.Tensor | None = None
    output: torch.Tensor | None = None
    destination: torch.Tensor | None = None
    extra: Any = None
    error: str = ""
    is_done: threading.Event = field(default_factory=threading.Event)
    submitted: torch.cuda.Event | None = None  # on a GPU: the input is written once it has come

    def fail(self, error: str) -> None:
        """End it with an error."""
        self.error = error
        self.is_done.set()


@dataclass(slots=True)
class SetComm:
    """The ranks of a process set.

    Attributes:
        comm: them as an axis; `comm.rank` is -1 on a rank that is no member.
        shared: the memory that they share.
        slots: a region of it for each dtype.
    """

    comm: AxisComm
    shared: SharedMemory | None = None
    slots: dict[torch.dtype, Slot] = field(default_factory=dict)

    def slot(self, dtype: torch.dtype) -> Slot | None:
        """Return the shared region for sums of `dtype`; None: they go through the process group. Collective."""
        if self.shared is None or dtype not in _SHARED:
            return None
        if dtype not in self.slots:
            self.slots[dtype] = open_slot(self.shared, _SLOT_NUMBERS, dtype)
        return self.slots[dtype]

    def close(self) -> None:
        """Close the connections."""
        self.slots.clear()
        if self.shared is not None:
            self.shared.close()
        close_subset(self.comm)


def open_set(world: AxisComm, ranks: tuple[int, ...]) -> SetComm:
    """Open connections between some ranks of `world`. Every rank of `world` must call it, in the same order.

    They are connections of their own: the user's calls of torch.distributed don't mix with them.
    """
    comm = open_subset(world, "horovod", ranks)
    return SetComm(comm, open_shared_memory(comm) if comm.rank >= 0 else None)


@torch.no_grad()
def execute(opened: SetComm, answer: Answer, tasks: Sequence[Task | None]) -> None:
    """Execute an answer; `tasks` are this rank's, None where it has joined, and contributes zeros."""
    for task in tasks:
        if task is not None and task.submitted is not None:
            task.submitted.synchronize()
    entries = answer.entries
    kind = entries[0].request.kind
    if kind == "allreduce":
        _allreduce(opened, entries, tasks)
    else:
        for entry, task in zip(entries, tasks, strict=True):
            assert task is not None
            _EXECUTORS[kind](opened, entry, task)
    device = entries[0].request.device
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def _barrier(opened: SetComm, entry: Entry, task: Task) -> None:
    """All ranks have submitted it, or there would be no answer."""


def _join(opened: SetComm, entry: Entry, task: Task) -> None:
    task.extra = entry.number


def _allgather(opened: SetComm, entry: Entry, task: Task) -> None:
    tensor = _input(task)
    lengths = [rows * _row_bytes(tensor) for rows in entry.rows]
    content = _bytes(tensor)
    gathered = [content]
    if opened.comm.size > 1:
        gathered = opened.comm.all_gather_along(content, lengths, 0)
    task.output = _typed(torch.cat(gathered), tensor, sum(entry.rows))
    task.extra = torch.tensor(entry.rows, dtype=torch.int32)


def _broadcast(opened: SetComm, entry: Entry, task: Task) -> None:
    assert task.output is not None
    root = opened.comm.peers.index(entry.request.root)
    if opened.comm.rank == root and task.output is not task.tensor:
        task.output.copy_(_input(task))
    if task.output.numel() > 0:
        opened.comm.broadcast(_bytes(task.output), root)


def _alltoall(opened: SetComm, entry: Entry, task: Task) -> None:
    tensor = _input(task)
    rank = opened.comm.rank
    received = [splits[rank] for splits in entry.splits]
    row = _row_bytes(tensor)
    content = _bytes(tensor[: sum(entry.splits[rank])])
    if opened.comm.size > 1:
        send = [rows * row for rows in entry.splits[rank]]
        content = opened.comm.all_to_all_sized(content, send, [rows * row for rows in received])
    task.output = _typed(content.clone(), tensor, sum(received))
    task.extra = torch.tensor(received, dtype=torch.int32)


def _reducescatter(opened: SetComm, entry: Entry, task: Task) -> None:
    tensor = _input(task)
    request = entry.request
    comm = opened.comm
    before, after = factors(request, comm.size)
    scaled = _scaled(tensor, before)
    total = scaled.clone()
    if comm.size > 1:
        rows = split_rows(tensor.shape[0], comm.size)
        row = _row_bytes(tensor)
        received = comm.all_to_all_sized(
            _bytes(scaled), [count * row for count in rows], [rows[comm.rank] * row] * comm.size
        )
        parts = _typed(received, tensor, rows[comm.rank] * comm.size).view(
            comm.size, rows[comm.rank], *tensor.shape[1:]
        )
        total = parts.sum(0, dtype=tensor.dtype)  # in rank order; dtype: torch would widen integers
    task.output = _scaled(total, after)


_EXECUTORS = {
    "barrier": _barrier,
    "join": _join,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}


def factors(request: Request, size: int) -> tuple[float, float]:
    """Return the factors before and after a sum; an average is a sum, divided."""
    after = request.postscale / size if request.op == "Average" else request.postscale
    return request.prescale, after


def _allreduce(opened: SetComm, entries: Sequence[Entry], tasks: Sequence[Task | None]) -> None:
    """Reduce tensors of one dtype, by one operation."""
    request = entries[0].request
    dtype = getattr(torch, request.dtype)
    pairs = [_flat_pair(entry.request, dtype, task) for entry, task in zip(entries, tasks, strict=True)]
    before, after = factors(request, opened.comm.size)
    if request.op == ADASUM:
        for source, result in pairs:
            result.copy_(adasum(opened.comm, source * before) * after)
        return
    is_sum = request.op not in _OPS
    slot = opened.slot(dtype) if is_sum and request.device == "cpu" else None
    if slot is not None:
        _sum_shared(slot, pairs, before, after)
        return
    small = []
    for source, result in pairs:
        if source.nbytes <= _LARGE_BYTES and len(pairs) > 1:
            small.append((source, result))
        else:
            result.copy_(_scaled(source, before))
            _reduce(opened.comm, result, request.op)
            result.copy_(_scaled(result, after))
    if small:
        flat = _scaled(torch.cat([source for source, _ in small]), before)
        _reduce(opened.comm, flat, request.op)
        flat = _scaled(flat, after)
        for part, (_, result) in zip(flat.split([source.numel() for source, _ in small]), small, strict=True):
            result.copy_(part)


def _reduce(comm: AxisComm, tensor: torch.Tensor, op: str) -> None:
    if tensor.numel() > 0:
        comm.all_reduce(tensor, _OPS.get(op, "sum"))


def _flat_pair(request: Request, dtype: torch.dtype, task: Task | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and output of this rank, flat; of one that has joined, zeros."""
    if task is None:
        zeros = torch.zeros(math.prod(request.shape), dtype=dtype, device=request.device)
        return zeros, torch.empty_like(zeros)
    assert task.output is not None
    return _input(task).view(-1), task.output.view(-1)


def _sum_shared(slot: Slot, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], before: float, after: float) -> None:
    """Sum tensors through shared memory: each rank copies its numbers there, and adds up those of all."""
    for pieces in _filled(pairs):
        inbox = slot.inboxes[slot.turn % 2]
        at = 0
        for source, _ in pieces:
            part = inbox[at : at + source.numel()]
            if before == 1.0:
                part.copy_(source)
            else:
                torch.mul(source, before, out=part)
            at += source.numel()
        slot.begin()
        halves = slot.wait()
        at = 0
        for _, result in pieces:
            first, second, *remaining = [half[at : at + result.numel()] for half in halves]
            # In rank order: the same bits on every rank.
            torch.add(first, second, out=result)
            for part in remaining:
                result += part
            if after != 1.0:
                result *= after
            at += result.numel()


def _filled(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Distribute tensors over fillings of a slot; large ones are cut."""
    fillings: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    free = 0
    for source, result in pairs:
        at = 0
        while at < source.numel():
            if free == 0:
                fillings.append([])
                free = _SLOT_NUMBERS
            count = min(free, source.numel() - at)
            fillings[-1].append((source[at : at + count], result[at : at + count]))
            at += count
            free -= count
    return fillings


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a factor: integers by float64 and cut, float16 by float32, as Horovod does."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor


def adasum(comm: AxisComm, tensor: torch.Tensor) -> torch.Tensor:
    """Return the ranks' vectors combined by Adasum (Maleki et al., 2021), flat; the number of ranks is a power of two.

    Two vectors a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. Ranks combine in pairs, then pairs do.
    """
    combined = tensor.double()
    for level in itertools.count():
        distance = 1 << level
        if distance >= comm.size:
            return combined.to(tensor.dtype)
        partner = comm.rank ^ distance
        received = torch.empty_like(combined)
        receiving = comm.begin_receive(received, partner, _TAG + level)
        sending = comm.begin_send(combined, partner, _TAG + level)
        receiving.wait()
        sending.wait()
        # The lower rank's vector first on both: the bits are equal.
        first, second = (combined, received) if comm.rank < partner else (received, combined)
        combined = _adasum_pair(first, second)
    raise AssertionError


def _adasum_pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    product = float(first @ second)
    a_square, b_square = float(first @ first), float(second @ second)
    a_factor = 1.0 - product / (2.0 * a_square) if a_square > 0 else 1.0
    b_factor = 1.0 - product / (2.0 * b_square) if b_square > 0 else 1.0
    return first * a_factor + second * b_factor


def _input(task: Task) -> torch.Tensor:
    assert task.tensor is not None
    return task.tensor


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8)


def _typed(content: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    return content.view(like.dtype).view(rows, *like.shape[1:])
