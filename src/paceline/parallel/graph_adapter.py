"""A model split by `tensor` and `pipeline`, with `shard` between steps, as `apply.py` drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.pytree import tensors_in
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, LocalShard, ShardSpec
from paceline.parallel.graph_model import SplitModel
from paceline.parallel.micro_batches import StepHooks, forward_backward
from paceline.parallel.model_adapter import Autocast
from paceline.parallel.pipeline.strategy import Pipeline
from paceline.parallel.pipeline.tied_weights import add_tied_gradients
from paceline.parallel.shard.zero1 import FlatShard
from paceline.parallel.tensor import run_whole


class GraphAdapter:
    """The split model on this rank.

    Args:
        split: decided and filled.
        axes: the mesh's axes.
        plan: its mesh and options.
        rank: this rank in the world.
        autocast: the workload's precision.
    """

    is_plain, is_captured = False, True

    def __init__(
        self, split: SplitModel, axes: Mapping[str, AxisComm], plan: Plan, rank: int, autocast: Autocast
    ) -> None:
        self.couples_samples, self.written_buffers = split.coupled, split.written_by_hand
        self.notices = split.notices
        self.split, self.axes, self.plan, self.rank, self.autocast = split, axes, plan, rank, autocast
        self.model, self.mesh = split.model, Mesh.parse(plan.mesh)
        self.pipeline = Pipeline(split, axes["pipeline"], plan, autocast) if axes["pipeline"].size > 1 else None
        self.whole = {name: tensor for name, tensor in split.local.items() if isinstance(tensor, torch.nn.Parameter)}
        self.flat: FlatShard | None = None
        self.own: Mapping[str, torch.nn.Parameter] = self.whole
        if axes["shard"].size > 1:
            self.flat = FlatShard(self.whole, axes["shard"])
            self.flat.split()
            self.own = self.flat.rows
            self._show_rows()
        last = split.stages - 1
        self.counts_loss = axes["tensor"].rank == 0 and last in split.own_stages
        self.finishes_later = self.pipeline is not None or self.flat is not None
        self.holders = {
            name: sorted({stage % axes["pipeline"].size for stage in split.owners(name)})
            for name, _ in split.form.named_parameters()
        }

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """This rank's pieces; rows of them where `shard` splits them further."""
        return self.own

    def sparse(self) -> set[str]:
        """None: gradients of graphs are dense."""
        return set()

    def begin_step(self) -> None:
        """Make parameters whole."""
        if self.flat is not None:
            self.flat.gather()

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Nothing to do."""

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks, longest: int) -> None:
        """Through the stages, or one micro-batch after another where there is one stage."""
        if self.pipeline is not None:
            self.pipeline.forward_backward(loss, microbatches, hooks.add)
            hooks.after_forwards()
            return

        def run(batch: Any) -> Any:
            with self.autocast():
                return run_whole(self.split, "loss", loss, batch, tensors_in(batch), True)

        forward_backward(run, microbatches, hooks)

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Every rank goes at its own pace; beside `shard`, one that has fewer gathers along (None)."""
        missing = longest - len(microbatches) if self.flat is not None else 0
        return [*microbatches, *[None] * missing]

    def finish_backward(self) -> None:
        """Add up what several stages and `shard`'s ranks have."""
        if self.pipeline is not None:
            add_tied_gradients(self.whole, self.holders, self.axes["pipeline"])
        if self.flat is not None:
            self.flat.scatter()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """On the parameters themselves."""
        optimizer.step()

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """One rank counts what several hold alike."""
        at = {axis: comm.rank for axis, comm in self.axes.items()}
        result = {}
        for name, parameter in self.own.items():
            is_first = self.split.placements.get(name) is not None or at["tensor"] == 0
            is_first &= self.holders[name][0] == at["pipeline"]
            is_first &= self.flat is None or parameter.dim() > 0 or at["shard"] == 0
            result[parameter] = is_first
        return result

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """The captured function, forwards."""
        if self.flat is not None:
            self.flat.gather()
        try:
            if batch is None:
                return {}
            if self.pipeline is not None:
                return self.pipeline.evaluate(name, score, batch)
            return run_whole(self.split, name, score, batch, tensors_in(batch), False)
        finally:
            if self.flat is not None:
                self.flat.release()

    def held(self) -> dict[str, LocalShard]:
        """Pieces of tensors, and the ranks that hold the same ones."""
        return {name: self._held(name) for name in self.split.local}

    def close(self) -> None:
        """Nothing to let go of."""

    def _held(self, name: str) -> LocalShard:
        shard_spec = self.split.shard_spec(name)
        shard = self.axes["shard"]
        is_cut = self.flat is not None and name in self.own and len(shard_spec.shape) > 0
        if is_cut:
            rows = shard_spec.local_shape[0]
            shard_spec = ShardSpec(shard_spec.shape, (*shard_spec.cuts, Cut(0, (rows,), shard.rank, shard.size)))
        here = self.mesh.coordinate(self.rank)
        fixed = {"tensor": self.split.placements.get(name) is not None, "shard": is_cut}
        stages = {stage % self.axes["pipeline"].size for stage in self.split.owners(name)}
        holders = [
            rank
            for rank in range(self.mesh.world_size)
            if (at := self.mesh.coordinate(rank))["pipeline"] in stages
            and all(at[axis] == here[axis] for axis, is_fixed in fixed.items() if is_fixed)
        ]
        return LocalShard(shard_spec, tuple(holders))

    def _show_rows(self) -> None:
        """Put the rows in the model where whole parameters were: that is what the optimizer is to see."""
        assert self.flat is not None
        rows = {id(self.whole[name]): row for name, row in self.flat.rows.items()}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in rows:
                    module._parameters[key] = rows[id(parameter)]
