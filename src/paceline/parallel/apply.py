"""The one place where strategies meet: which of them fills which moment of a step, in what order.

`strategy_of` chooses between collectives, below, and parameter servers (`parallel/server.py`), whose workers push and
pull in `reduce` and clip on the servers. Under collectives:

gather        shard          parameters made whole for the step
forward,      tensor         inside every stage
backward      pipeline       micro-batches through the stages
              (all)          with one micro-batch the loss is divided by the global weight before its backward pass
              replicate      gradients leave as they come, where nothing else must happen to them first
reduce        pipeline       gradients of parameters that several stages hold
              shard          summed, each rank its rows
              replicate      summed
              (all)          divided by the global weight, where they are those of the sum
change        replicate      by the user's function
clip          (all)          by the norm of the whole gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.comm.collectives import AxisComm, open_axes, open_product
from paceline.comm.ledger import Ledger
from paceline.nouns.errors import LossError
from paceline.nouns.mesh import AXES, DATA_AXES, EXPERT_GRADIENT_AXES, GRADIENT_AXES, SPREADING_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.record import ExpertLoad
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.workload import Workload
from paceline.parallel.effects import ALONE, OWNERS, REPLICAS, check_effects, placement_of
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.loss_scale import LossScale
from paceline.parallel.micro_batches import StepHooks
from paceline.parallel.model_adapter import ModelAdapter
from paceline.parallel.norm import global_norm, scale_gradients
from paceline.parallel.observer import FORWARD, GATHER, Observers, StepObserver
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.replicate.buffers import Buffers
from paceline.parallel.replicate.strategy import Replicate
from paceline.parallel.step_stats import StepStats, StepStatsReducer

Score = Callable[[Any, Any], Any]
FOLLOWED_STEPS = 3  # the first ones, in which hooks that were registered after the job was made are found


@dataclass(frozen=True, slots=True)
class Comms:
    """The axes of a mesh, and four made of several of them."""

    axes: Mapping[str, AxisComm]
    data: AxisComm  # ranks that see different samples: replicate times shard
    step: AxisComm  # ranks that take a step together: all of them
    gradients: AxisComm  # ranks with parts of the same gradients: replicate times expert times context
    expert_gradients: AxisComm  # of the weights of experts: replicate times context


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's number in the job, and the device on which it computes."""

    rank: int
    device: torch.device


