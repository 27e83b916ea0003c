"""A device that is not there: fake tensors are on it, and what a step does with them passes by a watch.

torch takes a backend that is written in Python in the place of a vendor's. Its streams and events do nothing here, as
nothing is computed. So a step's own code runs as on a GPU, up to what it would have to wait for.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "absent"
aten = torch.ops.aten
# Their results, or the shapes of these, depend on values: the host waits for them.
READS = {
    aten._local_scalar_dense.default: "a number is read",
    aten.item.default: "a number is read",
    aten.is_nonzero.default: "a number is read",
    aten.equal.default: "tensors are compared",
    aten.nonzero.default: "a shape depends on values",
    aten.masked_select.default: "a shape depends on values",
    aten._unique2.default: "a shape depends on values",
    aten.bincount.default: "a shape depends on values",
}


class Stream:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        SEEN["a stream is waited for"] += 1


COMPUTING = Stream()


class Event:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        SEEN["an event is waited for"] += 1


class Backend:
    """What torch asks of a device's module."""

    Stream, Event = Stream, Event
    stream = staticmethod(lambda stream: nullcontext())
    current_stream = staticmethod(lambda device=None: COMPUTING)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    device = staticmethod(lambda device: nullcontext())
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_rng_state = staticmethod(lambda device=None: torch.empty(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def synchronize(device: Any = None) -> None:
        SEEN["the device is waited for"] += 1


SEEN: Counter[str] = Counter()


def set_up() -> None:
    """Let there be the device; in a process of its own, as it stays."""
    _setup_privateuseone_for_python_backend(NAME, Backend())


class Watch(TorchDispatchMode):
    """Counts what is done, by what it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [
            value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        ]
        here = [tensor for tensor in tensors if tensor.device.type == NAME]
        if func in READS and here:
            SEEN[READS[func]] += 1
        if func is aten.copy_.default and args[0].device.type != args[1].device.type:
            is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self.note_copy(args[1], is_asynchronous)
        if func is aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            self.note_copy(args[0], kwargs.get("non_blocking", False))
        if "c10d" in func.namespace and tensors:
            where = "the device" if here else "the host"
            SEEN[f"{func.overloadpacket.__name__.strip('_')} on {where}"] += 1
        return func(*args, **kwargs)

    def note_copy(self, source: torch.Tensor, is_asynchronous: bool) -> None:
        if not is_asynchronous:
            SEEN["a copy is waited for"] += 1
        elif source.device.type == NAME:
            SEEN["numbers are copied to the host"] += 1
