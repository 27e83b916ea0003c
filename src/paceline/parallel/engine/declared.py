"""A step from one loss function: which strategy fills which moment of it, in what order.

`strategy_of` chooses between collectives, below, and parameter servers (`parallel/server.py`), whose workers push and
pull in `reduce` and clip on the servers. Under collectives:

moment        axis           what is done
forward,      tensor,        exchanges of activations and their gradients, in the graph of each stage: they
backward      context,       are inserted by `graph/emit.py` and run by `comm/differentiable.py`
              expert
              pipeline       micro-batches through the stages
              (all)          with one micro-batch the loss is divided by the global weight before its backward pass
              replicate      gradients leave as they come, where nothing else must happen to them first
reduce        pipeline       gradients of parameters that several stages hold
              shard          with zero=2 and 3: summed, each rank its rows
              replicate      summed; also over the ranks of `context`, `expert`, and `shard` with zero=1
              (all)          divided by the global weight, where they are those of the sum
change        (all)          by the user's `before_update`
clip          (all)          by the norm of the whole gradient
update        shard          with zero=1: each rank a part of the parameters, whose new values all ranks get then
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import LossError
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.engine.engine import FOLLOWED_STEPS, Comms, Engine, RankPlace
from paceline.parallel.loss_scale import LossScale
from paceline.parallel.micro_batches import Divisor, StepHooks
from paceline.parallel.model_adapter import ModelAdapter
from paceline.parallel.norm import global_norm, scale_gradients
from paceline.parallel.observer import FORWARD, GATHER
from paceline.parallel.replicate.replicate_strategy import Replicate
from paceline.parallel.step_stats import StepStats, StepStatsReducer


class DeclaredEngine(Engine):
    """The step of a rank that knows the loss of its micro-batches: `train/step.py` has its order.

    Attributes:
        change_gradients: the user's function, called with the summed gradients; None without one.
        norm: the norm of the last gradient before clipping, where the engine clips by itself; None elsewhere.
        divisor: the divisor that makes this step's summed gradients those of the mean loss.
    """

    def __init__(self, placed: ModelAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        super().__init__(placed, workload, comms, plan, place)
        self.has_whole_stages = self.mesh.size("pipeline") == 1
        self.change_gradients: Callable[[Mapping[str, torch.nn.Parameter]], None] | None = None
        self.norm: float | None = None
        self.divisor = Divisor()
        if workload.precision == "fp16":
            self.loss_scale = LossScale(workload.batch_size, place.device)
        # Each in the order of the model, which all ranks share.
        of_experts: dict[str, torch.nn.Parameter] = {}
        dense_parameters: dict[str, torch.nn.Parameter] = {}
        for name, parameter in placed.updated().items():
            (of_experts if name in placed.of_experts() else dense_parameters)[name] = parameter
        self.replicate = self._replicate_over(dense_parameters, comms.gradients)
        # Each rank of `expert` has other experts' weights: their gradients are no parts of the same.
        self.experts: Replicate | None = None
        if of_experts:
            self.experts = self._replicate_over(of_experts, comms.expert_gradients)
        # What sums gradients: of all parameters but those of experts, and of these.
        self.replicates = [self.replicate] if self.experts is None else [self.replicate, self.experts]
        # Shared memory is open between the ranks that sum gradients; the step's numbers may use it where these are all
        # ranks.
        shared = self.replicate.shared if comms.step.peers == comms.gradients.peers else None
        self.stats = StepStatsReducer(comms.step, shared, len(self.buffers.tensors), place.device, placed.counts_loss)

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

    def forward_backward(self, microbatches: Sequence[Any], is_stopping: bool, longest: int = 1) -> None:
        """Run forward and backward passes over this rank's micro-batches.

        Args:
            microbatches: this rank's part of the batch, cut into micro-batches.
            is_stopping: whether this rank was asked to stop.
            longest: the largest number of micro-batches that any rank has in this step.

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
        if longest <= 1 and self.loss_scale is None:
            self.divisor = Divisor(before=self.stats.weight)
        else:
            self.divisor = Divisor(self.stats.finish, scale=1.0 if self.loss_scale is None else self.loss_scale.value)
        for strategy in self.replicates:
            strategy.begin_step(self.divisor.after)
        if self.is_observed:
            self.observers.phase_begins(GATHER)
        self.placed.begin_step()
        if self.is_observed:
            self.observers.phase_begins(FORWARD)

        def after_forwards() -> None:
            # All forward passes are done: the numbers of the step are known, and buffers are not written any more.
            self.stats.begin(is_stopping, self.buffers.find_changed() if self.buffers.slots else [])
            for strategy in self.replicates:
                strategy.begin_last_backward()

        hooks = StepHooks(self.stats.add, self.placed.before_backward, after_forwards, self.divisor)
        self.placed.forward_backward(self.workload.loss, microbatches, hooks, longest)
        if self.divisor.is_known and not microbatches:
            # No backward pass has waited for it, and sums end in their order.
            self.stats.finish()

    def reduce_gradients(self) -> StepStats:
        """Make every gradient that of the global batch's mean loss."""
        # In this order: replicas hold the same parts, so the parts' gradients must be final before `replicate` sums
        # them.
        self.placed.finish_backward()
        for strategy in self.replicates:
            strategy.reduce_gradients()
        scale = self.stats.finish()
        peers = self.peer_values
        stats = self.stats.read() if peers.are_there else peers.step_stats(self.stats, self.buffers.changed)
        # Otherwise the loss was divided by the weight, or `replicate` has divided in the pass that adds up.
        for strategy in self.replicates:
            if strategy.comm.size == 1 and not self.divisor.is_known and stats.weight:
                scale_gradients(strategy.parameters.values(), scale)
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

    def unscale_gradients(self) -> bool:
        """Divide gradients by the loss scale; return whether one is infinite or NaN on some rank. Collective."""
        if self.loss_scale is None:
            return False
        comms = [self.comms.axes[axis] for axis in self.plan.spreading_axes]
        return self.peer_values.has_overflown(self.loss_scale.unscale(self.placed.updated().values(), comms))

    def norm_of(self, number: int = 0) -> torch.Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        comms = [self.comms.axes[axis] for axis in self.plan.spreading_axes]
        return global_norm(self.placed.updated().values(), self.placed.counted(), comms)

    def gradients_of(self, number: int = 0) -> Mapping[torch.nn.Parameter, str]:
        """Return the parameters that this rank updates, with their names: there is one optimizer."""
        return {parameter: name for name, parameter in self.placed.updated().items()}

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step on what this rank holds."""
        self.placed.update(optimizer)

    @property
    def notices(self) -> Sequence[str]:
        """Return notices for the user about how the model runs; batches of new shapes may add to them."""
        return [*self.placed.notices, *self.buffers.notices]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that gradient compression keeps from step to step, by name."""
        state = self.replicate.state()
        if self.experts is not None:
            state |= {f"experts.{name}": tensor for name, tensor in self.experts.state().items()}
        return state

    def close(self) -> None:
        """Let go of the other ranks."""
        super().close()
        for strategy in self.replicates:
            strategy.close()


def strategy_of(plan: Plan) -> type[DeclaredEngine]:
    """Return the class that runs the steps of a plan."""
    if plan.server:
        from paceline.parallel.server import ServerEngine  # others need nothing of the servers' package

        return ServerEngine
    return DeclaredEngine
