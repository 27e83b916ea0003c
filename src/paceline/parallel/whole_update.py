"""Update whole parameters where an axis cuts them: each on one rank, its owner.

LAMB needs the norm of a parameter, Muon orthogonalizes a matrix, Adafactor keeps means of its rows and columns. Such an
optimizer can't work on a part of a parameter. So for its step each parameter is put together on its owner:

    gather     the pieces of the values and the gradients go to the owners
    update     `optimizer.step()` on every owner; the optimizer's state of a parameter stays there
    scatter    the pieces of the new values go back

Distributed Muon (Liu et al. 2025) does the same. Ranks along other axes, which do not cut a parameter, all have an
owner of it, and these compute the same; beside `tensor`, ranks of `shard` share out the parameters
(`shard/owned_update.py`).

Needs: an optimizer that updates each parameter from that parameter's value, gradient and state only
(`elementwise.py` tries it out).
Promises: the update is that of whole parameters.
Memory: during the update an owner holds its parameters and their gradients whole, and before and after it the messages
that bring and take them: at most four times what it owns, or has parts of, whichever is more. Between steps it holds
the state of its parameters only.
Traffic per step: per dtype two all_to_all, one of values and gradients, one of values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm.collectives import AxisComm
from paceline.comm.dtensor_parts import local
from paceline.nouns.shard_spec import Cut, LocalShard, ShardSpec
from paceline.parallel.shard.local_optimizer_step import rows_of, stand_ins

Shape = tuple[int, ...]
Key = tuple[str, bool]  # a parameter's name, and whether it is its gradient
Loads = Counter[tuple[int, int]]  # elements by stage and rank


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter that an axis cuts.

    Args:
        shape: the parameter's shape before the cut.
        cut: this rank's cut of the parameter.
        owner: the rank along the axis that updates all of it.
    """

    shape: Shape
    cut: Cut
    owner: int

    def piece_shape(self, rank: int) -> Shape:
        """Return the shape of the piece that the rank with index `rank` on the axis has."""
        cut = _cut_of(self.cut, rank)
        return (*self.shape[: cut.dim], cut.size, *self.shape[cut.dim + 1 :])


def share_out(
    sizes: Mapping[str, int], ranks: int, stages: Mapping[str, Sequence[int]] | None = None, loads: Loads | None = None
) -> dict[str, int]:
    """Return for each parameter the rank that is to update all of it; every rank computes the same.

    The largest parameters are assigned first, each to the rank that has the least.

    Args:
        sizes: the number of elements of each parameter, by name.
        ranks: the number of ranks.
        stages: the pipeline's ranks that have a parameter, by name; the first one has what is not there.
        loads: the elements that each rank has already, by stage and rank; changed in place.
    """
    loads = Counter() if loads is None else loads
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = (0,) if stages is None else stages[name]
        heaviest = [max(loads[stage, rank] for stage in holders) for rank in range(ranks)]
        owners[name] = heaviest.index(min(heaviest))
        for stage in holders:
            loads[stage, owners[name]] += sizes[name]
    return owners


def cut_parameters(specs: Mapping[str, ShardSpec], ranks: int) -> dict[str, CutParameter]:
    """Return parameters that an axis of so many ranks cuts, each with an owner.

    Args:
        specs: this rank's shard specs, by name, each with one cut.
        ranks: the number of ranks on the axis.
    """
    owners = share_out({name: spec.numel for name, spec in specs.items()}, ranks)
    cut = {}
    for name, spec in specs.items():
        cut[name] = CutParameter(spec.shape, spec.cuts[0], owners[name])
    return cut


