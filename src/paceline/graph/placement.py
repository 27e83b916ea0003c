"""Placements of values on the ranks of the `tensor` axis: whole on each, or split along one dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.nouns.shard_spec import Cut, ShardSpec, block_range, total_of


@dataclass(frozen=True, slots=True)
class Split:
    """A split along `dim`, each of its `blocks` by itself (see `nouns/shard_spec.py`; negative: `block_range`)."""

    dim: int
    blocks: tuple[int, ...]

    def size(self, rank: int, num_ranks: int) -> int:
        """Return the size of piece `rank` in the dimension."""
        ranges = [block_range(block, rank, num_ranks) for block in self.blocks]
        return sum(stop - start for start, stop in ranges)

    def local_shape(self, shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's piece of a tensor of `shape`."""
        return (*shape[: self.dim], self.size(rank, num_ranks), *shape[self.dim + 1 :])

    def is_even(self, num_ranks: int) -> bool:
        """True if every rank has as much of every block."""
        return all(block % num_ranks == 0 for block in self.blocks)

    def shard_spec(self, shape: tuple[int, ...], rank: int, num_ranks: int) -> ShardSpec:
        """Return one rank's piece of a tensor of `shape`, as checkpoints describe it."""
        return ShardSpec(shape, (Cut(self.dim, self.blocks, rank, num_ranks),))


Placement = Split | None  # None: whole on every rank


def whole_block(shape: tuple[int, ...], dim: int) -> Split:
    """Return the plain split of one dimension."""
    return Split(dim, (shape[dim],))


def flattened(split: Split, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of a tensor of `shape` that is split so, seen as one long row."""
    inner = math.prod(shape[split.dim + 1 :])
    outer = math.prod(shape[: split.dim])
    return tuple(block * inner for block in split.blocks) * outer


def unflattened(blocks: tuple[int, ...], shape: tuple[int, ...], num_ranks: int) -> Split | None:
    """Return the split of `shape` whose row is split into `blocks`, or None when there is none.

    A dimension d carries it when every block is whole steps of what lies inside d, and, where d is not the
    first, when the blocks repeat once per index of the dimensions before d.
    """
    for dim in range(len(shape)):
        outer = math.prod(shape[:dim])
        inner = math.prod(shape[dim + 1 :])
        if outer == 0 or inner == 0 or len(blocks) % outer:
            continue
        first = blocks[: len(blocks) // outer]
        # Each index of the dimensions before must repeat the same blocks, and they must fill the dimension.
        if blocks != first * outer or total_of(first) != shape[dim] * inner:
            continue
        if any(block % inner for block in first):
            continue
        candidate = Split(dim, tuple(block // inner for block in first))  # without a rest: also of negative ones
        if inner == 1 or candidate.is_even(num_ranks):
            return candidate
    return None
