"""Streams of a device that is the CPU: what is copied on another stream is copied as late as a GPU may do it.

A copy is done when the computing stream waits for an event that was recorded after it. Until then the memory that is
written holds no numbers; memory that a copy reads or writes may not be freed before. Either is found here.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Stream:
    def __init__(self, owner, device=None):
        self.owner = owner

    def wait_stream(self, other):
        self.owner.has_waited = True

    def record_event(self):
        self.owner.seen["events"] += 1
        return len(self.owner.done) + len(self.owner.queue)

    def wait_event(self, event):
        self.owner.seen["device waits"] += 1
        self.owner.do_until(event)


class DelayedCopies(TorchDispatchMode):
    """Has the functions of torch's module of a device's streams; copies are delayed while it is entered.

    Attributes:
        seen: what was done, by what it is.
        on_host: bytes that were copied to the host's memory.
    """

    def __init__(self):
        super().__init__()
        self.computing = Stream(self)
        self.current = self.computing
        self.queue = []
        self.done = []
        self.seen = Counter()
        self.has_waited = False

    def Stream(self, device=None):
        return Stream(self)

    def current_stream(self, device=None):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            if stream is not self.computing:
                self.has_waited = False
            self.current = before

    def do_until(self, event):
        while len(self.done) < event:
            target, source = self.queue.pop(0)
            self.done.append(None)
            there, here = target[0](), source[0]()
            assert there is not None, "a copy would write to freed memory"
            assert here is not None, "a copy would read freed memory"
            _whole(there, *target[1:]).copy_(_whole(here, *source[1:]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.current is self.computing:
            result = func(*args, **(kwargs or {}))
            if func is aten.empty.memory_format and result.is_floating_point():
                result.fill_(math.nan)
            return result
        if func is not aten.copy_.default:
            return func(*args, **(kwargs or {}))
        assert self.has_waited, "a copy does not wait for what was computed before it"
        target, source = args[:2]
        self.seen["copies"] += 1
        self.seen["bytes"] += source.nbytes
        self.queue.append((_kept(target), _kept(source)))
        return target


def _kept(tensor):
    return weakref.ref(tensor.untyped_storage()), tensor.dtype, tensor.storage_offset(), tensor.size()


def _whole(storage, dtype, offset, size):
    return torch.empty(0, dtype=dtype).set_(storage, offset, size)
