"""A model in FSDP2's shards (ZeRO-2, ZeRO-3), as `engine/declared.py` drives it; `replicate` sums the shards (HSDP)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.batch_norm import SharedStatistics
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.parallel.model_adapter import Autocast, OwnCode
from paceline.parallel.observer import StepObserver
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.shard.local_optimizer_step import step_on_rows
from paceline.parallel.shard.shard_strategy import Shard
from paceline.parallel.whole_update import WholeUpdate


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """The settings of a forward pass.

    Attributes:
        autocast: a function that returns the context of the workload's precision.
        example: a micro-batch, which a rank without one of its own runs.
        shared: the batch norm statistics that the ranks share; None where each micro-batch has its own.
    """

    autocast: Autocast
    example: object
    shared: SharedStatistics | None


class FsdpAdapter(OwnCode):
    """The sharded model on this rank; its parameters wait for `fill`."""

    finishes_later = True
    keeps_pace = True  # FSDP2's collectives want every rank there

    def __init__(
        self,
        model: torch.nn.Module,
        axes: Mapping[str, AxisComm],
        plan: Plan,
        device: torch.device,
        settings: ForwardSettings,
    ) -> None:
        self.shared = settings.shared
        self.model = model
        self.axes = axes
        self.autocast = settings.autocast
        self.shard = Shard(model, axes["shard"], plan, device)
        self.plan = plan
        self.whole_update: WholeUpdate | None = None
        # Read after the split, which puts DTensors in the places of parameters.
        self.parameters = dict(model.named_parameters())
        self.spare = settings.example

    def fill(self, name: str, full: torch.Tensor) -> None:
        """Take this rank's rows of a parameter, or a whole buffer."""
        if name in self.parameters:
            self.shard.fill(name, full)
        else:
            dict(self.model.named_buffers())[name].copy_(full)

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Have `observer` told of gathered blocks, and the uses of parameters read by `peer_values`."""
        super().attach(observer, peer_values)
        self.shard.attach(observer, peer_values)

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """Return this rank's rows, as DTensors."""
        return self.parameters

    def sparse(self) -> set[str]:
        """Return nothing: sparse gradients are refused."""
        return set()

    def begin_step(self) -> None:
        """Forget the step before."""
        self.shard.begin_step()

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Have FSDP2 sum in this backward pass, or wait for the last."""
        self.shard.begin_backward(is_last, is_padding)

    def call(self, function: Any, batch: Any) -> Any:
        """Call the user's function; parameters are gathered as it runs."""
        return self.shard.forward(function, batch)

    def finish_backward(self) -> None:
        """Let the last whole parameters go."""
        self.shard.finish_backward()

    def update_whole(self, names: set[str], optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer update these parameters as a whole.

        Raises:
            PlanError: they are in host memory, where no rank gathers them.
        """
        cut = self.shard.cut_parameters(names)
        if cut and self.plan.offload == "on":
            raise PlanError(
                "optimizer state in host memory (offload=on)",
                f"the optimizer needs {next(iter(cut))} as a whole, which is put together on a rank's device",
                "leave offload out, or take an optimizer that updates element by element, such as AdamW",
            )
        if cut:
            pieces = {name: self.parameters[name] for name in cut}
            self.whole_update = WholeUpdate(self.axes["shard"], cut, pieces)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on this rank's rows, and on the whole parameters that it owns."""
        if self.whole_update is None:
            step_on_rows(optimizer)
        else:
            self.whole_update.step(optimizer)

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """Return whether this rank counts each parameter: parts always, what stays whole on the axis' first rank."""
        is_first = self.axes["shard"].rank == 0
        shard_specs = self.shard.shard_specs()
        counts = {}
        for name, parameter in self.parameters.items():
            counts[parameter] = bool(shard_specs[name].cuts) or is_first
        return counts

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """Call the score as in training."""
        return self.call(score, batch)

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the rows, and the replicas that hold the same."""
        replicas = tuple(sorted(self.axes["replicate"].peers))
        shards = {}
        for name, shard_spec in self.shard.shard_specs().items():
            if shard_spec.cuts:
                shards[name] = LocalShard(shard_spec, replicas)
        if self.whole_update is not None:
            shards |= self.whole_update.state_shards(replicas)
        return shards

    def of_experts(self) -> set[str]:
        """Return none: experts are spread where the model runs as graphs."""
        return set()

    def close(self) -> None:
        """Let go of the other ranks."""
        self.shard.close()
