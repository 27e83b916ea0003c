"""Hash all that forward passes draw in a step: two steps that draw the same have the same dropout.

`dropout_trace.py` looks at masks one by one. Here everything counts together, noise and small masks too, so that few
elements are enough to tell that it is no chance.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASKS = ("aten::bernoulli", "aten::bernoulli_", "aten::native_dropout")
_NUMBERS = (
    "aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like", "aten::normal", "aten::normal_",
    "aten::uniform_", "aten::exponential_", "aten::randint", "aten::randint_like", "aten::randperm", "aten::random_",
)  # fmt: skip
_BITS = {True: 20, False: 1}  # of one number, floating or not, at least


class DrawDigest(TorchDispatchMode):
    """A context that hashes what is drawn inside it from torch's own generator, outside of backward passes.

    Args:
        counts: asked at each draw whether it counts.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.digest = 0
        self.bits = 0.0  # of chance: a number that has these bits comes twice once in 2**bits

    def take(self) -> list[float]:
        """Return digest and bits, and begin a step."""
        taken = [self.digest, self.bits]
        self.clear()
        return taken

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Run the operation; hash what it drew."""
        result = function(*arguments, **(named or {}))
        name = function._schema.name if isinstance(function, torch._ops.OpOverload) else ""
        if name in _MASKS or name in _NUMBERS:
            self._enter(name, result, named or {})
        return result

    def _enter(self, name: str, result: Any, named: dict[str, Any]) -> None:
        drawn = result[1] if isinstance(result, tuple) else result
        is_of_stream = named.get("generator") is None and torch._C._current_graph_task_id() == -1
        if not is_of_stream or isinstance(drawn, FakeTensor) or not self.counts():
            return
        values = (drawn.detach() != 0) if name in _MASKS else drawn.detach()
        self.digest = zlib.crc32(values.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), self.digest)
        self.bits += _bits_of_mask(values) if name in _MASKS else values.numel() * _BITS[values.is_floating_point()]


def _bits_of_mask(mask: torch.Tensor) -> float:
    """Return the logarithm of how many masks drop as many elements."""
    size, kept = mask.numel(), int(mask.sum())
    return (math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)) / math.log(2)


def is_called_by(model: torch.nn.Module) -> bool:
    """True if a module of `model` is running: a data set draws too."""
    modules = set(model.modules())
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module) and caller in modules:
            return True
        frame = frame.f_back
    return False
