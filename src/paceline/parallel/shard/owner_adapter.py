"""A model under `shard` with zero=1, as `engine/declared.py` drives it: as under `replicate`, but for the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.comm.batch_norm import SharedStatistics
from paceline.comm.collectives import AxisComm
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.model_adapter import Autocast, EagerAdapter
from paceline.parallel.observer import GATHER, StepObserver
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.shard.owned_update import OwnedUpdates
from paceline.parallel.whole_update import share_out


class OwnerAdapter(EagerAdapter):
    """A model of which this rank has every parameter whole, and updates a part."""

    def __init__(
        self,
        model: torch.nn.Module,
        autocast: Autocast,
        axes: Mapping[str, AxisComm],
        plan: Plan,
        shared: SharedStatistics | None = None,
        spare: Any = None,
    ) -> None:
        super().__init__(model, autocast, shared, spare)
        device = torch.device("cpu") if plan.offload == "on" else None
        self.owned = OwnedUpdates(axes["shard"], tuple(sorted(axes["replicate"].peers)), device)
        self.owned.assign_rows(self.parameters, {})
        self.observer = StepObserver()

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Have `observer` told of activations that leave, and of the gathering of new values."""
        super().attach(observer, peer_values)
        self.observer = observer

    def update_whole(self, names: set[str], optimizer: torch.optim.Optimizer) -> None:
        """Have one rank update each of these parameters; of all others each rank updates its rows."""
        sizes = {}
        for name, parameter in self.parameters.items():
            if name in names or not parameter.dim():
                sizes[name] = parameter.numel()
        self.owned.assign_rows(self.parameters, share_out(sizes, self.owned.comm.size))
        self.owned.keep_own_state(optimizer, self.parameters)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on this rank's parts, and get those of the others."""
        self.owned.begin(optimizer, self.parameters)
        try:
            optimizer.step()
        finally:
            self.owned.end()
        self.observer.phase_begins(GATHER)
        self.owned.spread(self.parameters)

    def local_shards(self) -> dict[str, LocalShard]:
        """Return this rank's shards of the optimizer's state; parameters are whole everywhere."""
        return self.owned.state_shards()
