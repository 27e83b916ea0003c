"""A model split by `tensor` and `pipeline`, with `shard` sharing out updates, as `engine/declared.py` drives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import PLACE_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard, ShardSpec
from paceline.parallel.graph_model import SplitModel
from paceline.parallel.micro_batches import StepHooks, forward_backward
from paceline.parallel.model_adapter import Autocast
from paceline.parallel.observer import StepObserver
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.pipeline.pipeline_strategy import Pipeline
from paceline.parallel.shard.owned_update import OwnedUpdates
from paceline.parallel.whole_update import CutParameter, WholeUpdate, share_out

_TIED_TAG = 1 << 20  # above the tags of micro-batches


class GraphAdapter:
    """The split model on this rank.

    Args:
        split: the split model, decided and filled.
        axes: the communicators of the mesh's axes, by name.
        plan: the job's plan, with its mesh and options.
        rank: this rank's number in the world.
        autocast: a function that returns the context of the workload's precision.
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
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for name, tensor in split.local.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.parameters[name] = tensor
        self.whole_names: set[str] = set()  # of the pieces that the optimizer updates as a whole
        self.whole_update: WholeUpdate | None = None
        self.owned: OwnedUpdates | None = None
        if axes["shard"].size > 1:
            self.owned = OwnedUpdates(axes["shard"], ())
            self.owned.assign_rows(self.parameters, {})
        # Ranks of some axes have the same samples, and only the last stage has a loss: one rank counts it.
        last_stage = split.stages - 1
        is_first = all(axes[axis].rank == 0 for axis in PLACE_AXES)
        self.counts_loss = is_first and last_stage in split.own_stages
        # With tied weights a gradient is summed once more after the backward pass: `replicate` has to wait.
        self.finishes_later = self.pipeline is not None
        self.holders = {name: split.pipeline_ranks(name) for name, _ in split.form.named_parameters()}

    @property
    def notices(self) -> Sequence[str]:
        """Return notices for the user; batches of a new shape may add to them."""
        return self.split.notices

    def attach(self, observer: StepObserver, peer_values: PeerValues) -> None:
        """Have `observer` told of activations that leave; a graph's numbers depend on no other rank's."""
        if self.split.offloaded is not None:
            self.split.offloaded.observer = observer

    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """Return this rank's pieces."""
        return self.parameters

    def sparse(self) -> set[str]:
        """Return nothing: gradients of graphs are dense."""
        return set()

    def begin_step(self) -> None:
        """Do nothing."""

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
                return self.split.run("loss", loss, batch)

        forward_backward(run, microbatches, hooks)

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Return `microbatches`: every rank goes at its own pace."""
        return list(microbatches)

    def finish_backward(self) -> None:
        """Add up the gradients of parameters that several stages hold."""
        if self.pipeline is not None:
            add_tied_gradients(self.parameters, self.holders, self.axes["pipeline"])

    def update_whole(self, names: set[str], optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer update these parameters as a whole; `names` are of all stages."""
        check_whole_experts(self.split, names)
        owners = find_owners(self.split, self.mesh, names)
        if self.owned is not None:
            self.owned.assign_rows(self.parameters, owners["shard"])
            self.owned.keep_own_state(optimizer, self.parameters)
        self.whole_names = owners["tensor"].keys() & self.parameters.keys()
        cut = {}
        for name in self.whole_names:
            if self.owned is None or self.owned.is_here(self.parameters[name]):
                spec = self.split.shard_spec(name)
                cut[name] = CutParameter(spec.shape, spec.cuts[0], owners["tensor"][name])
        if cut:
            pieces = {name: piece for name, piece in self.parameters.items() if name in cut}
            self.whole_update = WholeUpdate(self.axes["tensor"], cut, pieces)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on the parameters themselves, or on the parts or wholes that this rank updates."""
        if self.owned is not None:
            self.owned.step(optimizer, self.parameters, self.whole_update)
        elif self.whole_update is not None:
            self.whole_update.step(optimizer)
        else:
            optimizer.step()

    def counted(self) -> Mapping[torch.nn.Parameter, bool]:
        """Return whether this rank counts each parameter in the norm: one rank counts what several hold alike."""
        at = {axis: comm.rank for axis, comm in self.axes.items()}
        counts = {}
        # Of the ranks with the same piece the first one counts; a rank with a piece of its own always does.
        for name, parameter in self.parameters.items():
            cuts = self.split.cuts(name)
            is_first = all(axis in cuts or at[axis] == 0 for axis in ("expert", "tensor"))
            if name in self.split.expert_owners:
                is_first = "tensor" in cuts or at["tensor"] == 0
            is_first &= self.holders[name][0] == at["pipeline"]
            counts[parameter] = is_first
        return counts

    def evaluate(self, name: str, score: Any, batch: Any) -> Any:
        """Run the captured function forwards; a rank without a batch has nothing to run."""
        if batch is None:
            return {}
        if self.pipeline is not None:
            return self.pipeline.evaluate(name, score, batch)
        return self.split.run(name, score, batch, is_training=False)

    def local_shards(self) -> dict[str, LocalShard]:
        """Return the pieces of tensors and of the optimizer's state, and the ranks that hold the same ones."""
        shards = {}
        for name in self.split.local:
            shards[name] = LocalShard(self.split.shard_spec(name), self._ranks_with_same(name, []))
        for name, parameter in self.parameters.items():
            if self.owned is not None or name in self.whole_names:
                shards[OPTIMIZER + name] = self._state_shard(name, parameter)
        return shards

    def _state_shard(self, name: str, parameter: torch.nn.Parameter) -> LocalShard:
        """Return this rank's shard of the optimizer's state of a parameter, and the ranks that hold the same."""
        spec = self.split.shard_spec(name)
        is_here = True
        axes = []  # whose ranks hold other parts, or none
        if name in self.whole_names:
            spec = ShardSpec(spec.shape)
            axes.append("tensor")
            is_here = self.whole_update is not None and self.whole_update.owns(name)
        if self.owned is not None:
            cut = self.owned.cut_of(parameter)
            spec = ShardSpec(spec.shape, spec.cuts if cut is None else (*spec.cuts, cut))
            axes.append("shard")
            is_here &= self.owned.is_here(parameter)
        return LocalShard(spec, self._ranks_with_same(name, axes) if is_here else ())

    def of_experts(self) -> set[str]:
        """Return the parameters of which each rank of `expert` holds other experts' weights."""
        return self.split.of_experts & self.parameters.keys()

    def take_expert_rows(self) -> dict[str, torch.Tensor]:
        """Return the rows of this rank's tokens for each expert since the last call: one tensor of counts per layer."""
        return {name: self.split.loads.take(name, count) for name, count in self.split.expert_layers.items()}

    def close(self) -> None:
        """Do nothing."""

    def _ranks_with_same(self, name: str, cut_axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that hold the same part of a tensor as this one; ranks along `cut_axes` do not."""
        own_coordinate = self.mesh.coordinate(self.rank)
        axes = [*self.split.cuts(name), *cut_axes]  # along which the piece is another one
        if name in self.split.expert_owners:
            axes.append("expert")
        pipeline_ranks = self.split.pipeline_ranks(name)
        holders = []
        for rank in range(self.mesh.world_size):
            coordinate = self.mesh.coordinate(rank)
            if coordinate["pipeline"] in pipeline_ranks and all(
                coordinate[axis] == own_coordinate[axis] for axis in axes
            ):
                holders.append(rank)
        return tuple(holders)


def check_whole_experts(split: SplitModel, names: set[str]) -> None:
    """Raise PlanError if the optimizer must update weights whole of which each rank of `expert` has a part.

    Args:
        split: the split model.
        names: the names of the parameters that the optimizer can't update in parts.
    """
    of_experts = sorted(names & split.of_experts)
    if of_experts:
        more = f" and {len(of_experts) - 1} more" if len(of_experts) > 1 else ""
        raise PlanError(
            "the axis expert gives each rank some experts' part of a weight to update",
            f"the optimizer looks at the whole of {of_experts[0]}{more}",
            "take one that updates each element by itself, such as AdamW or SGD, or write tensor in place of expert",
        )


def find_owners(split: SplitModel, mesh: Mesh, names: set[str]) -> dict[str, dict[str, int]]:
    """Return the owner of each parameter that the optimizer updates as a whole, on this rank or not.

    Args:
        split: the split model.
        mesh: the plan's mesh.
        names: the names of the parameters that the optimizer can't update in parts.

    Returns:
        The owner's index on the axis, by axis and name. `shard` shares out all of them, and those without dimensions;
        `tensor` those that it cuts.
    """
    stages: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    cut = set()
    for name, _ in split.form.named_parameters():
        spec = split.shard_spec(name)
        if name in names or not spec.shape:
            stages[name] = split.pipeline_ranks(name)
            sizes[name] = spec.numel
        if name in names and "tensor" in split.cuts(name):
            cut.add(name)
    ranks = mesh.size("shard")
    by_shard = share_out(sizes, ranks, stages)
    by_tensor: dict[str, int] = {}
    for rank in range(ranks):  # each rank of `shard` shares out what it owns
        owned = {name: sizes[name] for name in cut if by_shard[name] == rank}
        by_tensor |= share_out(owned, mesh.size("tensor"), stages)
    return {"shard": by_shard, "tensor": by_tensor}


def add_tied_gradients(
    parameters: Mapping[str, torch.Tensor], holders: Mapping[str, Sequence[int]], comm: AxisComm
) -> None:
    """Sum the gradients of parameters that several pipeline stages hold, such as a tied embedding.

    Every holder sends its gradient to the others and adds all of them in stage order. The result has the same bits
    everywhere, so the copies stay equal under the same update. It is None where no holder has a gradient.

    Traffic per step: each holder sends the gradient once to every other holder.

    Args:
        parameters: this rank's parameters by name.
        holders: for every parameter of the model the ranks on the pipeline axis that hold it, in rising order; the
            same on all ranks.
        comm: the pipeline axis.
    """
    for number, (name, ranks) in enumerate(sorted(holders.items())):  # in the same order on every rank
        if len(ranks) < 2 or comm.rank not in ranks:
            continue
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        # (elements of the gradient + 1): the last is 1 if this rank has one
        own_gradient = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
        if parameter.grad is not None:
            own_gradient[:-1] = parameter.grad.reshape(-1)
            own_gradient[-1] = 1
        # All send before anybody waits in `receive`: two holders that waited for each other would hang.
        sending = [comm.begin_send(own_gradient, rank, _TIED_TAG + number) for rank in ranks if rank != comm.rank]
        total = torch.zeros_like(own_gradient)
        # In the same order on every holder: rounding depends on it.
        for rank in ranks:
            gradient = own_gradient
            if rank != comm.rank:
                gradient = torch.empty_like(own_gradient)
                comm.receive(gradient, rank, _TIED_TAG + number)
            total += gradient
        for pending in sending:
            pending.wait()
        # Where this rank has a gradient, the total is not read: the host would wait for it.
        has_gradient = parameter.grad is not None or float(total[-1]) > 0
        parameter.grad = total[:-1].view_as(parameter) if has_gradient else None
