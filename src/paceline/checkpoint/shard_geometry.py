"""Placements as boxes: which part of a tensor fills which place of another. Pure geometry, no torch.

Every part is a few boxes of the full tensor. Moving elements from the parts that one mesh wrote to the
part that a rank of another mesh wants is then the intersection of boxes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.nouns.shard_spec import FLAT, ShardSpec

Range = tuple[int, int]  # start, stop
_REMEMBERED = 2**16  # placements: a model's layers, and each parameter's optimizer state, share theirs

_PRIME = 2**61 - 1
_SECRET = secrets.token_bytes(16)  # nobody can write parts that overlap and still have the right sum


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the full tensor, and where a part holds it."""

    box: tuple[Range, ...]  # in the full tensor
    inside: tuple[Range, ...]  # in the window
    window: tuple[int, ...]  # a stretch of a flat part, seen as a box of this shape; of other parts, their shape
    offset: int  # where that stretch begins in a flat part
    is_flat: bool

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(stop - start for start, stop in self.box)

    def of(self, part: Any, inside: Sequence[Range]) -> Any:
        """The stretch `inside` of this piece's window, as a view of `part`: a torch tensor or a numpy array."""
        if self.is_flat:
            part = part[self.offset : self.offset + math.prod(self.window)].reshape(self.window)
        return part[(..., *(slice(start, stop) for start, stop in inside))]  # `...`: numpy's view of a scalar too


@lru_cache(_REMEMBERED)
def pieces(shard_spec: ShardSpec) -> tuple[Box, ...]:
    """The boxes of which a part is made, in its own order; none of them is empty."""
    grid = [[(0, size)] if size else [] for size in shard_spec.shape]  # of each dim, the ranges that are kept
    flat: list[Range] | None = None  # after a FLAT cut: what is kept of the grid, flattened
    for cut in shard_spec.cuts:
        if flat is not None:
            flat = _select(flat, cut.ranges)
        elif cut.dim == FLAT:
            flat = _select([(0, math.prod(map(_length, grid)))], cut.ranges)
        else:
            grid[cut.dim] = _select(grid[cut.dim], cut.ranges)
    shape = tuple(map(_length, grid))
    if flat is None:
        return tuple(_pieces_of_window(grid, [(0, size) for size in shape], shape, 0, False))
    found: list[Box] = []
    offset = 0
    for start, stop in flat:
        for box in _boxes_of_stretch(shape, start, stop):
            window = tuple(end - begin for begin, end in box)
            found += _pieces_of_window(grid, box, window, offset, True)
            offset += math.prod(window)
    return tuple(found)


def _length(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _select(ranges: Sequence[Range], kept: Sequence[Range]) -> list[Range]:
    """What is left of `ranges`, laid end to end, when only `kept` stays of them."""
    left: list[Range] = []
    at = 0
    for start, stop in ranges:
        for first, last in kept:
            low, high = max(first, at), min(last, at + stop - start)
            if low < high:
                low, high = low - at + start, high - at + start
                if left and left[-1][1] == low:
                    low = left.pop()[0]
                left.append((low, high))
        at += stop - start
    return left


def _boxes_of_stretch(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Range, ...]]:
    """Elements start..stop of a flattened tensor as boxes, in order: a ragged head, whole rows, a ragged tail."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    if start % row:
        first = start // row
        end = min(stop, (first + 1) * row)
        for box in _boxes_of_stretch(shape[1:], start - first * row, end - first * row):
            yield ((first, first + 1), *box)
        start = end
    if start // row < stop // row:
        yield ((start // row, stop // row), *((0, size) for size in shape[1:]))
    if start < stop:
        last = stop // row
        for box in _boxes_of_stretch(shape[1:], max(start - last * row, 0), stop - last * row):
            yield ((last, last + 1), *box)


def _pieces_of_window(
    grid: Sequence[Sequence[Range]], box: Sequence[Range], window: tuple[int, ...], offset: int, is_flat: bool
) -> Iterator[Box]:
    """A box of what the grid keeps, split where the grid has gaps in the full tensor."""
    sides: list[list[tuple[Range, Range]]] = []  # of each dim: (in the full tensor, in the window)
    for ranges, (first, last) in zip(grid, box, strict=True):
        side, at = [], 0
        for start, stop in ranges:
            low, high = max(first, at), min(last, at + stop - start)
            if low < high:
                side.append(((low - at + start, high - at + start), (low - first, high - first)))
            at += stop - start
        sides.append(side)
    for choice in itertools.product(*sides):
        yield Box(tuple(full for full, _ in choice), tuple(own for _, own in choice), window, offset, is_flat)


def move(target: Any, wanted: ShardSpec, source: Any, held: ShardSpec) -> None:
    """Copy into the part `target` what the part `source` of the same tensor has of it.

    Both are arrays of one kind and dtype (torch or numpy), of their placements' local shapes.
    """
    for to in pieces(wanted):
        for come in pieces(held):
            box = _intersection(to.box, come.box)
            if box is not None:
                to.of(target, _within(to, box))[...] = come.of(source, _within(come, box))


def is_needed(wanted: ShardSpec, held: ShardSpec) -> bool:
    """Whether the part `held` has any element of the part `wanted`."""
    return any(_intersection(a.box, b.box) is not None for a in pieces(wanted) for b in pieces(held))


def _intersection(one: Sequence[Range], other: Sequence[Range]) -> tuple[Range, ...] | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _within(piece: Box, box: Sequence[Range]) -> list[Range]:
    """Where in the piece's window a box of the full tensor lies."""
    return [
        (low - start + inside, high - start + inside)
        for (low, high), (start, _), (inside, _) in zip(box, piece.box, piece.inside, strict=True)
    ]


