"""Turn shard specs into boxes, and copy from part to part by their intersections. Pure geometry, no torch.

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
_CACHE_SIZE = 2**16  # shard specs: a model's layers, and each parameter's optimizer state, share theirs

_PRIME = 2**61 - 1  # a Mersenne prime: the weights of `fault_of_cover` are numbers modulo it
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
        """Return the stretch `inside` of this box's window as a view of `part`, a torch tensor or a numpy array."""
        if self.is_flat:
            part = part[self.offset : self.offset + math.prod(self.window)].reshape(self.window)
        slices = [slice(start, stop) for start, stop in inside]
        return part[(..., *slices)]  # `...`: numpy's view of a scalar too


@lru_cache(_CACHE_SIZE)
def boxes_of(shard_spec: ShardSpec) -> tuple[Box, ...]:
    """Return the boxes of which a part is made, in its own order; none of them is empty."""
    grid: list[list[Range]] = []  # of each dim, the ranges that stay
    for size in shard_spec.shape:
        # A dim of size 0 has no range, so nothing is made of it: no box is empty.
        grid.append([(0, size)] if size else [])
    flat: list[Range] | None = None  # after a FLAT cut: what stays of the grid, flattened
    for cut in shard_spec.cuts:
        # Each cut selects from what the ones before it selected, as one of `shard` does after one of `tensor`.
        if flat is not None:
            flat = _select(flat, cut.ranges)
        elif cut.dim == FLAT:
            flat = _select([(0, math.prod(map(_length, grid)))], cut.ranges)
        else:
            grid[cut.dim] = _select(grid[cut.dim], cut.ranges)
    shape = tuple(map(_length, grid))
    if flat is None:
        return tuple(_boxes_of_window(grid, [(0, size) for size in shape], shape, 0, False))
    boxes: list[Box] = []
    offset = 0
    # A stretch of a flattened part is no box of it, but a few: they lie one after the other in memory.
    for start, stop in flat:
        for box in _boxes_of_stretch(shape, start, stop):
            window = tuple(end - begin for begin, end in box)
            boxes += _boxes_of_window(grid, box, window, offset, True)
            offset += math.prod(window)
    return tuple(boxes)


