"""Describe the part of a full tensor that a rank holds, so that any mesh can read the file of another one.

A placement is a chain of cuts. Each cut takes what the one before left, divides a dimension into blocks,
every block into `parts` pieces as `torch.chunk` does (all of the same size, the last ones smaller or
empty), and keeps piece `part` of each block, one after another:

    Cut(dim=0, blocks=(8,), part=1, parts=2)     of rows 0..7, rows 4..7
    Cut(dim=0, blocks=(4, 4), part=1, parts=2)   rows 2, 3 and 6, 7: a fused matrix, each block split by itself
    Cut(dim=FLAT, blocks=(24,), part=0, parts=4) elements 0..5 of the flattened tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FLAT = -1  # the cut's dim when it is made along the flattened tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A step of a placement; `blocks` are sizes that add up to the dimension's."""

    dim: int
    blocks: tuple[int, ...]
    part: int
    parts: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of the dimension that are kept: (start, stop) per block, `stop` not included."""
        ranges = []
        offset = 0
        for block in self.blocks:
            start, stop = block_range(block, self.part, self.parts)
            ranges.append((offset + start, offset + stop))
            offset += abs(block)
        return ranges

    @property
    def size(self) -> int:
        """Return the number of places of the dimension that are kept."""
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's part of a tensor of the full `shape`; no cuts: all of it."""

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        shape = self.shape
        for cut in self.cuts:
            shape = (cut.size,) if cut.dim == FLAT else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])
        return shape

    @property
    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the placement as a JSON object."""
        cuts = [[cut.dim, list(cut.blocks), cut.part, cut.parts] for cut in self.cuts]
        return {"shape": list(self.shape), "cuts": cuts}

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> ShardSpec:
        """Read the object that `to_json` returned."""
        cuts = tuple(Cut(dim, tuple(blocks), part, parts) for dim, blocks, part, parts in value["cuts"])
        return cls(tuple(value["shape"]), cuts)


def chunk_range(size: int, part: int, parts: int) -> tuple[int, int]:
    """Return the begin and end of piece `part` of `size` elements in `parts` pieces, as `torch.chunk` cuts."""
    length = -(-size // parts)  # rounded up, so that the last pieces may be smaller or empty, as FSDP2's are
    return min(size, part * length), min(size, (part + 1) * length)


def block_range(block: int, part: int, parts: int) -> tuple[int, int]:
    """Return the begin and end of piece `part` of a block; of a block with a negative size the last part is first.

    A causal sequence of 8 over 2 ranks, (4, -4): rank 0 has 0, 1 and 6, 7; rank 1 has 2, 3 and 4, 5. Both have as much
    to look back at.
    """
    if block < 0:
        return chunk_range(-block, parts - 1 - part, parts)
    return chunk_range(block, part, parts)


def total_of(blocks: Iterable[int]) -> int:
    """Return the size of the dimension that blocks make up."""
    return sum(abs(block) for block in blocks)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of a tensor that a rank holds, and the ranks that hold exactly the same."""

    shard_spec: ShardSpec
    holders: tuple[int, ...]  # ranks of the world in rising order, with this one; none: only other ranks hold it
