"""Update whole parameters where axes cut them: each on one rank, its owner.

LAMB needs the norm of a parameter, Muon orthogonalizes a matrix, Adafactor keeps means of its rows and columns. Such an
optimizer can't work on a part of a parameter. So for its step each parameter is put together on its owner:

    gather     the pieces of the values and the gradients go to the owners, along the innermost axis first
    update     `optimizer.step()` on every owner; the optimizer's state of a parameter stays there
    scatter    the pieces of the new values go back, along the outermost axis first

ZeRO-1 (Rajbhandari et al. 2020) and distributed Muon (Liu et al. 2025) do the same. Ranks along an axis that does not
cut a parameter (`replicate`; `tensor` for a layer norm) all have an owner of it, and these compute the same.

Needs: an optimizer that updates each parameter from that parameter's value, gradient and state alone
(`elementwise.py` tries it out).
Promises: the update is that of whole parameters. The owners' shares differ by the size of one parameter at most, where
all parameters are cut by the same axes.
Memory: during the update an owner holds its parameters and their gradients whole, and before and after it the messages
that bring and take them: at most four times what it owns, or has parts of, whichever is more. Between steps it holds
the state of its parameters alone.
Traffic per step: `plan/traffic_whole.py`, exactly: along each axis and per dtype two all_to_all, one of values and
gradients, one of values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm.collectives import AxisComm
from paceline.comm.fully_shard import local
from paceline.nouns.mesh import CUTTING_AXES, Mesh
from paceline.nouns.shard_spec import Cut, LocalShard, ShardSpec
from paceline.parallel.shard.local_optimizer_step import rows_of, stand_ins

Shape = tuple[int, ...]
Key = tuple[str, bool]  # a parameter's name, and whether it is its gradient


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter's full shape, and how axes cut it.

    Args:
        shape: of the whole parameter.
        cuts: of this rank, by axis, the outermost first.
        pipeline_ranks: those that have a part of it.
    """

    shape: Shape
    cuts: Mapping[str, Cut]
    pipeline_ranks: tuple[int, ...] = (0,)

    def before(self, axis: str) -> Shape:
        """Return the shape that the cut by `axis` takes a piece of."""
        shape = self.shape
        for outer, cut in self.cuts.items():
            if outer == axis:
                break
            shape = _cut_shape(shape, cut)
        return shape

    def piece(self, axis: str, rank: int) -> Shape:
        """Return the shape of the piece that the rank with index `rank` on the axis has."""
        return _cut_shape(self.before(axis), _cut_of(self.cuts[axis], rank))


def assign_owners(parameters: Mapping[str, CutParameter], mesh: Mesh) -> dict[str, dict[str, int]]:
    """Return for each parameter the owner's index on every axis that cuts it; every rank computes the same.

    The largest parameters are assigned first, each to the ranks that have the least.
    """
    loads: Counter[tuple[int, ...]] = Counter()  # elements by index on pipeline and on the cutting axes
    owners = {}
    for name in sorted(parameters, key=lambda name: (-math.prod(parameters[name].shape), name)):
        parameter = parameters[name]
        axes = list(parameter.cuts)
        best: tuple[int, dict[str, int], list[tuple[int, ...]]] | None = None
        for indices in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
            owner = dict(zip(axes, indices, strict=True))
            places = _places(parameter.pipeline_ranks, owner, mesh)
            load = max(loads[place] for place in places)
            if best is None or load < best[0]:
                best = (load, owner, places)
        assert best is not None
        owners[name] = best[1]
        for place in best[2]:
            loads[place] += math.prod(parameter.shape)
    return owners


