"""One operation as a node of a graph, run whole and on pieces."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx
from torch.utils._pytree import tree_map

from paceline.comm.differentiable import take_piece
from paceline.graph.placement import Placement, Split


def node_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """`target(*args, **kwargs)` as a node; `meta` of placeholders and of the node hold the values themselves."""
    graph = fx.Graph()

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placeholder = graph.placeholder(f"x{len(graph.nodes)}")
        placeholder.meta["val"] = value
        return placeholder

    node = graph.call_function(target, tree_map(lift, args), tree_map(lift, kwargs or {}))
    node.meta["val"] = target(*args, **(kwargs or {}))
    return node


def piece(tensor: torch.Tensor, placement: Placement, part: int, parts: int) -> torch.Tensor:
    """What a rank has of `tensor` when it lies so."""
    return tensor if placement is None else take_piece(tensor, (placement.dim, placement.blocks), part, parts)


def randn(draw: Any, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def randint(draw: Any, below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 1000))))


def shape_of_rank(draw: Any, least: int, most: int, smallest: int = 1, largest: int = 6) -> list[int]:
    return draw(st.lists(st.integers(smallest, largest), min_size=least, max_size=most))


@st.composite
def blocks_of(draw: Any, size: int) -> tuple[int, ...]:
    """`size` as a sum of one to three blocks: equal ones, as of fused matrices, or any."""
    count = draw(st.integers(1, min(3, size)))
    if size % count == 0 and draw(st.booleans()):
        return (size // count,) * count
    places = sorted(draw(st.permutations(range(1, size)))[: count - 1])
    return tuple(b - a for a, b in zip([0, *places], [*places, size], strict=True))


@st.composite
def split_of(draw: Any, shape: tuple[int, ...]) -> Split:
    """A split of one of the dimensions that have more than one index."""
    dim = draw(st.sampled_from([dim for dim, size in enumerate(shape) if size > 1]))
    return Split(dim, draw(blocks_of(shape[dim])))
