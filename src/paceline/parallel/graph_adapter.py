"""A model split by `tensor` and `pipeline`, with `shard` between steps, as `apply.py` drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.pytree import tensors_in
from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import PLACE_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, LocalShard, ShardSpec
from paceline.parallel.graph_model import SplitModel
from paceline.parallel.micro_batches import StepHooks, forward_backward
from paceline.parallel.model_adapter import Autocast
from paceline.parallel.observer import StepObserver
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.pipeline.strategy import Pipeline
from paceline.parallel.pipeline.tied_weights import add_tied_gradients
from paceline.parallel.shard.zero1 import FlatShard
from paceline.parallel.tensor import run_whole
from paceline.parallel.whole_update import CutParameter, WholeUpdate


class GraphAdapter:
    """The split model on this rank.

    Args:
        split: decided and filled.
        axes: the mesh's axes.
        plan: its mesh and options.
        rank: this rank in the world.
        autocast: the workload's precision.
    """

    is_captured = True

    def __init__(
        self, split: SplitModel, axes: Mapping[str, AxisComm], plan: Plan, rank: int, autocast: Autocast
    ) -> None:
        self.couples_samples = split.coupled
        self.written_buffers = split.written_by_hand
        self.split = split
        self.axes = axes
        self.plan = plan
        self.rank = rank
        self.autocast = autocast
        self.model = split.model
        self.mesh = Mesh.parse(plan.mesh)
        self.pipeline: Pipeline | None = None
        if axes["pipeline"].size > 1:
            self.pipeline = Pipeline(split, axes["pipeline"], plan, autocast)
        self.whole: dict[str, torch.nn.Parameter] = {}
        for name, tensor in split.local.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.whole[name] = tensor
        self.whole_update: WholeUpdate | None = None
        self.flat: FlatShard | None = None
        # What the optimizer updates: whole pieces, or rows of them; the graphs always read `whole`.
        self.own: Mapping[str, torch.nn.Parameter] = self.whole
        if axes["shard"].size > 1:
            self.flat = FlatShard(self.whole, axes["shard"])
            self.flat.split()
            self.own = self.flat.rows
            self._show_rows()
        # Ranks of some axes have the same samples, and only the last stage has a loss: one rank counts it.
        last_stage = split.stages - 1
        is_first = all(axes[axis].rank == 0 for axis in PLACE_AXES)
        self.counts_loss = is_first and last_stage in split.own_stages
        # With tied weights or rows a gradient is summed once more after the backward pass: `replicate` has to wait.
        self.finishes_later = self.pipeline is not None or self.flat is not None
        self.holders: dict[str, list[int]] = {}
        for name, _ in split.form.named_parameters():
            self.holders[name] = sorted(_pipeline_ranks(split, name))

    @property
    def notices(self) -> Sequence[str]:
        """Return what the person should know: more where batches of a new shape bring more."""
        return self.split.notices

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Have `observer` told of activations that leave; a graph's numbers depend on no other rank's."""
        if self.split.offloaded is not None:
            self.split.offloaded.observer = observer

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """Return this rank's pieces; rows of them where `shard` splits them further."""
        return self.own

    def sparse(self) -> set[str]:
        """Return nothing: gradients of graphs are dense."""
        return set()

    def begin_step(self) -> None:
        """Make parameters whole."""
        if self.flat is not None:
            self.flat.gather()

    def before_backward(self, is_last: bool, is_padding: bool = False) -> None:
        """Do nothing."""

    def forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks, longest: int) -> None:
        """Run micro-batches through the stages, or one after another where there is one stage."""
        with self.split.loads.counting():
            self._forward_backward(loss, microbatches, hooks)

    def _forward_backward(self, loss: Any, microbatches: Sequence[Any], hooks: StepHooks) -> None:
        if self.pipeline is not None:
            self.pipeline.forward_backward(loss, microbatches, hooks)
            return

        def run(batch: Any) -> Any:
            with self.autocast():
                return run_whole(self.split, "loss", loss, batch, tensors_in(batch), True)

        forward_backward(run, microbatches, hooks)

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Return `microbatches`; beside `shard`, with None for each in which this rank only gathers along.

        Without `shard` every rank goes at its own pace.
        """
        # Beside `shard` each micro-batch of an evaluation gathers: a rank that left it out would leave the others
        # waiting.
        missing = longest - len(microbatches) if self.flat is not None else 0
        return [*microbatches, *[None] * missing]

    def finish_backward(self) -> None:
        """Add up what several stages and `shard`'s ranks have."""
        # First the stages, then the rows: a tied weight's sum is over whole pieces.
        if self.pipeline is not None:
            add_tied_gradients(self.whole, self.holders, self.axes["pipeline"])
        if self.flat is not None:
            self.flat.scatter()

    def update_whole(self, names: set[str]) -> None:
        """Have the optimizer update these parameters as a whole; `names` are of all stages."""
        check_whole_experts(self.split, names)
        cut = cut_parameters(self.split, self.axes["shard"], names)
        if cut:
            pieces = {name: piece for name, piece in self.own.items() if name in cut}
            self.whole_update = WholeUpdate(cut, pieces, self.axes, self.mesh)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on the parameters themselves, or on the whole ones that this rank owns."""
        if self.whole_update is None:
            optimizer.step()
        else:
            self.whole_update.step(optimizer)

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """Return whether this rank counts each parameter in the norm: one rank counts what several hold alike."""
        at = {axis: comm.rank for axis, comm in self.axes.items()}
        counts = {}
        # Of the ranks with the same piece the first one counts; a rank with a piece of its own always does.
        for name, parameter in self.own.items():
            cuts = self.split.cuts(name)
            has_rows = self.flat is not None and parameter.dim() > 0
            is_first = all(axis in cuts or at[axis] == 0 for axis in ("expert", "tensor"))
            if name in self.split.expert_owners:
                is_first = "tensor" in cuts or at["tensor"] == 0
            is_first &= self.holders[name][0] == at["pipeline"]
            is_first &= self.flat is None or has_rows or at["shard"] == 0
            counts[parameter] = is_first
        return counts

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """Run the captured function forwards; a rank without a batch only gathers along."""
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
        """Return the pieces of tensors, and the ranks that hold the same ones."""
        shards = {name: self._local_shard(name) for name in self.split.local}
        if self.whole_update is not None:
            shards |= self.whole_update.state_shards()
        return shards

    def of_experts(self) -> set[str]:
        """Return the parameters of which each rank of `expert` holds other experts' weights."""
        return self.split.of_experts & self.own.keys()

    def take_expert_rows(self) -> dict[str, torch.Tensor]:
        """Return how many rows of this rank's tokens have gone to each expert of each layer since it was asked last."""
        return {name: self.split.loads.take(name, count) for name, count in self.split.expert_layers.items()}

    def close(self) -> None:
        """Do nothing."""

    def _local_shard(self, name: str) -> LocalShard:
        shard_spec = self.split.shard_spec(name)
        shard = self.axes["shard"]
        is_cut = self.flat is not None and name in self.own and len(shard_spec.shape) > 0
        if is_cut:
            rows = shard_spec.local_shape[0]
            shard_spec = ShardSpec(shard_spec.shape, (*shard_spec.cuts, Cut(0, (rows,), shard.rank, shard.size)))
        return LocalShard(shard_spec, self._ranks_with_same(name, is_cut))

    def _ranks_with_same(self, name: str, is_cut: bool) -> tuple[int, ...]:
        """Return the ranks that hold the same piece of a state; with `is_cut`, the same rows of it."""
        here = self.mesh.coordinate(self.rank)
        axes = list(self.split.cuts(name))  # along which the piece is another one
        if name in self.split.expert_owners:
            axes.append("expert")
        if is_cut:
            axes.append("shard")
        pipeline_ranks = _pipeline_ranks(self.split, name)
        holders = []
        for rank in range(self.mesh.world_size):
            coordinate = self.mesh.coordinate(rank)
            if coordinate["pipeline"] in pipeline_ranks and all(coordinate[axis] == here[axis] for axis in axes):
                holders.append(rank)
        return tuple(holders)

    def _show_rows(self) -> None:
        """Put the rows in the model where whole parameters were: that is what the optimizer is to see."""
        assert self.flat is not None
        rows = {id(self.whole[name]): row for name, row in self.flat.rows.items()}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in rows:
                    module._parameters[key] = rows[id(parameter)]