class WholeUpdate:
    """The whole parameters that an optimizer has in the place of pieces during its step, on this rank.

    Args:
        comm: the axis that cuts the parameters.
        parameters: the parameters that the axis cuts and that are updated whole, by name.
        pieces: this rank's pieces of them, with gradients; in an order that is the same on all ranks of the axis.
    """

    def __init__(
        self, comm: AxisComm, parameters: Mapping[str, CutParameter], pieces: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self.comm = comm
        self.parameters = parameters
        self.pieces = pieces
        self.wholes: dict[str, torch.nn.Parameter] = {}  # between `gather` and `scatter`
        self.shapes: dict[str, list[Shape]] = {}  # of the pieces, by rank
        for name, parameter in parameters.items():
            self.shapes[name] = [parameter.piece_shape(rank) for rank in range(comm.size)]

    def owns(self, name: str) -> bool:
        """Return whether this rank updates all of a parameter."""
        parameter = self.parameters.get(name)
        return parameter is not None and parameter.owner == self.comm.rank

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run `optimizer.step()`, with whole parameters in the place of pieces on their owners."""
        with stand_ins(optimizer, {**rows_of(optimizer), **self.gather()}):
            optimizer.step()
        self.scatter()

    def state_shards(self, replicas: tuple[int, ...]) -> dict[str, LocalShard]:
        """Return the shards of the optimizer's state of this rank's parameters, as `local_shards` of an adapter does.

        Args:
            replicas: the ranks of the world that own the same as this one, itself among them.
        """
        shards = {}
        for name in self.pieces:
            holders = replicas if self.owns(name) else ()
            shards[f"{OPTIMIZER}{name}"] = LocalShard(ShardSpec(self.parameters[name].shape), holders)
        return shards

    def gather(self) -> dict[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Put each whole parameter together on its owner. Collective.

        Returns:
            The whole parameter, with its gradient, for each piece; None where the whole is on another rank.
        """
        pieces: dict[Key, torch.Tensor] = {}
        for name, piece in self.pieces.items():
            # All ranks have the gradient, or none: the strategies see to it.
            if piece.grad is not None:
                pieces[name, False] = local(piece.detach())
                pieces[name, True] = local(piece.grad)
        self.wholes = {}
        with torch.no_grad():
            gathered = self._gather(pieces)
        for (name, is_gradient), tensor in gathered.items():
            if not is_gradient:
                self.wholes[name] = torch.nn.Parameter(tensor)
                self.wholes[name].grad = gathered[name, True]
        return {piece: self.wholes.get(name) for name, piece in self.pieces.items()}

    def scatter(self) -> None:
        """Write the new values of what `gather` returned into the pieces. Collective."""
        updated = {name: full.detach() for name, full in self.wholes.items()}
        self.wholes = {}  # the gradients are let go
        pieces = {}
        for name, piece in self.pieces.items():
            if piece.grad is not None:
                pieces[name, False] = local(piece.detach())
        with torch.no_grad():
            for keys in _by_dtype(pieces):
                self._scatter(keys, updated, pieces)

    def _gather(self, pieces: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return the parameters that this rank owns, put together; `pieces`, of all of them, is emptied on the way."""
        comm = self.comm
        gathered = {}
        for keys in _by_dtype(pieces):
            by_owner = self._by_owner(keys)
            flat = torch.cat([pieces[key].reshape(-1) for key in itertools.chain(*by_owner)])
            sent = [self._numel(members, comm.rank) for members in by_owner]
            own_keys = by_owner[comm.rank]
            for key in keys:
                del pieces[key]
            sizes = [self._numel(own_keys, rank) for rank in range(comm.size)]
            received = comm.all_to_all_sized(flat, sent, sizes)
            del flat
            by_rank = [self._split_up(own_keys, rank, part) for rank, part in enumerate(received.split(sizes))]
            for number, key in enumerate(own_keys):
                parameter = self.parameters[key[0]]
                gathered[key] = _joined([parts[number] for parts in by_rank], parameter.shape, parameter.cut)
        return gathered

    def _scatter(
        self, keys: Sequence[Key], updated: dict[str, torch.Tensor], pieces: Mapping[Key, torch.Tensor]
    ) -> None:
        """Write the new values of pieces of one dtype; `updated`, what this rank owns, is emptied on the way."""
        comm = self.comm
        by_owner = self._by_owner(keys)
        own_keys = by_owner[comm.rank]
        parts = [pieces[keys[0]].new_empty(0)]  # of the right dtype, where this rank owns nothing
        for rank in range(comm.size):
            for name, _ in own_keys:
                parts.append(_piece_of(updated[name], _cut_of(self.parameters[name].cut, rank)).reshape(-1))
        flat = torch.cat(parts)
        for name, _ in own_keys:
            del updated[name]
        del parts
        sent = [self._numel(own_keys, rank) for rank in range(comm.size)]
        received = comm.all_to_all_sized(flat, sent, [self._numel(members, comm.rank) for members in by_owner])
        members = list(itertools.chain(*by_owner))
        for key, value in zip(members, self._split_up(members, comm.rank, received), strict=True):
            pieces[key].copy_(value)

    def _by_owner(self, keys: Sequence[Key]) -> list[list[Key]]:
        by_owner: list[list[Key]] = [[] for _ in range(self.comm.size)]
        for key in keys:
            by_owner[self.parameters[key[0]].owner].append(key)
        return by_owner

    def _numel(self, keys: Sequence[Key], rank: int) -> int:
        """Return the number of elements that the rank with index `rank` has of them."""
        return sum(math.prod(self.shapes[name][rank]) for name, _ in keys)

    def _split_up(self, keys: Sequence[Key], rank: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of one rank, which stand one after another."""
        shapes = [self.shapes[name][rank] for name, _ in keys]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _by_dtype(tensors: Mapping[Key, torch.Tensor]) -> list[list[Key]]:
    """Return the keys by dtype: only equal ones travel together."""
    groups: dict[torch.dtype, list[Key]] = {}
    for key, tensor in tensors.items():
        groups.setdefault(tensor.dtype, []).append(key)
    return list(groups.values())


def _cut_of(cut: Cut, rank: int) -> Cut:
    return dataclasses.replace(cut, part=rank)


def _piece_of(full: torch.Tensor, cut: Cut) -> torch.Tensor:
    pieces = [full.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)


def _joined(pieces: Sequence[torch.Tensor], shape: Shape, cut: Cut) -> torch.Tensor:
    """Put the pieces of all ranks together."""
    full = pieces[0].new_empty(shape)
    for rank, piece in enumerate(pieces):
        offset = 0
        for start, stop in _cut_of(cut, rank).ranges:
            length = stop - start
            full.narrow(cut.dim, start, length).copy_(piece.narrow(cut.dim, offset, length))
            offset += length
    return full
