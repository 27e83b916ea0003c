"""Draw in one process what the ranks of a job draw, each for its samples.

Every rank draws from a generator of its own. One process that computes the whole batch draws each tensor in as many
parts as there are ranks, from a copy of each rank's generator, and puts them together along the dimension of the
samples. Whether that is what the ranks did is known afterwards: then the copies are where the ranks' generators are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_UNTAGGED = ("_sample_dirichlet", "binomial")  # they draw, and torch does not say so
_RESULT_LIKE_SIZE = ("rand", "randn", "randint")


class RankDraws(TorchDispatchMode):
    """A dispatch mode in which each draw is that of the ranks.

    Args:
        states: of the ranks' generators, in the order in which the batch has their samples.
        samples: of each rank.

    Attributes:
        has_drawn: something was drawn.
        is_certain: each draw can belong to the samples in one way only.
    """

    def __init__(self, states: Sequence[torch.Tensor], samples: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states = list(states)
        self.samples = samples
        self.has_drawn = False
        self.is_certain = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; one that draws once for each rank."""
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        is_drawing = torch.Tag.nondeterministic_seeded in function.tags
        if not is_drawing and not name.startswith("random") and name not in _UNTAGGED:
            return function(*args, **kwargs)
        if kwargs.get("dropout_p", 1.0) == 0.0 or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        return self._draw(function, name, args, kwargs)

    def _draw(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.has_drawn = True
        is_by_size = name in _RESULT_LIKE_SIZE
        place = _place_of_size(function) if is_by_size else 0
        shape = tuple(args[place]) if is_by_size else tuple(args[0].shape) if _is_tensor(args) else ()
        dims = [dim for dim, size in enumerate(shape) if size and size % sum(self.samples) == 0]
        if not dims:
            self.is_certain = False
            return function(*args, **kwargs)
        self.is_certain &= len(dims) == 1 or len(set(self.samples)) > 1
        dim = dims[0]
        sizes = [shape[dim] // sum(self.samples) * count for count in self.samples]
        parts = []
        for rank, (start, size) in enumerate(zip(_starts(sizes), sizes, strict=True)):
            if is_by_size:
                part_shape = [*shape[:dim], size, *shape[dim + 1 :]]
                own = (*args[:place], part_shape, *args[place + 1 :])
            else:
                own = tuple(_part(value, shape, dim, start, size) for value in args)
            if size:
                parts.append(self._of_rank(rank, function, own, kwargs))
        return _together(parts, dim, args[0] if function._schema.is_mutable else None)

    def _of_rank(self, rank: int, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[rank])
        try:
            return function(*args, **kwargs)
        finally:
            self.states[rank] = torch.get_rng_state()
            torch.set_rng_state(before)


def _is_tensor(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor)


def _place_of_size(function: Any) -> int:
    return next(number for number, each in enumerate(function._schema.arguments) if each.name == "size")


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return starts


def _part(value: Any, shape: tuple[int, ...], dim: int, start: int, size: int) -> Any:
    """Return a rank's part of an argument that has the shape of what is drawn, with memory as the rank has it."""
    if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
        return value.narrow(dim, start, size).clone()
    return value


def _together(parts: Sequence[Any], dim: int, written: torch.Tensor | None) -> Any:
    if written is not None:
        return written.copy_(torch.cat([part for part in parts], dim))
    if isinstance(parts[0], tuple):
        return tuple(torch.cat([part[index] for part in parts], dim) for index in range(len(parts[0])))
    return torch.cat(list(parts), dim)
