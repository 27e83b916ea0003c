"""Read a few numbers of a device on the host while the device goes on with what it was given after them.

`tensor.tolist()` waits until the device has done all that it was given, the backward pass too, and has nothing to do
while the host gives it the next. Here the numbers are copied on a stream of their own, to memory that the device can
write to by itself, and the host waits only for that copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class HostCopy:
    """The copy of one small tensor, made anew in each step.

    Args:
        numel: the number of its elements.
        dtype: the dtype of its elements.
        device: the device of the tensor; not the CPU, on which nothing has to be waited for.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.streams: Any = torch.get_device_module(device)
        self.device = device
        self.stream = _stream_of(device)
        self.event = self.streams.Event()
        self.numbers = torch.empty(numel, dtype=dtype, pin_memory=True)
        self.copied: torch.Tensor | None = None

    def begin(self, make: Callable[[], torch.Tensor]) -> None:
        """Copy what `make` returns, once the device has done what it was given so far.

        Args:
            make: is called on the stream of the copy, and may wait there for the other ranks.
        """
        self.stream.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.stream):
            self.copied = make()  # held on to until it is read: its memory may not become another tensor's before
            self.numbers.copy_(self.copied, non_blocking=True)
            self.event.record()

    def hold_device(self) -> None:
        """Let the device do what it is given from here on after the copy; the host goes on."""
        self.streams.current_stream(self.device).wait_event(self.event)

    def read(self) -> list[float]:
        """Wait for the copy; return the numbers."""
        self.event.synchronize()
        self.copied = None
        read: list[float] = self.numbers.tolist()
        return read


@cache
def _stream_of(device: torch.device) -> Any:
    """Return the stream of all copies from a device."""
    return torch.get_device_module(device).Stream(device)