def _places(pipeline_ranks: Sequence[int], owner: Mapping[str, int], mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the places on pipeline and the cutting axes that own a parameter: all, along an axis that cuts it not."""
    ranges = [[owner[axis]] if axis in owner else range(mesh.size(axis)) for axis in CUTTING_AXES]
    return list(itertools.product(pipeline_ranks, *ranges))


class WholeUpdate:
    """The optimizer's step on this rank.

    Args:
        parameters: every parameter of the model that is cut and has to be updated whole, on this rank or not.
        pieces: what this rank has of them, with gradients; in an order that is the same on all ranks of the axes.
        axes: the mesh's.
        mesh: of the plan.
    """

    def __init__(
        self,
        parameters: Mapping[str, CutParameter],
        pieces: Mapping[str, torch.nn.Parameter],
        axes: Mapping[str, AxisComm],
        mesh: Mesh,
    ) -> None:
        self.parameters = parameters
        self.pieces = pieces
        self.axes = axes
        self.mesh = mesh
        self.owners = assign_owners(parameters, mesh)
        self.shapes: dict[tuple[str, str, int], Shape] = {}  # of pieces, by name, axis and rank
        self.running: AbstractContextManager[None] | None = None  # while the optimizer has whole parameters
        self.wholes: dict[str, torch.nn.Parameter] = {}  # between `gather` and `scatter`

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run `optimizer.step()`, with whole parameters in the place of pieces on their owners."""
        self.begin(optimizer)
        try:
            optimizer.step()
        except BaseException:
            self._put_back()
            self.wholes = {}
            raise
        self.end()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Put whole parameters, with gradients, in the place of pieces on their owners. Collective."""
        self._put_back()  # of a step that raised
        self.running = stand_ins(optimizer, {**rows_of(optimizer), **self.gather()})
        self.running.__enter__()

    def end(self) -> None:
        """Give every rank its pieces of the new values. Collective."""
        self._put_back()
        self.scatter()

    def _put_back(self) -> None:
        """Give the optimizer its pieces back."""
        running, self.running = self.running, None
        if running is not None:
            running.__exit__(None, None, None)

    def gather(self) -> dict[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Return what the optimizer is to have in the place of each piece for a step. Collective.

        Returns:
            The whole parameter, with its gradient, for each piece; None where the whole is on another rank.
        """
        self.wholes = self._gather()
        return {piece: self.wholes.get(name) for name, piece in self.pieces.items()}

    def scatter(self) -> None:
        """Write the new values of what `gather` returned into the pieces. Collective."""
        values = {(name, False): whole.detach() for name, whole in self.wholes.items()}
        self.wholes = {}  # the gradients are let go
        self._scatter(values)

    def state_shards(self) -> dict[str, LocalShard]:
        """Return who holds the optimizer's state of each of this rank's parameters, as `held` of an adapter has it."""
        shards = {}
        for name in self.pieces:
            is_here = all(self.axes[axis].rank == index for axis, index in self.owners[name].items())
            holders = self._ranks_of(name) if is_here else ()
            shards[f"{OPTIMIZER}{name}"] = LocalShard(ShardSpec(self.parameters[name].shape), holders)
        return shards

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the world that own a parameter."""
        ranks = []
        for rank in range(self.mesh.world_size):
            at = self.mesh.coordinate(rank)
            is_owner = all(at[axis] == index for axis, index in self.owners[name].items())
            if is_owner and at["pipeline"] in self.parameters[name].pipeline_ranks:
                ranks.append(rank)
        return tuple(ranks)

    def _gather(self) -> dict[str, torch.nn.Parameter]:
        """Return the whole parameters that this rank owns and that have a gradient, with it."""
        held: dict[Key, torch.Tensor] = {}
        for name, piece in self.pieces.items():
            # All ranks have the gradient, or none: the strategies see to it.
            if piece.grad is not None:
                held[name, False] = local(piece.detach())
                held[name, True] = local(piece.grad)
        with torch.no_grad():
            for axis in reversed(CUTTING_AXES):
                held = self._gather_along(axis, held)
        wholes = {}
        for (name, is_gradient), tensor in held.items():
            if not is_gradient:
                wholes[name] = torch.nn.Parameter(tensor)
                wholes[name].grad = held[name, True]
        return wholes

    def _gather_along(self, axis: str, held: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return what this rank has once the pieces along `axis` are at their owners; `held` is emptied on the way."""
        comm = self.axes[axis]
        gathered = {key: tensor for key, tensor in held.items() if axis not in self.owners[key[0]]}
        for keys in self._by_dtype(axis, held):
            by_owner = self._by_owner(axis, keys)
            flat = torch.cat([held[key].reshape(-1) for key in itertools.chain(*by_owner)])
            sent = [self._numel(axis, members, comm.rank) for members in by_owner]
            own = by_owner[comm.rank]
            for key in keys:
                del held[key]
            received = comm.all_to_all_sized(flat, sent, [self._numel(axis, own, rank) for rank in range(comm.size)])
            del flat
            pieces = self._taken_apart(axis, own, received)
            for key in own:
                parameter = self.parameters[key[0]]
                gathered[key] = _joined(pieces[key], parameter.before(axis), parameter.cuts[axis])
        return gathered

    def _scatter(self, held: dict[Key, torch.Tensor]) -> None:
        """Write this rank's pieces of the updated parameters into them; `held` has the new values of its own ones."""
        updated = [(name, False) for name, piece in self.pieces.items() if piece.grad is not None]
        with torch.no_grad():
            for axis in CUTTING_AXES:
                held = self._scatter_along(axis, self._there(axis, updated), held)
            for (name, _), tensor in held.items():
                local(self.pieces[name].detach()).copy_(tensor)

    def _there(self, axis: str, keys: Sequence[Key]) -> list[Key]:
        """Return those of which this rank gets a piece along `axis`: inner axes hand the pieces on only later."""
        inner = CUTTING_AXES[CUTTING_AXES.index(axis) + 1 :]
        there = []
        for key in keys:
            owner = self.owners[key[0]]
            if all(owner.get(other, self.axes[other].rank) == self.axes[other].rank for other in inner):
                there.append(key)
        return there

    def _scatter_along(self, axis: str, keys: Sequence[Key], held: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return what this rank has once the owners along `axis` have sent the pieces; `held` is emptied on the way."""
        comm = self.axes[axis]
        scattered = {key: tensor for key, tensor in held.items() if axis not in self.owners[key[0]]}
        like = {key: self.pieces[key[0]] for key in keys}
        for cut_keys in self._by_dtype(axis, like):
            by_owner = self._by_owner(axis, cut_keys)
            own = by_owner[comm.rank]
            flat = self._parts_for_all(axis, own, held, local(like[cut_keys[0]].detach()))
            for key in own:
                del held[key]
            sent = [self._numel(axis, own, rank) for rank in range(comm.size)]
            expected = [self._numel(axis, members, comm.rank) for members in by_owner]
            received = comm.all_to_all_sized(flat, sent, expected)
            for key, piece in self._split_up(axis, list(itertools.chain(*by_owner)), comm.rank, received).items():
                scattered[key] = piece
        return scattered

    def _parts_for_all(
        self, axis: str, keys: Sequence[Key], held: Mapping[Key, torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """Return the pieces for each rank along `axis`, one rank's after another's; of `like`'s dtype if none."""
        parts = []
        for rank in range(self.axes[axis].size):
            for key in keys:
                parts.append(_piece_of(held[key], _cut_of(self.parameters[key[0]].cuts[axis], rank)).reshape(-1))
        return torch.cat(parts) if parts else like.new_empty(0)

    def _by_dtype(self, axis: str, held: Mapping[Key, torch.Tensor]) -> list[list[Key]]:
        """Return those that `axis` cuts, by dtype: only equal ones travel together."""
        groups: dict[torch.dtype, list[Key]] = {}
        for key, tensor in held.items():
            if axis in self.owners[key[0]]:
                groups.setdefault(tensor.dtype, []).append(key)
        return list(groups.values())

    def _by_owner(self, axis: str, keys: Sequence[Key]) -> list[list[Key]]:
        by_owner: list[list[Key]] = [[] for _ in range(self.axes[axis].size)]
        for key in keys:
            by_owner[self.owners[key[0]][axis]].append(key)
        return by_owner

    def _numel(self, axis: str, keys: Sequence[Key], rank: int) -> int:
        """Return the number of elements that the rank with index `rank` on the axis has of them."""
        return sum(math.prod(self._shape(axis, name, rank)) for name, _ in keys)

    def _shape(self, axis: str, name: str, rank: int) -> Shape:
        """Return the shape of the piece that the rank with index `rank` on the axis has."""
        key = (name, axis, rank)
        if key not in self.shapes:
            self.shapes[key] = self.parameters[name].piece(axis, rank)
        return self.shapes[key]

    def _taken_apart(self, axis: str, keys: Sequence[Key], received: torch.Tensor) -> dict[Key, list[torch.Tensor]]:
        """Return the pieces of each by rank; `received` has all that one rank sent, then the next one's."""
        pieces: dict[Key, list[torch.Tensor]] = {key: [] for key in keys}
        ranks = range(self.axes[axis].size)
        for rank, part in zip(ranks, received.split([self._numel(axis, keys, rank) for rank in ranks]), strict=True):
            for key, piece in self._split_up(axis, keys, rank, part).items():
                pieces[key].append(piece)
        return pieces

    def _split_up(self, axis: str, keys: Sequence[Key], rank: int, flat: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Return the pieces of one rank, which stand one after another."""
        parts = flat.split([self._numel(axis, [key], rank) for key in keys])
        pieces = {}
        for key, part in zip(keys, parts, strict=True):
            pieces[key] = part.view(self._shape(axis, key[0], rank))
        return pieces


def _cut_of(cut: Cut, rank: int) -> Cut:
    return dataclasses.replace(cut, part=rank)


def _cut_shape(shape: Shape, cut: Cut) -> Shape:
    return (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])


def _piece_of(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    pieces = [whole.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)


def _joined(pieces: Sequence[torch.Tensor], shape: Shape, cut: Cut) -> torch.Tensor:
    """Put the pieces of all ranks together."""
    whole = pieces[0].new_empty(shape)
    for rank, piece in enumerate(pieces):
        taken = 0
        for start, stop in _cut_of(cut, rank).ranges:
            length = stop - start
            whole.narrow(cut.dim, start, length).copy_(piece.narrow(cut.dim, taken, length))
            taken += length
    return whole
