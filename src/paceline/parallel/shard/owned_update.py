"""ZeRO-1 for a loop of the user's own: each parameter is updated by one rank of `shard`, its owner.

The loop uses whole parameters wherever it likes, so these and their gradients stay whole on every rank; the
optimizer's state, which is the most of what Adam holds, is on the owners alone. torch's ZeroRedundancyOptimizer shares
parameters out in the same way.

Needs: summed gradients; an optimizer that updates each parameter from that parameter's value, gradient and state alone.
Promises: the update is that of one rank, for any such optimizer: LAMB, Muon and Adafactor get whole parameters.
Traffic per update: the bytes of the optimizer's parameters that have gradients, once: a broadcast per owner and dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm.collectives import AxisComm
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.parallel.optimizer_parts import parts_of
from paceline.parallel.shard.local_optimizer_step import stand_ins


class OwnedUpdates:
    """Which rank updates what.

    Args:
        comm: the axis `shard`.
        replicas: the ranks of the world that update the same as this one, itself among them.
    """

    def __init__(self, comm: AxisComm, replicas: tuple[int, ...]) -> None:
        self.comm = comm
        self.replicas = replicas
        self.owners: dict[torch.nn.Parameter, int] = {}
        self.names: dict[torch.nn.Parameter, str] = {}
        self.loads: Counter[int] = Counter()
        self.running: AbstractContextManager[None] | None = None

    def assign(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give each new parameter an owner, the largest first to the rank that has the least; equal on all ranks."""
        new = [name for name, parameter in parameters.items() if parameter not in self.owners]
        for name in sorted(new, key=lambda name: (-parameters[name].numel(), name)):
            owner = min(range(self.comm.size), key=lambda rank: (self.loads[rank], rank))
            self.loads[owner] += parameters[name].numel()
            self.owners[parameters[name]] = owner
            self.names[parameters[name]] = name

    def begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Leave the optimizer what this rank owns, for one update."""
        self.end()  # of an update that raised
        replaced: dict[torch.nn.Parameter, torch.nn.Parameter | None] = {}
        for parameter in parameters.values():
            replaced[parameter] = parameter if self.owners[parameter] == self.comm.rank else None
        for part in parts_of(optimizer):
            for one, own in replaced.items():
                if own is None:
                    part.state.pop(one, None)  # the loop has loaded whole state
        self.running = stand_ins(optimizer, replaced)
        self.running.__enter__()

    def end(self) -> None:
        """Give the optimizer all its parameters back."""
        running = self.running
        self.running = None
        if running is not None:
            running.__exit__(None, None, None)

    def spread(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give every rank what the owners have updated. Collective."""
        by_message: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for parameter in parameters.values():
            if parameter.grad is not None:
                key = self.owners[parameter], parameter.dtype
                by_message.setdefault(key, []).append(parameter.detach())
        for (owner, _), values in by_message.items():
            flat = torch.cat([value.reshape(-1) for value in values])
            self.comm.broadcast(flat, owner)
            if owner == self.comm.rank:
                continue
            for value, received in zip(values, flat.split([value.numel() for value in values]), strict=True):
                value.copy_(received.view_as(value))

    def state_shards(self) -> dict[str, LocalShard]:
        """Return for each parameter where the optimizer's state of it is."""
        shards = {}
        for parameter, owner in self.owners.items():
            holders = self.replicas if owner == self.comm.rank else ()
            shards[OPTIMIZER + self.names[parameter]] = LocalShard(ShardSpec(tuple(parameter.shape)), holders)
        return shards
