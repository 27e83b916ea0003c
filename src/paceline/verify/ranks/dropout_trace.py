"""Hash every dropout mask that is drawn, and on ranks of `tensor` the piece of it that each one keeps.

Called again in a backward pass (activation checkpointing), a draw must give what it gave forwards. Two draws of one
step must not be equal, nor those of ranks with other samples or of other pipeline stages. The pieces that the ranks of
`tensor` keep must make up the mask that one rank would draw.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from paceline.comm.differentiable import split_dropout
from paceline.graph.placement import Split
from paceline.nouns.shard_spec import ShardSpec
from paceline.verify.judge.compare import take

aten = torch.ops.aten
_DRAWN = (aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.bernoulli.default, aten.bernoulli.p, aten.rand.default)
_ENOUGH = 16  # elements that are dropped, and that stay: other masks may be equal by chance


class DropoutTrace(TorchDispatchMode):
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


Kept = tuple[str, int, int]  # module, hash of what this rank keeps, hash of what one rank would keep


def watch_pieces(kept: list[Kept], part: int, parts: int) -> Callable[[fx.Graph], None]:
    """A function that has every split dropout of a graph note in `kept` which elements it keeps.

    Args:
        kept: gets an entry for each call, in the order of the calls.
        part: this rank on the `tensor` axis.
        parts: size of that axis.
    """

    def add(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is split_dropout:
                node.target = _noting(kept, node, part, parts)
            elif _draws_for_itself(node):
                node.target = _noting_a_draw(kept, node)

    return add


def _draws_for_itself(node: fx.Node) -> bool:
    """Whether an operation on a piece draws its own random numbers: those of other ranks' pieces would be equal."""
    is_random = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    if not is_random or not isinstance(node.meta.get("lies"), Split):
        return False
    if node.target is not aten.scaled_dot_product_attention.default:
        return True
    share = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return bool(share)


def _noting_a_draw(kept: list[Kept], node: fx.Node) -> Callable[..., Any]:
    module, plain = node.meta.get("module", ""), node.target
    assert callable(plain)

    def noted(*arguments: Any, **named: Any) -> Any:
        kept.append((module, 0, 1))  # no piece of any whole mask
        return plain(*arguments, **named)

    return noted


def _noting(kept: list[Kept], node: fx.Node, part: int, parts: int) -> Callable[..., torch.Tensor]:
    module, split = node.meta.get("module", ""), node.meta["lies"]

    def noted_dropout(
        tensor: torch.Tensor, share: float, is_training: bool, shape: tuple[int, ...], *place: Any
    ) -> torch.Tensor:
        is_first_time = torch._C._current_graph_task_id() == -1
        if is_training and 0 < share < 1 and is_first_time and not isinstance(tensor, FakeTensor):
            with _disable_current_modes(), torch.no_grad():  # `DropoutTrace` must not count these draws
                state = torch.get_rng_state()
                own = split_dropout(torch.ones_like(tensor), share, is_training, shape, *place)
                torch.set_rng_state(state)
                whole = F.dropout(torch.ones(shape, dtype=tensor.dtype), share)
                torch.set_rng_state(state)
            shard_spec = split.shard_spec(tuple(shape), part, parts)
            kept.append((module, _sum_of_places(own, shard_spec), _sum_of_places(whole, ShardSpec(tuple(shape)))))
        return split_dropout(tensor, share, is_training, shape, *place)

    return noted_dropout


def _sum_of_places(mask: torch.Tensor, shard_spec: ShardSpec) -> int:
    """A hash of the places of a whole tensor where `mask` is not zero; those of pieces add up to the whole's."""
    places = take(np.arange(shard_spec.numel, dtype=np.int64).reshape(shard_spec.shape), shard_spec)
    mixed = ((places + 1) * 0x9E3779B1) & 0x7FFFFFFF
    return int(mixed[(mask != 0).numpy()].sum())