class Parallel:
    """A step's moments, as this rank's strategies fill them.

    Args:
        placed: the model as this rank holds it.
        workload: loss and precision.
        comms: the mesh's axes.
        plan: the rest.
        place: this rank.
    """

    @staticmethod
    def check_own_batches(workload: Workload, plan: Plan) -> None:
        """Raise PlanError where the loop may not make its own batches; tensor and pipeline have reasons of their own.

        Args:
            workload: its data is None.
            plan: the job's.
        """

    @staticmethod
    def comm_mesh(mesh: Mesh, rank: int) -> tuple[Mesh, int]:
        """Return the mesh of process groups that a rank of `mesh` is in, and its number there."""
        return mesh, rank

    def __init__(self, placed: ModelAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        device = place.device
        self.placed = placed
        self.workload = workload
        self.comms = comms
        self.plan = plan
        self.rank = place.rank
        self.device = device
        self.observers = Observers()
        self.is_observed = False
        self.peer_values = PeerValues()
        self.mesh = Mesh.parse(plan.mesh)
        self.has_whole_stages = self.mesh.size("pipeline") == 1
        self.model = placed.model
        self.change_gradients: Callable[[Mapping[str, torch.nn.Parameter]], None] | None = None  # the user's function
        self.norm: float | None = None  # of the last gradient, where it was clipped on the way
        self.loss_scale: LossScale | None = None
        if workload.precision == "fp16":
            self.loss_scale = LossScale(workload.batch_size, device)
        self.buffers = Buffers(placed.model, comms.data)
        self.placement = placement_of(plan, self.is_loop)
        # Before the strategies' own hooks. One rank with one micro-batch has the whole gradient in its backward pass.
        self.takes_hooks = self.placement in (ALONE, REPLICAS, OWNERS)
        self.takes_hooks &= comms.data.size > 1 or workload.micro_batch_size is not None
        self.gradient_hooks = GradientHooks(placed.updated() if self.takes_hooks else {})
        self.followed_steps = 0
        # Each in the order of the model, which all ranks share.
        of_experts: dict[str, torch.nn.Parameter] = {}
        others: dict[str, torch.nn.Parameter] = {}
        for name, parameter in placed.updated().items():
            (of_experts if name in placed.of_experts() else others)[name] = parameter
        self.replicate = self.replicate_over(others)
        # Each rank of `expert` has other experts' weights: their gradients are no parts of the same.
        self.experts: Replicate | None = None
        if of_experts:
            self.experts = self._replicate_over(of_experts, comms.expert_gradients)
        # What sums gradients: of all parameters but those of experts, and of these.
        self.replicates = [self.replicate] if self.experts is None else [self.replicate, self.experts]
        # Shared memory is open between the ranks that sum gradients; the step's numbers may use it where these are all
        # ranks.
        shared = self.replicate.shared if comms.step.peers == comms.gradients.peers else None
        self.stats = StepStatsReducer(comms.step, shared, len(self.buffers.tensors), device, placed.counts_loss)

    def replicate_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return the strategy that sums these parameters' gradients over replicas and the like. Collective."""
        return self._replicate_over(parameters, self.comms.gradients)

    def _replicate_over(self, parameters: Mapping[str, torch.nn.Parameter], comm: AxisComm) -> Replicate:
        return Replicate(
            parameters,
            self.placed.sparse() & parameters.keys(),
            comm,
            self.plan,
            self.device,
            overlaps=not self.placed.finishes_later,
        )

    @property
    def clip_norm(self) -> float | None:
        """Return the largest norm of the whole gradient, where this rank is to clip by it."""
        return self.workload.clip_norm

    @staticmethod
    def check_data(data: Any) -> None:
        """Raise PlanError if the data set, or a stream, can't be trained on here."""

    is_loop: ClassVar[bool] = False  # the user's loop calls the parts of a step
    has_gradients: ClassVar[bool] = True  # those of the whole batch come to the ranks
    takes_metrics: ClassVar[bool] = True  # a scheduler may step by what all ranks agree on

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError if the optimizer, or several as one, can't run here."""

    def observe(self, observer: StepObserver) -> None:
        """Call `observer`'s methods in all steps from here on."""
        self.add_observer(observer)
        self.placed.attach(self.observers, self.peer_values)

    def add_observer(self, observer: StepObserver) -> None:
        """Call the methods of `observer` that belong to the step as a whole."""
        self.observers.observers.append(observer)
        self.is_observed = True

    def remove_observer(self, observer: StepObserver) -> None:
        """Call the methods of `observer` no longer."""
        self.observers.observers.remove(observer)
        self.is_observed = bool(self.observers.observers)

    def read_by(self, peer_values: PeerValues) -> None:
        """Read by `peer_values` what other ranks have sent."""
        self.peer_values = peer_values
        self.placed.attach(self.observers, peer_values)

    def forward_backward(self, microbatches: Sequence[Any], is_stopping: bool, longest: int = 1) -> None:
        """Run forward and backward passes over this rank's micro-batches.

        Args:
            microbatches: this rank's part of the batch, cut.
            is_stopping: whether this rank was asked to stop.
            longest: the most micro-batches that any rank has in this step.

        Raises:
            LossError: the loss has the wrong form.
        """
        # Before the first forward pass: whatever it changes, or adds, is this step's.
        self.stats.clear()
        if self.buffers.slots:
            self.buffers.begin_step()
        if self.followed_steps < FOLLOWED_STEPS:
            self.follow_hooks()
        # With several micro-batches the first backward pass comes before the last forward pass, and so before the
        # weight of the batch is known. Under fp16 the scale is the sum's.
        self.is_mean = longest <= 1 and self.loss_scale is None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        for one in self.replicates:
            one.begin_step(_no_scale if self.is_mean else self.stats.finish)
        if self.is_observed:
            self.observers.phase_begins(GATHER)
        self.placed.begin_step()
        if self.is_observed:
            self.observers.phase_begins(FORWARD)

        def after_forwards() -> None:
            # All forward passes are done: the numbers of the step are known, and buffers are not written any more.
            self.stats.begin(is_stopping, self.buffers.find_changed() if self.buffers.slots else [])
            for one in self.replicates:
                one.begin_last_backward()

        weight = self.stats.weight if self.is_mean else None
        hooks = StepHooks(self.stats.add, self.placed.before_backward, after_forwards, weight, scale)
        self.placed.forward_backward(self.workload.loss, microbatches, hooks, longest)
        if self.is_mean and not microbatches:  # no backward pass has waited for it, and sums end in their order
            self.stats.finish()

    def reduce_gradients(self) -> StepStats:
        """Make every gradient that of the global batch's mean loss."""
        # In this order: replicas hold the same parts, so the parts' gradients must be final before `replicate` sums
        # them.
        self.placed.finish_backward()
        for one in self.replicates:
            one.reduce_gradients()
        scale = self.stats.finish()
        stats = self.peer_values.step_stats(self.stats, self.buffers.changed)
        # Otherwise the loss was divided by the weight, or `replicate` has divided in the pass that adds up.
        for one in self.replicates:
            if one.comm.size == 1 and not self.is_mean and stats.weight:
                scale_gradients(one.parameters.values(), scale)
        if self.gradient_hooks.hooks:
            self.gradient_hooks.note_backward(self.gradient_hooks.hooks)
            self.gradient_hooks.call(self.placed.updated().values())
        # Ranks that run the same samples change the same buffers: each change was counted by all of them.
        if self.buffers.slots:
            self.buffers.reduce([ranks // self.mesh.places for ranks in stats.changed])
        # A stage of a pipeline may have parameters that nothing is computed with.
        if stats.weight and self.has_whole_stages and not self._has_gradient():
            raise LossError(
                "the loss should depend on the model's parameters",
                "no parameter of the model has a gradient, and nothing would be updated",
                "call the model that the loss is handed, in loss(model, batch), and no other of the file's",
            )
        return stats

    def _has_gradient(self) -> bool:
        updated = self.placed.updated()
        for parameter in updated.values():
            if parameter.grad is not None:
                return True
        return not updated

    def follow_hooks(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """In the first steps, take or refuse hooks that were registered after the job was made.

        Args:
            optimizers: that may have some.

        Raises:
            WorkloadError: the plan can't keep one of them.
            UsageError: a parameter had hooks before.
        """
        if self.followed_steps == FOLLOWED_STEPS:
            return
        self.followed_steps += 1
        check_effects(self.model, optimizers, self.placement, is_cut=True)
        if self.takes_hooks:
            self.gradient_hooks.take(self.placed.updated())

    def unscale_gradients(self) -> bool:
        """Divide gradients by the loss scale; return whether one is infinite or NaN on some rank. Collective."""
        if self.loss_scale is None:
            return False
        comms = [self.comms.axes[axis] for axis in self.mesh.used(SPREADING_AXES)]
        return self.peer_values.has_overflown(self.loss_scale.unscale(self.placed.updated().values(), comms))

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        comms = [self.comms.axes[axis] for axis in self.mesh.used(SPREADING_AXES)]
        return global_norm(self.placed.updated().values(), self.placed.counted(), comms)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on what this rank holds."""
        self.placed.update(optimizer)

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Return `microbatches`, filled up where every rank must run as many."""
        return self.placed.in_step(microbatches, longest)

    def evaluate(self, name: str, score: Score, batch: Any) -> Any:
        """Return what `score(model, batch)` returns."""
        return self.placed.evaluate(name, score, batch)

    def expert_loads(self) -> list[ExpertLoad]:
        """Return how the rows of each layer went to its experts since it was asked last. Collective, if there are any.

        Layers that had none are left out.
        """
        rows = self.placed.take_expert_rows()
        if not rows:
            return []
        summed = torch.cat(list(rows.values()))
        self.comms.step.all_reduce(summed)
        loads = []
        for name, of_layer in zip(rows, summed.split([one.numel() for one in rows.values()]), strict=True):
            load = ExpertLoad.of(name, of_layer.tolist(), self.mesh.size("expert"))
            loads += [] if load is None else [load]
        return loads

    @property
    def notices(self) -> Sequence[str]:
        """Return what the person should know of how the model runs; batches of new shapes may add to it."""
        return [*self.placed.notices, *self.buffers.notices]

    def held(self) -> dict[str, LocalShard]:
        """Return this rank's part of every state tensor that is not whole on all ranks, and who else has the same."""
        return self.placed.held()

    def state(self) -> dict[str, torch.Tensor]:
        """Return what compression carries from step to step, by name."""
        state = self.replicate.state()
        if self.experts is not None:
            state |= {f"experts.{name}": tensor for name, tensor in self.experts.state().items()}
        return state

    def close(self) -> None:
        """Let go of the other ranks."""
        self.placed.close()
        for one in self.replicates:
            one.close()


def _no_scale() -> None:
    """Return what gradients of the mean are multiplied by: nothing."""


def strategy_of(plan: Plan) -> type[Parallel]:
    """Return the class that runs the steps of a plan."""
    if plan.server:
        from paceline.parallel.server import ServerParallel  # others need nothing of the servers' package

        return ServerParallel
    return Parallel


def open_comms(mesh: Mesh, rank: int, ledger: Ledger) -> Comms:
    """Open the process groups of `mesh` for this rank. Every rank must call this."""
    axes = open_axes(mesh, rank, ledger)
    data = open_product("data", list(DATA_AXES), axes, mesh, rank)
    step = data
    if set(mesh.used()) - set(DATA_AXES):  # some ranks see the same samples
        step = open_product("step", list(AXES), axes, mesh, rank)
    gradients = step  # where all ranks sum them
    if set(mesh.used()) - set(GRADIENT_AXES):
        gradients = open_product("gradients", list(GRADIENT_AXES), axes, mesh, rank)
    expert_gradients = gradients
    if mesh.size("expert") > 1:
        expert_gradients = open_product("expert_gradients", list(EXPERT_GRADIENT_AXES), axes, mesh, rank)
    return Comms(axes, data, step, gradients, expert_gradients)