@lru_cache(_REMEMBERED)
def fault_of_cover(shape: tuple[int, ...], parts: tuple[ShardSpec, ...]) -> str | None:
    """What is wrong with `parts` as all of a tensor: None if they have each element once.

    The time grows with the number of boxes, not with that of pairs of them. Every index along a dimension has a random
    weight, an element the product of its indices' weights, and a box the sum of its elements' weights: a product of
    differences. If the boxes' sum is the tensor's, each element is there once. By the Schwartz-Zippel lemma another
    cover has that sum in one case of 2^61 for each dimension.
    """
    found = [piece for part in parts for piece in pieces(part)]
    numel, held = math.prod(shape), sum(piece.numel for piece in found)
    if held < numel:
        return f"its parts have {held} of {numel} elements"
    if sum(_weight(piece.box) for piece in found) % _PRIME != _weight([(0, size) for size in shape]):
        return "two of its parts overlap"
    return None


def _weight(box: Sequence[Range]) -> int:
    weight = 1
    for dim, (start, stop) in enumerate(box):
        weight = weight * (_weight_below(dim, stop) - _weight_below(dim, start)) % _PRIME
    return weight


@lru_cache(_REMEMBERED)
def _weight_below(dim: int, index: int) -> int:
    """The sum of the weights of a dimension's first `index` indices."""
    if index == 0:
        return 0
    digest = hashlib.blake2b(f"{dim} {index}".encode(), key=_SECRET, digest_size=8).digest()
    return int.from_bytes(digest, "big") % _PRIME


def most_pieces(shard_spec: ShardSpec) -> int:
    """At least as many as `pieces` would find, and its work; known without finding them."""
    counts = [1] * len(shard_spec.shape)
    flat = 0
    for cut in shard_spec.cuts:
        if flat or cut.dim == FLAT:
            flat = max(flat, 1) * max(1, len(cut.blocks))
        else:
            counts[cut.dim] *= max(1, len(cut.blocks))
    # A stretch of a flattened box is a ragged head, whole rows and a ragged tail along each dimension.
    return math.prod(counts) * (flat * (2 * len(counts) + 1) if flat else 1)


def is_sound(shard_spec: ShardSpec) -> bool:
    """Whether every cut fits what the one before left, as one that was read from a file may not."""
    shape = shard_spec.shape
    for cut in shard_spec.cuts:
        if not (FLAT <= cut.dim < len(shape) and 0 <= cut.part < cut.parts):
            return False
        if sum(cut.blocks) != (math.prod(shape) if cut.dim == FLAT else shape[cut.dim]):
            return False
        shape = ShardSpec(shape, (cut,)).local_shape
    return True
