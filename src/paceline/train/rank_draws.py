"""Draw in one process what the ranks of a job draw, each for its samples.

Every rank draws from a generator of its own. One process that computes the whole batch draws each tensor in as many
parts as there are ranks, from a copy of each rank's generator, and puts them together along the dimension of the
samples. Whether that is what the ranks did is known afterwards: then the copies are where the ranks' generators are.

Activation checkpointing runs a part of the model again with the random state that it had. So torch's own generator
counts the draws: its seed says which one comes next, and one that came before is drawn again from the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.torch_private.operations import TorchDispatchMode, schema_of

_UNTAGGED = ("_sample_dirichlet", "binomial")  # they draw, and torch does not say so
_BY_SIZE = ("rand", "randn", "randint")  # of a size in place of a tensor
_SEED = 0x5EED_0000_0000  # of the first draw


def is_drawing(function: Any) -> bool:
    """Return whether an operation draws random numbers."""
    name = function.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in function.tags or name.startswith("random") or name in _UNTAGGED


class RankDraws(TorchDispatchMode):
    """A dispatch mode in which each draw is that of the ranks.

    Args:
        states: the states of the ranks' generators, in the order in which the batch has their samples.

    Attributes:
        states: the states of the generators after the draws so far.
        samples: the number of samples of each rank in the batch that is being computed.
        shapes: the shapes of the tensors that were drawn.
        dims: the dimension of the samples in each draw, where that is known; None: the first dimension that it can be.
        is_certain: True if each draw can belong to the samples in one way only.
    """

    def __init__(self, states: Sequence[torch.Tensor], dims: Sequence[int | None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states = list(states)
        self.samples: Sequence[int] = [0] * len(states)
        self.shapes: list[tuple[int, ...]] = []
        self.dims = dims
        self.is_certain = True
        self.before: list[list[torch.Tensor]] = []  # by draw, the states that it began with
        torch.default_generator.manual_seed(_SEED)

    @property
    def has_drawn(self) -> bool:
        """Return whether something was drawn."""
        return bool(self.shapes)

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; one that draws once for each rank."""
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if not is_drawing(function):
            return function(*args, **kwargs)
        names = [argument.name for argument in schema_of(function).arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if "dropout_p" in names:  # attention in one kernel: its draws are not to be had
            self.is_certain &= arguments.get("dropout_p", 0.0) == 0.0
            return function(*args, **kwargs)
        if arguments.get("generator") is not None:
            return function(*args, **kwargs)
        number = torch.initial_seed() - _SEED
        if not 0 <= number <= len(self.before):  # the model seeds torch itself
            self.is_certain = False
            return function(*args, **kwargs)
        now = self.states
        if number == len(self.before):
            self.before.append(list(now))
        else:
            self.states = list(self.before[number])
        try:
            return self._draw(number, function, name, args, kwargs)
        finally:
            if number + 1 < len(self.before):
                self.states = now
            torch.default_generator.manual_seed(_SEED + number + 1)

    def _draw(self, number: int, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _place_of_size(function) if name in _BY_SIZE else None
        if place is not None:
            shape = tuple(args[place])
        else:
            shape = tuple(args[0].shape) if args and isinstance(args[0], torch.Tensor) else ()
        if number == len(self.shapes):
            self.shapes.append(shape)
        of_one = [rank for rank, count in enumerate(self.samples) if count]
        if len(of_one) == 1:
            return self._of_rank(of_one[0], function, args, kwargs)
        dim = self._dim(number, shape)
        if dim is None:
            self.is_certain = False
            return function(*args, **kwargs)
        sizes = [shape[dim] // sum(self.samples) * count for count in self.samples]
        parts = []
        start = 0
        for rank, size in enumerate(sizes):
            if place is not None:
                arguments_of_rank = (*args[:place], [*shape[:dim], size, *shape[dim + 1 :]], *args[place + 1 :])
            else:
                arguments_of_rank = tuple(_part(value, shape, dim, start, size) for value in args)
            if size:
                parts.append(self._of_rank(rank, function, arguments_of_rank, kwargs))
            start += size
        return _together(parts, dim, args[0] if schema_of(function).is_mutable else None)

    def _dim(self, number: int, shape: tuple[int, ...]) -> int | None:
        if self.dims is not None:
            return self.dims[number] if number < len(self.dims) else None
        possible = [dim for dim, size in enumerate(shape) if size and size % sum(self.samples) == 0]
        self.is_certain &= len(possible) == 1
        return possible[0] if possible else None

    def _of_rank(self, rank: int, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        torch.set_rng_state(self.states[rank])
        result = function(*args, **kwargs)
        self.states[rank] = torch.get_rng_state()
        return result


def dims_of_samples(
    batch_shapes: Sequence[tuple[int, ...]], part_shapes: Sequence[tuple[int, ...]]
) -> list[int | None] | None:  # fmt: skip
    """Return the samples' dimension of each draw: that in which a smaller batch differs.

    Args:
        batch_shapes: the shapes of the tensors that are drawn for a batch.
        part_shapes: the shapes of the tensors that are drawn for a part of it.

    Returns:
        None for a draw that has no such dimension, or several; None for all where the numbers of draws differ.
    """
    if len(batch_shapes) != len(part_shapes):
        return None
    dims: list[int | None] = []
    for shape, smaller in zip(batch_shapes, part_shapes, strict=True):
        differ = []
        if len(shape) == len(smaller):
            differ = [dim for dim, sizes in enumerate(zip(shape, smaller, strict=True)) if sizes[0] != sizes[1]]
        dims.append(differ[0] if len(differ) == 1 else None)
    return dims


def _place_of_size(function: Any) -> int:
    return next(number for number, argument in enumerate(schema_of(function).arguments) if argument.name == "size")


def _part(value: object, shape: tuple[int, ...], dim: int, start: int, size: int) -> object:
    """Return a rank's part of an argument, with memory as the rank has it; all of one that is alike for all samples."""
    if not isinstance(value, torch.Tensor):
        return value
    own_dim = dim - len(shape) + value.dim()  # as shapes are broadcast: from the last dimension
    if own_dim < 0 or value.shape[own_dim] != shape[dim]:
        return value
    return value.narrow(own_dim, start, size).clone()


def _together(parts: Sequence[Any], dim: int, written: torch.Tensor | None) -> Any:
    if written is not None:
        return written.copy_(torch.cat(list(parts), dim))
    if isinstance(parts[0], tuple):
        return tuple(torch.cat([part[index] for part in parts], dim) for index in range(len(parts[0])))
    return torch.cat(list(parts), dim)
