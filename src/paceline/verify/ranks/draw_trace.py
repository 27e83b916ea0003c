"""Hash what is drawn at random: masks one by one, and all that a step draws together.

Called again in a backward pass (activation checkpointing), a draw must give what it gave forwards. Two draws of one
step must not be equal, nor those of ranks with other samples or of other pipeline stages, nor all that two steps draw.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from paceline.torch_private.autograd import is_in_backward
from paceline.torch_private.operations import FakeTensor, OpOverload, TorchDispatchMode, schema_of

_MASKS = ("aten::bernoulli", "aten::bernoulli_", "aten::native_dropout")
_NUMBERS = (
    "aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like", "aten::normal", "aten::normal_",
    "aten::uniform_", "aten::exponential_", "aten::randint", "aten::randint_like", "aten::randperm", "aten::random_",
)  # fmt: skip
_BITS = {True: 20, False: 1}  # of one number, floating or not, at least
_ENOUGH = 16  # elements that are dropped, and that stay: other masks may be equal by chance


class DrawTrace(TorchDispatchMode):
    """A context that hashes what is drawn inside it.

    Args:
        counts: a function that is asked at each draw whether it counts for `take`.

    Attributes:
        forward: the hashes of masks, going forward.
        again: the hashes of masks in backward passes.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.forward: list[int] = []
        self.again: list[int] = []
        self.digest = 0
        self.bits = 0.0

    def take(self) -> list[float]:
        """Return a hash of all that was drawn going forward from torch's own generator, and begin a step.

        With it goes of how much chance it is: what has N bits comes twice once in 2**N. Noise and small masks count
        too, so that few elements are enough to tell that two steps draw the same.
        """
        digest_and_bits = [self.digest, self.bits]
        self.digest, self.bits = 0, 0.0
        return digest_and_bits

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Run the operation; hash what it drew."""
        named = named or {}
        result = function(*arguments, **named)
        name = schema_of(function).name if isinstance(function, OpOverload) else ""
        drawn = result[1] if isinstance(result, tuple) and name in _MASKS else result
        if (name in _MASKS or name in _NUMBERS) and not isinstance(drawn, FakeTensor):
            values = drawn.detach()
            if name in _MASKS:
                values = values != 0
                self._enter_mask(values)
            if named.get("generator") is None and not is_in_backward() and self.counts():
                self.digest = _hash(values, self.digest)
                self.bits += _bits_of(values, name in _MASKS)
        return result

    def _enter_mask(self, mask: torch.Tensor) -> None:
        stay = int(mask.sum())
        if min(stay, mask.numel() - stay) >= _ENOUGH:
            hashes = self.again if is_in_backward() else self.forward
            hashes.append(_hash(mask))


def _hash(values: torch.Tensor, before: int = 0) -> int:
    return zlib.crc32(values.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), before)


def _bits_of(values: torch.Tensor, is_mask: bool) -> float:
    """Return the bits of chance; of a mask the logarithm of how many drop as many elements."""
    size = values.numel()
    if not is_mask:
        return size * _BITS[values.is_floating_point()]
    count = int(values.sum())
    return (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)


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