def _length(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _select(ranges: Sequence[Range], selection: Sequence[Range]) -> list[Range]:
    """Lay `ranges` end to end, keep only the offsets in `selection`, and return the remainder of each range."""
    selected: list[Range] = []
    for start, stop, offset in _laid_out(ranges):
        for first, last in selection:
            low = max(first, offset)
            high = min(last, offset + stop - start)
            if low >= high:
                continue
            low += start - offset
            high += start - offset
            if selected and selected[-1][1] == low:  # two ranges that touch become one
                low = selected.pop()[0]
            selected.append((low, high))
    return selected


def _laid_out(ranges: Sequence[Range]) -> Iterator[tuple[int, int, int]]:
    """Yield every range's start and stop, and its offset when the ranges are laid end to end."""
    offset = 0
    for start, stop in ranges:
        yield start, stop, offset
        offset += stop - start


def _boxes_of_stretch(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Range, ...]]:
    """Yield elements start..stop of a flattened tensor as boxes: a ragged head, whole rows, a ragged tail."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    # elements of one index of the first dim
    row = math.prod(shape[1:])
    # A ragged head: it begins inside a row, and is cut by the same rule one dim further in.
    if start % row:
        first = start // row
        end = min(stop, (first + 1) * row)
        for box in _boxes_of_stretch(shape[1:], start - first * row, end - first * row):
            yield ((first, first + 1), *box)
        start = end
    # Whole rows: one box.
    if start // row < stop // row:
        full_dims = [(0, size) for size in shape[1:]]
        yield ((start // row, stop // row), *full_dims)
    if start < stop:
        last = stop // row
        for box in _boxes_of_stretch(shape[1:], max(start - last * row, 0), stop - last * row):
            yield ((last, last + 1), *box)


def _boxes_of_window(
    grid: Sequence[Sequence[Range]], box: Sequence[Range], window: tuple[int, ...], offset: int, is_flat: bool
) -> Iterator[Box]:
    """Yield a box of what the grid keeps, split where the grid has gaps in the full tensor."""
    sides: list[list[tuple[Range, Range]]] = []  # of each dim: (in the full tensor, in the window)
    for ranges, (first, last) in zip(grid, box, strict=True):
        side = []
        for start, stop, at in _laid_out(ranges):
            low = max(first, at)
            high = min(last, at + stop - start)
            if low < high:
                in_tensor = (low - at + start, high - at + start)
                in_window = (low - first, high - first)
                side.append((in_tensor, in_window))
        sides.append(side)
    # The kept ranges of each dim are independent, so boxes are their products.
    for combination in itertools.product(*sides):
        in_tensor_ranges = tuple(in_tensor for in_tensor, _ in combination)
        in_window_ranges = tuple(in_window for _, in_window in combination)
        yield Box(in_tensor_ranges, in_window_ranges, window, offset, is_flat)


def move(target: Any, target_spec: ShardSpec, source: Any, source_spec: ShardSpec) -> None:
    """Copy the elements that both parts of a tensor have from `source` to `target`.

    Both are arrays of one kind and dtype (torch or numpy), of their shard specs' local shapes.
    """
    # Pairs of boxes: a part has few (up to 20, see manifest_schema.py).
    for target_box in boxes_of(target_spec):
        for source_box in boxes_of(source_spec):
            box = _intersection(target_box.box, source_box.box)
            if box is not None:
                elements = source_box.of(source, _within(source_box, box))
                target_box.of(target, _within(target_box, box))[...] = elements


def is_needed(target_spec: ShardSpec, source_spec: ShardSpec) -> bool:
    """True if the part `source_spec` has any element of the part `target_spec`."""
    for target_box in boxes_of(target_spec):
        for source_box in boxes_of(source_spec):
            if _intersection(target_box.box, source_box.box) is not None:
                return True
    return False


def _intersection(first: Sequence[Range], second: Sequence[Range]) -> tuple[Range, ...] | None:
    """Return the box that both have; None if they have no element in common."""
    box = []
    for (first_start, first_stop), (second_start, second_stop) in zip(first, second, strict=True):
        start = max(first_start, second_start)
        stop = min(first_stop, second_stop)
        if start >= stop:
            return None
        box.append((start, stop))
    return tuple(box)


def _within(outer: Box, box: Sequence[Range]) -> list[Range]:
    """Return the place of a box of the full tensor in the window of the box `outer`."""
    ranges = []
    for (low, high), (start, _), (inside, _) in zip(box, outer.box, outer.inside, strict=True):
        ranges.append((low - start + inside, high - start + inside))
    return ranges


@lru_cache(_CACHE_SIZE)
def fault_of_cover(shape: tuple[int, ...], parts: tuple[ShardSpec, ...]) -> str | None:
    """Return the reason why `parts` are not each element of a tensor once, as text; None if they are.

    The time grows with the number of boxes, not with that of pairs of them. Every index along a dimension has a random
    weight, an element the product of its indices' weights, and a box the sum of its elements' weights: a product of
    differences. If the boxes' sum is the tensor's, each element is there once. By the Schwartz-Zippel lemma another
    cover has that sum in one case of 2^61 for each dimension.
    """
    boxes: list[Box] = []
    for part in parts:
        boxes += boxes_of(part)
    numel = math.prod(shape)
    count = sum(box.numel for box in boxes)
    # More than all of them overlap, which the weights below find as well.
    if count < numel:
        return f"its parts have {count} of {numel} elements"
    full_box = [(0, size) for size in shape]
    if sum(_weight(box.box) for box in boxes) % _PRIME != _weight(full_box):
        return "two of its parts overlap"
    return None


def _weight(box: Sequence[Range]) -> int:
    weight = 1
    for dim, (start, stop) in enumerate(box):
        # A product over dims, as an element's weight is: the sum over a box factors into sums along its sides.
        weight = weight * (_weight_below(dim, stop) - _weight_below(dim, start)) % _PRIME
    return weight


@lru_cache(_CACHE_SIZE)
def _weight_below(dim: int, index: int) -> int:
    """Return the sum of the weights of a dimension's first `index` indices."""
    if index == 0:
        return 0
    # By a keyed hash and not from a list: an index may be in the billions, and only box edges are asked for.
    digest = hashlib.blake2b(f"{dim} {index}".encode(), key=_SECRET, digest_size=8).digest()
    return int.from_bytes(digest, "big") % _PRIME


def most_boxes(shard_spec: ShardSpec) -> int:
    """Return an upper bound of the number of boxes, and so of their work, without making them."""
    counts = [1] * len(shard_spec.shape)
    flat = 0
    for cut in shard_spec.cuts:
        if flat or cut.dim == FLAT:
            # Each block of a cut can split what is left into one more stretch.
            flat = max(flat, 1) * max(1, len(cut.blocks))
        else:
            counts[cut.dim] *= max(1, len(cut.blocks))
    bound = math.prod(counts)
    if flat:
        # A stretch of a flattened box is a ragged head, whole rows and a ragged tail along each dimension.
        bound *= flat * (2 * len(counts) + 1)
    return bound


def is_sound(shard_spec: ShardSpec) -> bool:
    """True if every cut fits what the one before left; one that was read from a file may not."""
    shape = shard_spec.shape
    for cut in shard_spec.cuts:
        if not (FLAT <= cut.dim < len(shape) and 0 <= cut.part < cut.parts):
            return False
        length = math.prod(shape) if cut.dim == FLAT else shape[cut.dim]
        if sum(cut.blocks) != length:
            return False
        shape = ShardSpec(shape, (cut,)).local_shape
    return True
