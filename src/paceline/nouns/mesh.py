"""The mesh: ranks arranged on named axes.

An axis name is also the strategy's file in `parallel/`, the plan's key and the metric's label. Axes are
listed outermost first: the last varies fastest, so its neighbours get adjacent ranks and thereby the
fastest links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.nouns.errors import MeshError, did_you_mean
from paceline.nouns.reading import parse_whole, shown


@dataclass(frozen=True, slots=True)
class Axis:
    """The properties of an axis: all code that depends on the kind of an axis asks this table.

    Attributes:
        name: the name in plans, and of the strategy in `parallel/`.
        short: the field's short word, which plans may use too.
        splits_batch: True where its ranks see different samples.
        cuts_parameters: True where its ranks hold pieces of the same parameters.
        spreads_parameters: True where its ranks hold different elements, cut or not: the gradient's norm is a sum over
            the axis.
        runs_graphs: True where the model runs as captured graphs, not by its own code.
        sums_gradients_by: the collective by which gradients become those of all its ranks.
    """

    name: str
    short: str
    splits_batch: bool
    cuts_parameters: bool
    spreads_parameters: bool
    runs_graphs: bool
    sums_gradients_by: str


# Outermost first. docs/extending.md says what else a new axis needs.
AXIS_TABLE = (
    Axis("pipeline", "pp", splits_batch=False, cuts_parameters=False, spreads_parameters=True,
         runs_graphs=True, sums_gradients_by="send"),
    Axis("replicate", "dp", splits_batch=True, cuts_parameters=False, spreads_parameters=False,
         runs_graphs=False, sums_gradients_by="all_reduce"),
    Axis("shard", "fsdp", splits_batch=True, cuts_parameters=True, spreads_parameters=True,
         runs_graphs=False, sums_gradients_by="reduce_scatter"),
    Axis("expert", "ep", splits_batch=False, cuts_parameters=True, spreads_parameters=True,
         runs_graphs=True, sums_gradients_by="all_reduce"),
    Axis("context", "cp", splits_batch=False, cuts_parameters=False, spreads_parameters=False,
         runs_graphs=True, sums_gradients_by="all_reduce"),
    Axis("tensor", "tp", splits_batch=False, cuts_parameters=True, spreads_parameters=True,
         runs_graphs=True, sums_gradients_by="all_reduce"),
)  # fmt: skip
AXES = tuple(axis.name for axis in AXIS_TABLE)
SHORT = {axis.short: axis.name for axis in AXIS_TABLE}
MOST_RANKS = 1_000_000  # more is a slip, and must not fill the memory
DATA_AXES = tuple(axis.name for axis in AXIS_TABLE if axis.splits_batch)
# Innermost first: where several axes cut a parameter, the innermost has cut it first.
CUTTING_AXES = tuple(axis.name for axis in reversed(AXIS_TABLE) if axis.cuts_parameters)
SPREADING_AXES = tuple(axis.name for axis in reversed(AXIS_TABLE) if axis.spreads_parameters)
# The axes whose ranks run graphs of the same samples, outermost first.
PLACE_AXES = ("expert", "context", "tensor")
GRAPH_AXES = tuple(axis.name for axis in reversed(AXIS_TABLE) if axis.runs_graphs)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes in AXES order; an axis of size 1 is there but does nothing."""

    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `replicate=2`; an axis left out has size 1, the field's short words (`dp`) are accepted.

        Raises:
            MeshError: an axis is unknown or named twice, its size is not a whole number above 0, or there are over a
                million ranks.
        """
        sizes: dict[str, int] = {}
        for item in text.split(","):
            name, _, size = item.partition("=")
            name = name.strip()
            axis = SHORT.get(name, name)
            sizes[axis] = _checked_size(text, axis, size.strip(), sizes)
        mesh = cls(tuple(sizes.get(axis, 1) for axis in AXES))
        if mesh.world_size > MOST_RANKS:
            raise MeshError(
                f"the mesh {shown(text)}",
                f"it covers {mesh.world_size} ranks, and a job has at most {MOST_RANKS}",
                "write smaller sizes",
            )
        return mesh

    @property
    def world_size(self) -> int:
        """Return the number of ranks that the mesh covers: the product of its sizes."""
        return math.prod(self.sizes)

    def used(self, axes: Sequence[str] = AXES) -> list[str]:
        """Return those of `axes` that have more than one rank, in their order."""
        return [axis for axis in axes if self.size(axis) > 1]

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return self.sizes[AXES.index(axis)]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on every axis."""
        # A rank is a number in mixed radix, whose last digit is the innermost axis.
        at = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, at[axis] = divmod(rank, size)
        return at

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that share every coordinate with `rank` but the one on `axis`, in axis order."""
        at = self.coordinate(rank)
        # Ranks between two neighbours on the axis: as many as all inner axes have places.
        stride = math.prod(self.sizes[AXES.index(axis) + 1 :])
        first = rank - at[axis] * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def peers_on(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that share every coordinate with `rank` but those on `axes`, in rising order."""
        at = self.coordinate(rank)
        shared_axes = [axis for axis in AXES if axis not in axes]
        peers = []
        for peer in range(self.world_size):
            peer_at = self.coordinate(peer)
            if all(peer_at[axis] == at[axis] for axis in shared_axes):
                peers.append(peer)
        return tuple(peers)

    @property
    def data_size(self) -> int:
        """Return the number of parts into which the global batch is split."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    def data_part(self, rank: int) -> int:
        """Return the number of `rank`'s part of a batch, from 0 to `data_size` - 1."""
        at = self.coordinate(rank)
        part = 0
        # Mixed radix again, only of the data axes.
        for axis in DATA_AXES:
            part = part * self.size(axis) + at[axis]
        return part

    def random_stream(self, rank: int) -> int:
        """Return the number of the random stream that `rank` draws dropout masks from.

        Ranks with other samples and ranks of other pipeline stages have streams of their own. The ranks of one
        `tensor`, `context` or `expert` group share one: each draws the mask of the whole tensor and uses its piece.
        """
        return self.data_part(rank) + self.data_size * self.coordinate(rank)["pipeline"]

    @property
    def places(self) -> int:
        """Return the number of ranks that run graphs of the same samples and the same stages."""
        return math.prod(self.size(axis) for axis in PLACE_AXES)

    def place_of(self, at: Mapping[str, int]) -> int:
        """Return the number of a coordinate among the `places`."""
        place = 0
        for axis in PLACE_AXES:
            place = place * self.size(axis) + at[axis]
        return place

    def at_place(self, place: int) -> dict[str, int]:
        """Return the coordinate of one of the `places`."""
        at = {}
        for axis in reversed(PLACE_AXES):
            place, at[axis] = divmod(place, self.size(axis))
        return at

    def check_fits(self, world_size: int) -> None:
        """Raise MeshError unless the mesh covers exactly `world_size` ranks."""
        if self.world_size != world_size:
            raise MeshError(
                f"the mesh {self} covers {_ranks(self.world_size)}",
                f"the job has {_ranks(world_size)}",
                f"write --plan replicate={world_size}, or start {_ranks(self.world_size)} with -n {self.world_size}",
            )

    def __str__(self) -> str:
        used = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return ",".join(used) or "replicate=1"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _checked_size(text: str, axis: str, size: str, sizes: dict[str, int]) -> int:
    """Return the size of an axis as a number; raise MeshError for an item that a mesh can't have.

    Args:
        text: the whole mesh, for errors.
        axis: the axis that the item names.
        size: the text of its size.
        sizes: the sizes of the items before, by axis.
    """
    if axis not in AXES:
        raise MeshError(
            f"the mesh {shown(text)} names the axis {shown(axis)}",
            f"the axes of this version are: {', '.join(AXES)}",
            did_you_mean(axis, [*AXES, *SHORT], "write one of these, or leave it out"),
        )
    number = parse_whole(size, 1, MOST_RANKS)
    if number is None:
        raise MeshError(
            f"the mesh {shown(text)} gives {axis} the size {shown(size)}",
            f"a size is a whole number above 0, at most {MOST_RANKS}",
            f"write {axis}=1 to leave it unused, or {axis}=2 for two ranks"
            if size
            else f"write {axis}=2 for two ranks",
        )
    if axis in sizes:
        raise MeshError(
            f"the mesh {shown(text)} should give {axis} once",
            "it names it twice",
            f"keep one of {axis}={sizes[axis]} and {axis}={number}",
        )
    return number
