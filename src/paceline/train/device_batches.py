"""Copy the next batch to a device while the device works on the one before it.

Copies have a stream of their own, and the host waits for none of them:

    batch k is handed out   memory for batch k+1 is allocated; where that batch is at hand, its copy begins
    step k                  the device computes and copies at the same time
    batch k+1 is asked for  its copy begins, unless it has begun; the stream that computes waits for it on the device

A batch is at hand where the loader's processes have made it and its memory is pinned (`data_workers.AtHand`). Only then
it is taken early: to wait for a loader would hold up step k, and a data set that is read in this process may look at
what step k changes, or draw on the device. Other batches are loaded when they are asked for, as ever. Their copies
still go on while the device has some of step k to do: their memory was allocated before it, in the shapes of batch k.

Memory is allocated on the stream that computes, so it is used again in that stream's order, without `record_stream`.
The copy waits for what that stream was given before the allocation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.dtypes import wide_dtype
from paceline.comm.pytree import map_tensors
from paceline.train.data_workers import AtHand

Facts = TypeVar("Facts")


def moved(batch: Any, device: torch.device, to_float64: bool) -> Any:
    """Return `batch` with its tensors on `device`; floating ones in float64 if `to_float64`."""

    if device.type == "cpu" and not to_float64:
        return batch  # it is there

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, wide_dtype(tensor.dtype) if to_float64 else None, non_blocking=True)

    return map_tensors(batch, move)


class Arrived:
    """A batch on the device, which is handed out once: whoever takes it is then the only one who holds it."""

    def __init__(self, batch: Any) -> None:
        self._batch = [batch]

    def take(self) -> Any:
        """Return the batch."""
        return self._batch.pop()


def on_device(
    loaded: Iterator[tuple[Facts, Any]], device: torch.device, to_float64: bool, at_hand: AtHand
) -> Iterator[tuple[Facts, Arrived]]:
    """Yield the batches of a loader on a device, in their order.

    Beside the batch that was yielded last, this holds memory of one more. On the CPU, and where numbers are widened to
    float64, which the host does, each batch is moved when it is asked for, and nothing comes early.

    Args:
        loaded: yields what is known of a batch, which is handed on as it is, and the batch on the host.
        device: where the batches are to be.
        to_float64: floating tensors are to be float64.
        at_hand: says whether `loaded` can give its next batch without a wait.
    """
    if device.type == "cpu" or to_float64:
        for facts, batch in loaded:
            yield facts, Arrived(moved(batch, device, to_float64))
        return
    yield from _copied(loaded, _Copies(device), at_hand)


def _copied(loaded: Iterator[tuple[Facts, Any]], copies: _Copies, at_hand: AtHand) -> Iterator[tuple[Facts, Arrived]]:
    ahead: tuple[Facts, _Copy] | None = None
    room: _Room | None = None
    try:
        while True:
            if ahead is None:
                item = next(loaded, None)
                if item is None:
                    return
                ahead = item[0], copies.begin(item[1], room)
            facts, copy = ahead
            arrived = Arrived(copies.end(copy))
            ahead = item = room = None
            if at_hand.has_next():
                item = next(loaded, None)
            if item is not None:
                ahead = item[0], copies.begin(item[1], None)
            else:
                room = copies.room_like(copy)
            del copy, item  # what the loop lets go during its step is free
            yield facts, arrived
    finally:
        if ahead is not None:  # the loop has ended before its batches
            ahead[1].hold_device()


@dataclass(slots=True)
class _Room:
    """Memory of a batch to come.

    Attributes:
        place: where and how it was allocated.
        free: the event on the device from which on nothing uses it.
        tensors: in the order of the batch's tensors.
    """

    place: _Place
    free: Any = None
    tensors: deque[torch.Tensor] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class _Place:
    """What memory is allocated for: a stream that computes, and whether its tensors can be in an autograd graph."""

    stream: Any
    is_inference: bool


@dataclass(slots=True)
class _Copy:
    """A batch on its way to the device.

    Attributes:
        source: it, on the host.
        batch: it, on the device.
        place: where its memory was allocated.
        targets: its tensors that are copied on the stream of copies.
        event: the end of the copy; None where nothing is on that stream.
    """

    source: Any
    batch: Any
    place: _Place
    targets: list[torch.Tensor]
    event: Any

    def hold_device(self) -> None:
        """Let the stream on which the memory was allocated wait for the copy; the host goes on."""
        if self.event is not None:
            self.place.stream.wait_event(self.event)


class _Copies:
    """The copies of one loader's batches to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: Any = torch.get_device_module(device)
        self.stream = _stream_of(device)
        # torch's allocator of pinned memory keeps what a copy reads until the copy is done. Memory that something else
        # has pinned it doesn't know.
        self.read: deque[tuple[Any, list[torch.Tensor]]] = deque()
        self.shapes: list[Any] = []  # of the last batch
        self.is_steady = False  # the one before it had the same

    def _place(self) -> _Place:
        return _Place(self.streams.current_stream(self.device), torch.is_inference_mode_enabled())

    def room_like(self, copy: _Copy) -> _Room | None:
        """Allocate memory for a batch like this one, the last; return None where the one before it was another."""
        if not copy.targets or not self.is_steady:
            return None
        room = _Room(self._place())
        room.tensors.extend(torch.empty_like(tensor) for tensor in copy.targets)
        room.free = room.place.stream.record_event()
        return room

    def begin(self, source: Any, room: _Room | None) -> _Copy:
        """Begin to copy a batch.

        Args:
            source: the batch on the host.
            room: for it. Without any, or where it does not fit, memory is allocated and the copy waits for what the
                device was given so far.
        """
        place = self._place()
        if room is None or room.place != place:
            room = _Room(place)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_plain(tensor):
                return tensor.to(self.device, non_blocking=True)
            target = self._target(tensor, room)
            pairs.append((_pinned(tensor, target), target))
            return target

        batch = map_tensors(source, move)
        event = self._copy(pairs, room.free or place.stream.record_event()) if pairs else None
        targets = [target for _, target in pairs]
        shapes = [_shape(target) for target in targets]
        self.is_steady, self.shapes = shapes == self.shapes, shapes
        return _Copy(source, batch, place, targets, event)

    def _target(self, tensor: torch.Tensor, room: _Room) -> torch.Tensor:
        """Return memory for a tensor on the device."""
        if room.tensors:
            target = room.tensors.popleft()
            if _shape(target) == _shape(tensor):
                return target
            room.tensors.clear()
        room.free = None  # what is allocated now may be in use until now
        return torch.empty_like(tensor, device=self.device)

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], free: Any) -> Any:
        """Copy on the stream of copies once the memory is free; return the event of its end."""
        self.stream.wait_event(free)
        with self.streams.stream(self.stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            event = self.stream.record_event()
        while self.read and self.read[0][0].query():
            self.read.popleft()
        self.read.append((event, [source for source, _ in pairs]))
        return event

    def end(self, copy: _Copy) -> Any:
        """Let the device do what it is given from here on after the copy; return the batch. The host goes on."""
        copy.hold_device()
        if copy.place != self._place():  # asked for on another stream: memory of that stream's is needed
            copy = self.begin(copy.source, None)
            copy.hold_device()
        return copy.batch


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for what is bytes on the host alone: no subclass with code of its own, no graph, no other layout."""
    is_bytes = type(tensor) in (torch.Tensor, FakeTensor) and tensor.layout == torch.strided
    is_lazy = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return is_bytes and tensor.device.type == "cpu" and not is_lazy and not tensor.is_quantized


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _pinned(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor in pinned memory, laid out as its target is: of other memory the host waits for the copy."""
    if tensor.is_pinned() and tensor.stride() == target.stride():
        return tensor
    pinned = torch.empty_strided(target.shape, target.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor)


@cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream of all copies to a device."""
    return torch.get_device_module(device).Stream(device)
