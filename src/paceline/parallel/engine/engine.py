"""What both forms of a step have: the rank's model, its mesh axes, buffers, hooks and observers.

`declared.py` runs a step from one loss function, `loop.py` the one of which the user's own loop makes each call, and
`parallel/server.py` that of a worker of parameter servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.comm.collectives import AxisComm, open_axes, open_product
from paceline.comm.ledger import Ledger
from paceline.nouns.mesh import AXES, DATA_AXES, PLACE_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.step_record import ExpertLoad
from paceline.nouns.workload import Workload
from paceline.parallel.effects import ALONE, OWNERS, REPLICAS, check_effects, placement_of
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.loss_scale import LossScale
from paceline.parallel.model_adapter import ModelAdapter
from paceline.parallel.norm import scale_gradients
from paceline.parallel.observer import Observers, StepObserver
from paceline.parallel.peer_values import PeerValues
from paceline.parallel.replicate.buffers import Buffers

Score = Callable[[Any, Any], Any]
FOLLOWED_STEPS = 3  # the first ones, in which hooks that were registered after the job was made are found


@dataclass(frozen=True, slots=True)
class Comms:
    """The axes of a mesh, and four communicators over several of them."""

    axes: Mapping[str, AxisComm]
    data: AxisComm  # ranks that see different samples: replicate times shard
    step: AxisComm  # ranks that take a step together: all of them
    gradients: AxisComm  # ranks with parts of the same gradients: the plan's `gradient_axes`
    expert_gradients: AxisComm  # of the weights of experts: the same without `expert`

    @property
    def same_samples(self) -> AxisComm:
        """Return the axis whose ranks share the same samples; a loop's plan has one of them at most."""
        used = [self.axes[axis] for axis in PLACE_AXES if self.axes[axis].size > 1]
        return used[0] if used else self.axes["tensor"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's number in the job, and the device on which it computes."""

    rank: int
    device: torch.device


class Engine:
    """A step of this rank.

    Args:
        placed: the adapter of the model, as this rank holds it.
        workload: the user's workload, with its loss and precision.
        comms: the communicators of the mesh's axes.
        plan: the job's plan, with its mesh and options.
        place: this rank's number and device.

    Attributes:
        loss_scale: the factor by which the loss is multiplied, where the step scales it itself; None elsewhere.
    """

    is_loop: ClassVar[bool] = False  # the user's loop makes the calls of a step
    has_gradients: ClassVar[bool] = True  # those of the whole batch come to the ranks
    takes_metrics: ClassVar[bool] = True  # a scheduler may step by what all ranks agree on
    loss_scale: LossScale | None = None

    @staticmethod
    def check_own_batches(workload: Workload, plan: Plan) -> None:
        """Raise PlanError where the loop may not make its own batches; tensor and pipeline have reasons of their own.

        Args:
            workload: the workload, whose `data` is None.
            plan: the job's plan.
        """

    @staticmethod
    def comm_mesh(mesh: Mesh, rank: int) -> tuple[Mesh, int]:
        """Return the mesh of process groups that a rank of `mesh` is in, and its number there."""
        return mesh, rank

    def __init__(self, placed: ModelAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        self.placed = placed
        self.workload = workload
        self.comms = comms
        self.plan = plan
        self.rank = place.rank
        self.device = place.device
        self.observers = Observers()
        self.is_observed = False
        self.peer_values = PeerValues()
        self.mesh = Mesh.parse(plan.mesh)
        self.model = placed.model
        self.buffers = Buffers(placed.model, comms.data)
        self.placement = placement_of(plan, self.is_loop)
        # Before the strategies' own hooks. One rank with one micro-batch has the whole gradient in its backward pass.
        self.takes_hooks = self.placement in (ALONE, REPLICAS, OWNERS)
        self.takes_hooks &= comms.data.size > 1 or workload.micro_batch_size is not None
        self.gradient_hooks = GradientHooks(placed.updated() if self.takes_hooks else {})
        self.followed_steps = 0

    @staticmethod
    def check_data(data: Any) -> None:
        """Raise PlanError if the data set, or a stream, can't be trained on here."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError if the optimizer, or several as one, can't run here."""

    def observe(self, observer: StepObserver) -> None:
        """Call `observer`'s methods in all steps from here on."""
        self.add_observer(observer)
        self.attach()

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
        self.attach()

    def attach(self) -> None:
        """Have the model tell the observers, and what other ranks have sent it read by `peer_values`."""
        self.placed.attach(self.observers, self.peer_values)

    def follow_hooks(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """In the first steps, take or refuse hooks that were registered after the job was made.

        Args:
            optimizers: the optimizers whose hooks are checked too.

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

    def gradients_of(self, number: int = 0) -> Mapping[torch.nn.Parameter, str]:
        """Return the parameters of an optimizer, counted from 1, with their names; of all if it is 0."""
        raise NotImplementedError

    def norm_of(self, number: int = 0) -> torch.Tensor:
        """Return the norm of the whole gradient of an optimizer's parameters, the same on every rank. Collective."""
        raise NotImplementedError

    def clip(self, max_norm: float, number: int = 0) -> torch.Tensor:
        """Scale gradients so that their norm, over all parameters together, is at most `max_norm`. Collective.

        Args:
            max_norm: the largest norm that stays as it is; infinity leaves all gradients as they are.
            number: the number of the optimizer whose gradients are scaled, from 1; 0 means all.

        Returns:
            The norm before clipping, one number, the same on every rank. Where it is not finite, gradients stay as they
            are.
        """
        norm = self.norm_of(number)
        if max_norm < float("inf"):
            # The factor is that of torch's clip_grad_norm_, with its 1e-6.
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            factor = torch.where(torch.isfinite(norm), factor, 1.0)
            scale_gradients(self.gradients_of(number), factor)
        return norm

    def in_step(self, microbatches: Sequence[Any], longest: int) -> list[Any]:
        """Return `microbatches`, filled up where every rank must run as many."""
        return self.placed.in_step(microbatches, longest)

    def evaluate(self, name: str, score: Score, batch: Any) -> Any:
        """Return the result of `score(model, batch)`."""
        return self.placed.evaluate(name, score, batch)

    def expert_loads(self) -> list[ExpertLoad]:
        """Return the load of the experts of each layer since the last call. Collective, if there are any experts.

        Layers that had none are left out.
        """
        rows = self.placed.take_expert_rows()
        if not rows:
            return []
        summed = torch.cat(list(rows.values()))
        self.comms.step.all_reduce(summed)
        loads = []
        for name, of_layer in zip(rows, summed.split([counts.numel() for counts in rows.values()]), strict=True):
            load = ExpertLoad.of(name, of_layer.tolist(), self.mesh.size("expert"))
            loads += [] if load is None else [load]
        return loads

    @property
    def notices(self) -> Sequence[str]:
        """Return notices for the user about how the model runs; batches of new shapes may add to them."""
        raise NotImplementedError

    def local_shards(self) -> dict[str, LocalShard]:
        """Return this rank's part of every state tensor that is not whole on all ranks, and who else has the same."""
        return self.placed.local_shards()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that gradient compression keeps from step to step, by name."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the other ranks."""
        self.placed.close()


def open_comms(mesh: Mesh, rank: int, ledger: Ledger, gradient_axes: Sequence[str] = ()) -> Comms:
    """Open the process groups of `mesh` for this rank. Every rank must call this.

    Args:
        mesh: the plan's mesh.
        rank: this rank's number in the world of the mesh.
        ledger: the ledger that counts the bytes sent.
        gradient_axes: the axes of the plan over which gradients are summed.
    """
    axes = open_axes(mesh, rank, ledger)
    data = open_product("data", list(DATA_AXES), axes, mesh, rank)
    step = data
    if set(mesh.used()) - set(DATA_AXES):  # some ranks see the same samples
        step = open_product("step", list(AXES), axes, mesh, rank)
    gradients = step  # where all ranks sum them
    if set(mesh.used()) - set(gradient_axes):
        is_data = set(gradient_axes) == set(mesh.used(DATA_AXES))
        gradients = data if is_data else open_product("gradients", gradient_axes or ["replicate"], axes, mesh, rank)
    expert_gradients = gradients
    if mesh.size("expert") > 1:
        other_axes = [axis for axis in gradient_axes if axis != "expert"]
        expert_gradients = open_product("expert_gradients", other_axes or ["replicate"], axes, mesh, rank)
    return Comms(axes, data, step, gradients, expert_gradients)
