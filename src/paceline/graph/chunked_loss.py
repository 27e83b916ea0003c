"""torch's loss of a large vocabulary by chunks (`F.linear_cross_entropy` with options), in a graph.

By chunks it is one operation with gradients of its own, which nothing can split. A graph has the product and the loss
that it stands for: under `tensor` they are split by vocabulary, which chunks would be cut out of. Where a model runs by
its own code, under `replicate` and `shard`, its chunks stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LOSS = getattr(F, "linear_cross_entropy", None)  # torch 2.11 has none


class WithoutChunks(TorchFunctionMode):
    """Compute the loss of linear layers as torch's reference does, inside.

    Attributes:
        is_met: chunks were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is _LOSS and _LOSS is not None:
            self.is_met |= named.get("options") is not None
            named["options"] = None
        return func(*args, **named)


def body_of(operation: Any) -> Callable[..., Any] | None:
    """Return the code of a loss by chunks; None for any other operation.

    On tensors without values torch makes its result at once. What it holds meanwhile, and computes, its code shows.
    """
    if getattr(operation, "namespace", "") != "torch_nn":
        return None
    definition = OPDEFS.get(operation._name)
    return None if definition is None else definition._init_fn
