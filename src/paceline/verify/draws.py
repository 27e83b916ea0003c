"""Looks at every mask that is drawn: how else could a wrong one be told from a right one?

Called again in a backward pass (activation checkpointing), a draw must give what it gave forwards. Two draws of one
step must not be equal, nor those of ranks with other samples.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_DRAWN = (aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.bernoulli.default, aten.bernoulli.p, aten.rand.default)
_ENOUGH = 16  # elements that are dropped, and that stay: other masks may be equal by chance


class Draws(TorchDispatchMode):
    """A context: `forward` and `again` are hashes of the masks drawn going forward and in backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: list[int] = []
        self.again: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Run the operation; remember what it drew."""
        result = function(*arguments, **(named or {}))
        if function in _DRAWN and isinstance(result, torch.Tensor) and not isinstance(result, FakeTensor):
            kept = (result.detach() != 0).to(torch.uint8).contiguous()
            if min(int(kept.sum()), kept.numel() - int(kept.sum())) >= _ENOUGH:
                seen = self.forward if torch._C._current_graph_task_id() == -1 else self.again
                seen.append(zlib.crc32(kept.numpy().tobytes()))
        return result
