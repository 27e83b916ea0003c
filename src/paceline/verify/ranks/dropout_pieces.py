"""Hash on ranks of `tensor` the piece of each dropout mask that each rank keeps.

The pieces that the ranks keep must make up the mask that one rank would draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.nn import functional as F

from paceline.comm.differentiable import split_dropout
from paceline.graph.placement import Split
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.torch_private.autograd import is_in_backward
from paceline.torch_private.operations import FakeTensor, OpOverload, disable_current_modes
from paceline.verify.judge.compare import take

aten = torch.ops.aten
MaskPiece = tuple[str, int, int]  # module, hash of what this rank keeps, hash of what one rank would keep


def watch_pieces(pieces: list[MaskPiece], sharing: int) -> Callable[[fx.Graph], None]:
    """Return a function that lets every split dropout of a graph enter in `pieces` which elements it keeps.

    Args:
        pieces: the list that gets an entry for each call, in the order of the calls.
        sharing: the number of ranks that share a mask: those of `tensor` and `context`.
    """

    def add(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is split_dropout:
                node.target = _with_piece(pieces, node, sharing)
            elif _draws_for_itself(node):
                node.target = _with_wrong_piece(pieces, node)

    return add


def _draws_for_itself(node: fx.Node) -> bool:
    """True if an operation on a piece draws its own random numbers: those of other ranks' pieces would be equal."""
    is_random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    placements = [node.meta.get("lies"), node.meta.get("lies_on_context")]
    if not is_random or not any(isinstance(placement, Split) for placement in placements):
        return False
    if node.target is not aten.scaled_dot_product_attention.default:
        return True
    share = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return bool(share)


def _with_wrong_piece(pieces: list[MaskPiece], node: fx.Node) -> Callable[..., Any]:
    """Return the node's operation, which enters a piece that is part of no mask."""
    module = node.meta.get("module", "")
    operation = node.target
    assert callable(operation)

    def recorded(*arguments: Any, **named: Any) -> Any:
        pieces.append((module, 0, 1))  # hashes of pieces that are 0 never add up to 1
        return operation(*arguments, **named)

    return recorded


def _with_piece(pieces: list[MaskPiece], node: fx.Node, sharing: int) -> Callable[..., torch.Tensor]:
    """Return the node's split dropout, which enters what it keeps beside what one rank would keep."""
    module = node.meta.get("module", "")

    def recorded_dropout(
        tensor: torch.Tensor, share: float, is_training: bool, shape: tuple[int, ...], *places: Any
    ) -> torch.Tensor:
        draws = is_training and 0 < share < 1
        if draws and not is_in_backward() and not isinstance(tensor, FakeTensor):
            with disable_current_modes(), torch.no_grad():  # `DrawTrace` must not count these draws
                # Both masks from the state that the real draw below will start from, which is put back each time.
                state = torch.get_rng_state()
                piece = split_dropout(torch.ones_like(tensor), share, is_training, shape, *places)
                torch.set_rng_state(state)
                full_mask = F.dropout(torch.ones(shape, dtype=tensor.dtype), share)
                torch.set_rng_state(state)
            cuts = tuple(Cut(dim, blocks, part, parts) for (dim, blocks), part, parts in places)
            piece_hash = _sum_of_places(piece, ShardSpec(tuple(shape), cuts))
            full_hash = _sum_of_places(full_mask, ShardSpec(tuple(shape)))
            # Ranks of an axis that does not split the mask keep the same piece.
            copies = sharing // math.prod(cut.parts for cut in cuts)
            pieces.append((module, piece_hash, full_hash * copies))
        return split_dropout(tensor, share, is_training, shape, *places)

    return recorded_dropout


def _sum_of_places(mask: torch.Tensor, shard_spec: ShardSpec) -> int:
    """Hash the places of a full tensor where `mask` is not zero; the hashes of pieces add up to the full tensor's."""
    places = take(np.arange(shard_spec.numel, dtype=np.int64).reshape(shard_spec.shape), shard_spec)
    mixed = ((places + 1) * 0x9E3779B1) & 0x7FFFFFFF  # multiplicative hashing (Knuth); 31 bits, so that sums fit
    return int(mixed[(mask != 0).numpy()].sum())