def check_whole_experts(split: SplitModel, names: set[str]) -> None:
    """Raise PlanError if the optimizer must update weights whole of which each rank of `expert` has a part.

    Args:
        split: the model.
        names: of the parameters that it can't update in parts.
    """
    of_experts = sorted(names & split.of_experts)
    if of_experts:
        more = f" and {len(of_experts) - 1} more" if len(of_experts) > 1 else ""
        raise PlanError(
            "the axis expert gives each rank some experts' part of a weight to update",
            f"the optimizer looks at the whole of {of_experts[0]}{more}",
            "take one that updates each element by itself, such as AdamW or SGD, or write tensor in place of expert",
        )


def cut_parameters(split: SplitModel, shard: AxisComm, names: set[str]) -> dict[str, CutParameter]:
    """Return how the axes cut these parameters, on this rank or not; what no axis cuts is left out."""
    cut = {}
    for name, _ in split.form.named_parameters():
        shard_spec = split.shard_spec(name)
        cuts = split.cuts(name)
        if shard.size > 1 and shard_spec.shape:
            cuts["shard"] = Cut(0, (shard_spec.local_shape[0],), shard.rank, shard.size)
        if name in names and cuts:
            cut[name] = CutParameter(shard_spec.shape, cuts, tuple(sorted(_pipeline_ranks(split, name))))
    return cut


def _pipeline_ranks(split: SplitModel, name: str) -> set[int]:
    """Return the ranks of the pipeline that hold a state: stage s runs on rank s modulo their number."""
    return {stage % split.pipeline.size for stage in split.owners(name)}
