"""The mesh: ranks arranged on named axes.

An axis name is also the strategy's file in `parallel/`, the plan's key and the metric's label. Axes are
listed outermost first: the last varies fastest, so its neighbours get adjacent ranks and thereby the
fastest links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.nouns.errors import MeshError, did_you_mean

AXES = ("pipeline", "replicate", "shard", "tensor")
SHORT = {"dp": "replicate", "fsdp": "shard", "tp": "tensor", "pp": "pipeline"}
DATA_AXES = ("replicate", "shard")  # along these the batch is split; ranks along the others see the same samples


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes in AXES order; an axis of size 1 is there but does nothing."""

    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `replicate=2`; an axis left out has size 1, the field's short words (`dp`) are accepted.

        Raises:
            MeshError: an axis is unknown or named twice, or its size is not a whole number above 0.
        """
        sizes: dict[str, int] = {}
        for item in text.split(","):
            word, _, size = (part.strip() for part in item.partition("="))
            axis = SHORT.get(word, word)
            _check_item(text, axis, size, sizes)
            sizes[axis] = int(size)
        return cls(tuple(sizes.get(axis, 1) for axis in AXES))

    @property
    def world_size(self) -> int:
        """Ranks that the mesh covers: the product of its sizes."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.sizes[AXES.index(axis)]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands: its index on every axis."""
        at = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, at[axis] = divmod(rank, size)
        return at

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that share every coordinate with `rank` but the one on `axis`, in axis order."""
        at = self.coordinate(rank)
        stride = math.prod(self.sizes[AXES.index(axis) + 1 :])
        first = rank - at[axis] * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def peers_on(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that share every coordinate with `rank` but those on `axes`, in rising order."""
        at = self.coordinate(rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(there == at[axis] for axis, there in self.coordinate(other).items() if axis not in axes)
        )

    @property
    def data_size(self) -> int:
        """Parts that the global batch is split into."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    def data_part(self, rank: int) -> int:
        """Which of the `data_size` parts of a batch is `rank`'s."""
        at, part = self.coordinate(rank), 0
        for axis in DATA_AXES:
            part = part * self.size(axis) + at[axis]
        return part

    def random_stream(self, rank: int) -> int:
        """Number of the random stream that `rank` draws dropout masks from.

        Ranks with other samples and ranks of other pipeline stages have streams of their own. The ranks of one
        `tensor` group share one: each draws the mask of the whole tensor and uses its piece.
        """
        return self.data_part(rank) + self.data_size * self.coordinate(rank)["pipeline"]

    def check_fits(self, world_size: int) -> None:
        """Raise MeshError unless the mesh covers exactly `world_size` ranks."""
        if self.world_size != world_size:
            raise MeshError(
                f"the mesh {self} covers {_ranks(self.world_size)}",
                f"the job has {_ranks(world_size)}",
                f"write --plan replicate={world_size}, or start {_ranks(self.world_size)} with -n {self.world_size}",
            )

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return ",".join(named) or "replicate=1"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _check_item(text: str, axis: str, size: str, seen: dict[str, int]) -> None:
    if axis not in AXES:
        raise MeshError(
            f"the mesh {text!r} names the axis {axis!r}",
            f"the axes of this version are: {', '.join(AXES)}",
            did_you_mean(axis, [*AXES, *SHORT], "write replicate=N"),
        )
    if not size.isdecimal() or int(size) < 1:
        raise MeshError(
            f"the mesh {text!r} gives {axis} the size {size!r}",
            "a size is a whole number above 0",
            f"write {axis}=1 to leave it unused",
        )
    if axis in seen:
        raise MeshError(
            f"the mesh {text!r} should give {axis} once",
            "it names it twice",
            f"keep one of {axis}={seen[axis]} and {axis}={size}",
        )
