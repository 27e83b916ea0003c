"""ZeRO-1: every rank of `shard` has whole parameters and gradients, and updates a part of them.

Gradients are summed as under `replicate`. In the optimizer's step each rank has its parts in the place of the
parameters, and the optimizer's state is of these parts; afterwards all ranks get the new values of every part.

    by rows    a parameter that the optimizer updates element by element: each rank updates its rows of it, as
               `torch.chunk` cuts them
    whole      any other parameter, and all of a loop's: one rank updates it, its owner. The largest parameters are
               assigned first, each to the rank that has the least; torch's ZeroRedundancyOptimizer does the same

Needs: summed gradients; an optimizer that updates each parameter from that parameter's value, gradient and state only.
Promises: the update is that of one rank. Of the state of what is updated by rows each of R ranks has 1/R; of what is
updated whole their shares differ by the size of one parameter at most.
Memory: after the update, the rows that this rank sends and those that it receives: the parameters' bytes, and 1/R.
Traffic per update, of parameters that have gradients: per dtype one all_gather of this rank's rows, and for each owner
one broadcast of what it has updated whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm.collectives import AxisComm
from paceline.nouns.shard_spec import Cut, LocalShard, ShardSpec, chunk_range
from paceline.parallel.optimizer_parts import parts_of
from paceline.parallel.shard.local_optimizer_step import StandIns, stand_ins
from paceline.parallel.whole_update import Loads, WholeUpdate, share_out
from paceline.torch_private.tensors import storage_key


class OwnedUpdates:
    """The split of an optimizer's updates between ranks.

    Args:
        comm: the axis `shard`.
        replicas: the ranks of the world that update the same as this one, itself among them.
        device: the device of the optimizer's state; None: that of each parameter.
    """

    def __init__(self, comm: AxisComm, replicas: tuple[int, ...], device: torch.device | None = None) -> None:
        self.comm = comm
        self.replicas = replicas
        self.device = device
        self.owners: dict[torch.nn.Parameter, int | None] = {}  # None: each rank updates its rows
        self.names: dict[torch.nn.Parameter, str] = {}
        self.loads: Loads = Counter()
        self.stand_ins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # of parameters that are here, in an update
        self.running = StandIns()

    def assign(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give each new parameter an owner, which updates it whole; equal on all ranks."""
        sizes = {name: parameter.numel() for name, parameter in parameters.items() if parameter not in self.owners}
        for name, owner in share_out(sizes, self.comm.size, loads=self.loads).items():
            self.owners[parameters[name]] = owner
            self.names[parameters[name]] = name

    def assign_rows(self, parameters: Mapping[str, torch.nn.Parameter], owners: Mapping[str, int]) -> None:
        """Have each rank update its rows of these parameters, but for those that have an owner.

        Args:
            parameters: the optimizer's parameters, by name.
            owners: the rank that updates it, for each parameter that is updated whole. One without dimensions
                has no rows, and gets an owner too.
        """
        by_rows = {name: parameter for name, parameter in parameters.items() if name not in owners and parameter.dim()}
        for name, parameter in parameters.items():
            self.names[parameter] = name
            if name in by_rows:
                self.owners[parameter] = None
            else:
                self.owners[parameter] = owners.get(name, 0)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        within: WholeUpdate | None = None,
    ) -> None:
        """Run `optimizer.step()` on this rank's parts, and give every rank what the others have updated. Collective.

        Args:
            optimizer: the optimizer of these parameters.
            parameters: the optimizer's parameters, by name.
            within: the update that gathers what another axis cuts, of the parameters that this rank owns.
        """
        replaced = self.parts(optimizer, parameters)
        if within is not None:
            replaced |= within.gather()
        with stand_ins(optimizer, replaced):
            optimizer.step()
        if within is not None:
            within.scatter()
        self.spread(parameters)

    def begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give the optimizer only what this rank updates, for one update."""
        self.end()  # of an update that raised
        self.running.begin(optimizer, self.parts(optimizer, parameters))

    def end(self) -> None:
        """Give the optimizer all its parameters back."""
        self.running.end()

    def parts(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> dict[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Return the parameter that the optimizer has in the place of each one; None where another rank updates it."""
        self.keep_own_state(optimizer, parameters)
        self.stand_ins = {}
        for parameter in parameters.values():
            if self.is_here(parameter):
                self.stand_ins[parameter] = self._stand_in(parameter)
        return {parameter: self.stand_ins.get(parameter) for parameter in parameters.values()}

    def is_here(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this rank updates a parameter, or rows of it."""
        return self.owners[parameter] in (None, self.comm.rank)

    def keep_own_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Keep this rank's part of whole state, which an optimizer's constructor has made or a loop has loaded."""
        for part in parts_of(optimizer):
            for parameter in parameters.values():
                if not self.is_here(parameter):
                    part.state.pop(parameter, None)
                    continue
                for key, value in part.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        part.state[parameter][key] = self._own_part(value, parameter)

    def spread(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give every rank what the others have updated. Collective."""
        rows: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        wholes: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters.values():
            owner = self.owners[parameter]
            if parameter.grad is None:
                continue
            if owner is None:
                rows.setdefault(parameter.dtype, []).append(parameter)
            else:
                wholes.setdefault((owner, parameter.dtype), []).append(parameter.detach())
        with torch.no_grad():
            self._write_back()
            for members in rows.values():
                self._gather_rows(members)
            for (owner, _), values in wholes.items():
                flat = _flat(values)
                self.comm.broadcast(flat, owner)
                if owner != self.comm.rank:
                    _write(values, flat)

    def state_shards(self) -> dict[str, LocalShard]:
        """Return this rank's shard of the optimizer's state of each parameter, and the ranks that have the same."""
        shards = {}
        for parameter, name in self.names.items():
            cut = self.cut_of(parameter)
            spec = ShardSpec(tuple(parameter.shape), () if cut is None else (cut,))
            shards[OPTIMIZER + name] = LocalShard(spec, self.replicas if self.is_here(parameter) else ())
        return shards

    def cut_of(self, parameter: torch.nn.Parameter) -> Cut | None:
        """Return the cut of a parameter into rows; None where one rank updates all of it."""
        if self.owners[parameter] is not None:
            return None
        return Cut(0, (parameter.shape[0],), self.comm.rank, self.comm.size)

    def _part_of(self, tensor: torch.Tensor, parameter: torch.nn.Parameter, rank: int) -> torch.Tensor:
        """Return the part, of a tensor with the parameter's shape, that a rank updates."""
        if self.owners[parameter] is not None:
            return tensor.detach()
        start, stop = chunk_range(tensor.shape[0], rank, self.comm.size)
        return tensor.detach()[start:stop]

    def _stand_in(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return this rank's part of a parameter, with that of its gradient: of the same memory, where it may be."""
        if self.owners[parameter] is not None and self.device is None:
            return parameter
        part = self._part_of(parameter, parameter, self.comm.rank)
        stand_in = torch.nn.Parameter(part if self.device is None else part.to(self.device), parameter.requires_grad)
        if parameter.grad is not None:
            gradient = self._part_of(parameter.grad, parameter, self.comm.rank)
            stand_in.grad = gradient if self.device is None else gradient.to(self.device)
        return stand_in

    def _own_part(self, value: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a state tensor, which may be whole, where the state is to be."""
        if self.owners[parameter] is None and value.shape == parameter.shape:
            part = self._part_of(value, parameter, self.comm.rank)
            value = value if part.shape == value.shape else part.clone()
        return value if self.device is None else value.to(self.device)

    def _write_back(self) -> None:
        """Write new values into the parameters, where they are in another memory: the host's, or `data` was set."""
        for parameter, stand_in in self.stand_ins.items():
            if storage_key(stand_in) != storage_key(parameter):
                self._part_of(parameter, parameter, self.comm.rank).copy_(stand_in.detach())
        self.stand_ins = {}

    def _gather_rows(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Write the other ranks' rows of these parameters, which are of one dtype."""
        rows = []
        for rank in range(self.comm.size):
            rows.append([self._part_of(parameter, parameter, rank) for parameter in parameters])
        lengths = [sum(part.numel() for part in parts) for parts in rows]
        received = self.comm.all_gather_along(_flat(rows[self.comm.rank]), lengths, 0)
        for rank, values in enumerate(received):
            if rank != self.comm.rank:
                _write(rows[rank], values)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy into each tensor its numbers, which stand one after another."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
