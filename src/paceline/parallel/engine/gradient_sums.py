"""The gradients of a loop's optimizers: who has made them, and whether they are sums over the ranks yet.

A gradient is this rank's own after a backward pass that sums nothing, and a sum once `sum_own` or a pass with sums is
done. A loop may keep a sum, and add to it: a pass with sums sets it aside meanwhile, one without keeps it on the first
rank only, so that the next sum counts it once.

Needs: every rank calls the same methods in the same order.
Promises: gradients are those of one rank that makes the same backward passes with the whole batch.
Traffic: that of `replicate`, without the numbers of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.collectives import AxisComm
from paceline.comm.dtensor_parts import is_part, local
from paceline.nouns.errors import LossError, UsageError
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.replicate.bucket import local_gradient
from paceline.parallel.replicate.replicate_strategy import Replicate, no_scale

if TYPE_CHECKING:
    from paceline.parallel.shard.sharded_loop_models import RowUpdates

_CLEARED = "an optimizer's first update should have the gradients that job.backward has made"


@dataclass(slots=True, eq=False)
class KnownGradient:
    """A parameter of the loop's optimizers, and what is known of its gradient.

    One object for each parameter: a tensor as the key of a dictionary is hashed by Python code, which a step of many
    parameters would spend most of its host time on.

    Attributes:
        recorded: the gradient that the last backward pass left.
        version, part_version: the version counters of the recorded gradient, and of this rank's part of it.
        norm: the norm of this rank's part of the gradient, kept where a change may leave the version as it is.
        summed: the gradient if it is a sum over the ranks, the same on all of them; else None.
        is_unsummed: whether the parameter was trained in a backward pass whose gradients are not summed yet; it may
            have been frozen since.
    """

    parameter: torch.nn.Parameter
    name: str
    recorded: weakref.ref[torch.Tensor] | None = None
    version: int = 0
    part_version: int = 0
    norm: torch.Tensor | None = None
    summed: torch.Tensor | None = None
    is_unsummed: bool = False

    def record(self, gradient: torch.Tensor, has_norm: bool = False) -> None:
        """Record the gradient as it is now; with its norm where its version is not enough."""
        self.recorded = weakref.ref(gradient)
        self.version = gradient._version
        if type(gradient) is not torch.Tensor:
            self.part_version = local(gradient)._version
        self.norm = local(gradient).norm() if has_norm else None

    def is_recorded(self, gradient: torch.Tensor) -> bool:
        """Return True if the parameter's gradient is the recorded one, with the same values."""
        if self.recorded is None or self.recorded() is not gradient:
            return False
        if self.version != gradient._version:
            return False
        if type(gradient) is not torch.Tensor and self.part_version != local(gradient)._version:
            return False
        return self.norm is None or torch.equal(self.norm, local(gradient).norm())


@dataclass(eq=False)
class Target:
    """The parameters of one optimizer, and whether their gradients are still each rank's own.

    Attributes:
        parameters: the optimizer's parameters, by name.
        replicate: the strategy that sums gradients of whole parameters over all ranks.
        parts: the strategy that sums gradients of parts over the ranks that hold the same; None if nothing is in parts.
        updates: the optimizer's updates of parts; None if no parameter is in parts.
        known: the record of each parameter's gradient.
        is_summed: whether gradients are sums, or there are none.
        updated: the number of updates so far.
        awaits_pass: whether no backward pass has come since the newest update.
        is_uncleared: whether the newest backward passes have added to the gradients of the update before.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    replicate: Replicate
    parts: Replicate | None
    updates: RowUpdates | None = None
    known: list[KnownGradient] = field(default_factory=list)
    is_summed: bool = True
    updated: int = 0
    awaits_pass: bool = True
    is_uncleared: bool = False

    def strategies(self) -> list[Replicate]:
        """Return the strategies that sum the gradients."""
        return [self.replicate] if self.parts is None else [self.replicate, self.parts]


class SummedPass(NamedTuple):
    """A backward pass that sums gradients.

    Attributes:
        target: the optimizer's parameters, whose gradients the pass sums.
        earlier: the sums of earlier passes, which are set aside.
        local: copies of gradients that were this rank's own, where the pass is known to fail.
    """

    target: Target
    earlier: dict[torch.nn.Parameter, torch.Tensor]
    local: dict[torch.nn.Parameter, torch.Tensor]


class GradientSums:
    """The gradients of all optimizers of a loop.

    Args:
        hooks: the user's hooks on parameters' gradients.
        replicas: the axis of the ranks that hold the same parts.
        data: the axis of the ranks that hold the same whole parameters, and see different samples.

    Attributes:
        targets: the parameters of each optimizer, in the order of the optimizers.
        reached: the parameters that backward passes have reached since the last call of `note_passes_of_loop`.
        raw: the parameters that a backward pass of the loop's own has reached.
        running: the backward pass that sums gradients now, or one that has raised; None without one.
        overlaps: whether sums begin in a backward pass, not after it.
    """

    def __init__(self, hooks: GradientHooks, replicas: AxisComm, data: AxisComm) -> None:
        self.user_hooks = hooks
        self.replicas = replicas
        self.data = data
        self.targets: list[Target] = []
        self.known: dict[torch.nn.Parameter, KnownGradient] = {}
        self.hooks: list[RemovableHandle] = []
        self.reached: list[torch.nn.Parameter] = []
        self.last_reached: list[torch.nn.Parameter] = []  # by the newest backward pass that reached some
        self.raw: set[torch.nn.Parameter] = set()
        self.running: SummedPass | None = None
        self.overlaps = False
        self.must_sum_after = False  # some backward pass had collectives of its own, or made a gradient twice
        self.has_backward = False  # job.backward was called
        self.looks_for_uncleared = True  # some optimizer has not updated twice
        self.notices: list[str] = []

    def add(self, target: Target) -> None:
        """Take in the parameters of the next optimizer."""
        self.targets.append(target)
        target.known = self._know(target.parameters)

    def replace(self, number: int, after: Target) -> None:
        """Give an optimizer other parameters; what is known of them so far stays."""
        before = self.targets[number - 1]
        after.is_summed = before.is_summed
        after.updates = before.updates
        after.updated = before.updated
        for strategy in before.strategies():
            strategy.close()
        self.targets[number - 1] = after
        after.known = self._know(after.parameters)

    def _know(self, parameters: Mapping[str, torch.nn.Parameter]) -> list[KnownGradient]:
        """Know parameters by their names, and hear of each backward pass that reaches them."""
        for name, parameter in parameters.items():
            if parameter in self.known:
                self.known[parameter].name = name
                continue
            self.known[parameter] = KnownGradient(parameter, name)
            was_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch registers hooks of no other
            # A list's own method: of many small parameters, a call of Python code for each is felt in a step's time.
            self.hooks.append(parameter.register_post_accumulate_grad_hook(self.reached.append))
            parameter.requires_grad_(was_trained)
        return [self.known[parameter] for parameter in parameters.values()]

    def with_gradient(self, number: int) -> dict[torch.nn.Parameter, str]:
        """Return the parameters of an optimizer that have a gradient, with their names; of all if it is 0."""
        found = {}
        for target in [self.targets[number - 1]] if number else self.targets:
            for name, parameter in target.parameters.items():
                if parameter.grad is not None:
                    found[parameter] = name
        return found

    def note_passes_of_loop(self) -> None:
        """Note what backward passes of the loop's own, such as loss.backward(), have reached."""
        if self.reached:
            for parameter in self.reached:
                known = self.known[parameter]
                known.recorded = known.summed = None
                self.raw.add(parameter)
            self.reached.clear()
        if self.raw:
            self.raw = {parameter for parameter in self.raw if parameter.grad is not None}

    def run_backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """Run a backward pass, and note the parameters that it reaches.

        Raises:
            UsageError: it has reached a parameter with a hook of the user that an earlier pass has reached.
        """
        collectives = self._collectives() if self.data.size > 1 else 0
        try:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            reached = list(self.reached)
            self.reached.clear()
        # Sums of gradients must not come between collectives of the pass itself, in another order on each rank. By
        # re-entrant checkpointing a gradient comes twice.
        if self.data.size > 1:
            self.must_sum_after |= self._collectives() != collectives or len(set(map(id, reached))) < len(reached)
            self.overlaps = not self.must_sum_after
        self.last_reached = reached or self.last_reached
        self.has_backward = True
        if self.user_hooks.hooks:
            self.user_hooks.note_backward(reached)

    def _collectives(self) -> int:
        """Return the number of collectives so far, without those that have sent gradients of this pass."""
        sent = 0 if self.running is None else self.running.target.replicate.next_bucket
        return self.data.ledger.calls.total() - sent

    def begin_summed_pass(self, target: Target, is_failing: bool) -> None:
        """Set sums aside that the loop has kept: the pass makes new ones, to which they are added.

        Args:
            target: the optimizer's parameters, whose gradients the pass sums.
            is_failing: whether the pass is known to fail, and runs only because other ranks wait for it.
        """
        earlier = {}
        for known in target.known:
            summed, known.summed = known.summed, None
            gradient = known.parameter.grad
            if gradient is None or not (target.is_summed or summed is gradient):
                continue
            if known.parameter in self.raw:
                continue
            if self.data.size > 1:
                earlier[known.parameter] = gradient.clone()  # the next sums come to where these are
                known.parameter.grad = None
        local_gradients = {}
        if is_failing:
            for parameter in target.parameters.values():
                if parameter.grad is not None:
                    local_gradients[parameter] = parameter.grad.clone()
        self.running = SummedPass(target, earlier, local_gradients)

    @contextmanager
    def summing(self, target: Target) -> Iterator[None]:
        """Sum the gradients of an optimizer's parameters that are made inside. Collective."""
        with nullcontext() if target.is_summed else _as_trained(target):
            target.replicate.begin_step(no_scale)
            if self.overlaps:
                target.replicate.begin_last_backward()
            yield
            target.replicate.reduce_gradients()

    def finish_summed_pass(self) -> None:
        """Add the sums that were set aside, after the hooks of the user have seen the new ones."""
        running, self.running = self.running, None
        assert running is not None
        if self.user_hooks.hooks or running.earlier:
            self.user_hooks.call(running.target.parameters.values(), running.earlier)
        self._note_summed(running.target)
        running.target.awaits_pass = False

    def take_back(self) -> None:
        """Give the parameters the gradients that they had before the backward pass that is running."""
        running, self.running = self.running, None
        assert running is not None
        for known in running.target.known:
            known.summed = running.earlier.get(known.parameter)
            known.parameter.grad = running.local.get(known.parameter, known.summed)

    def finish_failed(self) -> None:
        """Finish the sums of a backward pass that has raised, for which ranks without an error wait. Collective."""
        if self.running is None:
            return
        with _as_trained(self.running.target):
            self.running.target.replicate.reduce_gradients()
        self.take_back()

    def may_take_back(self) -> bool:
        """Return True if no gradient here is this rank's own: the next backward pass can be undone."""
        for parameter, known in self.known.items():
            if parameter.grad is not None and known.summed is not parameter.grad:
                return False
        return True

    def clear(self) -> None:
        """Remove all gradients."""
        for parameter in self.known:
            parameter.grad = None

    def note_unsummed(self, may_have_parts: bool) -> None:
        """Note the gradients that a pass without sums has left, to tell later whether something else has changed them.

        Args:
            may_have_parts: whether models may be in parts. Rows that no other rank has are sums already, so torch's
                clip_grad_norm_ is right on them.
        """
        for target in self.targets:
            target.is_summed = target.awaits_pass = False
        has_norms = may_have_parts and self.replicas.size > 1
        for parameter, known in self.known.items():
            if parameter.requires_grad:
                known.is_unsummed = True
            gradient = parameter.grad
            if gradient is not None:
                known.record(gradient, has_norms and is_part(gradient))

    def sum_own(self, target: Target) -> None:
        """Make the gradients of an optimizer's parameters sums over the ranks. Collective."""
        self.count_once(target.known)  # a parameter of two optimizers may have a sum already
        with _as_trained(target):
            for strategy in target.strategies():
                strategy.begin_step(no_scale)
                strategy.reduce_gradients()
        self.user_hooks.call(target.parameters.values())
        self._note_summed(target)

    def _note_summed(self, target: Target) -> None:
        """Remember that the gradients of an optimizer's parameters are sums."""
        target.is_summed = True
        for known in target.known:
            known.is_unsummed = False
            known.summed = known.parameter.grad

    def count_once(self, gradients: Iterable[KnownGradient]) -> None:
        """Keep a sum that the loop has not cleared on the first rank only: the next sum counts it once."""
        for known in gradients:
            summed, known.summed = known.summed, None
            if summed is None or known.parameter.grad is not summed:
                continue
            # Of those that hold the same: of a part only its replicas do.
            holders = self.replicas if is_part(known.parameter) else self.data
            if holders.rank > 0:
                summed.zero_()
            known.record(summed)
            known.is_unsummed = True

    def check_untouched(self, target: Target) -> None:
        """Raise UsageError if something else than job.backward has made or changed a gradient that is no sum yet."""
        for known in target.known:
            parameter = known.parameter
            gradient = parameter.grad
            if gradient is None or known.summed is gradient:
                continue
            if known.is_recorded(gradient):
                continue
            if target.is_summed and parameter not in self.raw:
                known.summed = gradient  # put in the sum's place
                continue
            local_part = local_gradient(parameter)
            # Zeros are what zero_grad(set_to_none=False) leaves.
            if local_part is None or not _values_of(local_part).count_nonzero():
                continue
            raise made_elsewhere(known.name)

    def find_raw(self, target: Target) -> str:
        """Return the name of a parameter that has a gradient of a backward pass of the loop's own; "" if none has."""
        for known in target.known:
            gradient = known.parameter.grad
            if known.parameter in self.raw and gradient is not None and _values_of(gradient).count_nonzero():
                return known.name
        return ""

    def check_not_cleared(self, target: Target) -> None:
        """Raise UsageError if the first backward pass reached an optimizer's parameters, and all gradients are gone."""
        if not self.has_backward or any(known.parameter.grad is not None for known in target.known):
            return
        reached = {id(parameter) for parameter in self.last_reached}
        if not reached and len(self.targets) == 1:
            raise UsageError(
                _CLEARED,
                "no backward pass has reached one of its parameters",
                "compute the loss by calls of the models that paceline.prepare returned, and call job.backward(loss)",
            )
        if any(id(known.parameter) in reached for known in target.known):
            raise UsageError(
                _CLEARED,
                "they were cleared after job.backward, so that nothing would be updated",
                "call optimizer.zero_grad() before job.backward(loss), and optimizer.step() after it",
            )

    def look_for_uncleared(self) -> None:
        """Find out whether the loop clears gradients between the first update of an optimizer and the second."""
        self.looks_for_uncleared = False
        for target in self.targets:
            self.looks_for_uncleared |= target.updated < 2
            if target.updated != 1 or not target.awaits_pass:
                continue
            gradients = [known.parameter.grad for known in target.known]
            if not all(gradient is not None and _values_of(local(gradient)).any() for gradient in gradients):
                target.is_uncleared = False
            # Else this step has added to the sums.
            elif any(known.summed is known.parameter.grad for known in target.known):
                target.is_uncleared = True

    def note_update(self, target: Target) -> None:
        """Count an update of an optimizer; say once if it has the gradients of the one before too."""
        target.updated += 1
        target.awaits_pass = True
        if target.updated == 2 and target.is_uncleared:
            self.notices.append(
                "the second update has the gradients of the first too, which nothing has cleared: write "
                "optimizer.zero_grad() before job.backward, unless the gradients of all steps are to add up"
            )

    def left_out(self) -> LossError | None:
        """Return an error if a loss that has no weight, and is not finite, has left such gradients on this rank."""
        for parameter, known in self.known.items():
            gradient = local_gradient(parameter)
            if gradient is not None and not _values_of(gradient).isfinite().all():
                return LossError(
                    "a loss with weight 0 should leave gradients as they are",
                    f"it is NaN or infinite on a rank, and so is the gradient of {known.name}",
                    "divide by the number of labels or by 1 if there are none: loss.sum() / count.clamp(min=1)",
                )
        return None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that gradient compression keeps from step to step, by name."""
        state = {}
        for number, target in enumerate(self.targets):
            for name, tensor in target.replicate.state().items():  # what sums parts has none
                state[f"{number}.{name}"] = tensor
        return state

    def close(self) -> None:
        """Let go of the other ranks, and hear of no gradients any more."""
        for target in self.targets:
            for strategy in target.strategies():
                strategy.close()
        for hook in self.hooks:
            hook.remove()


@contextmanager
def _as_trained(target: Target) -> Iterator[None]:
    """Count what was frozen since its backward pass among the trained parameters: its gradient is to be summed."""
    frozen = []
    for known in target.known:
        if known.is_unsummed and not known.parameter.requires_grad:
            frozen.append(known.parameter)
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a gradient has: of a sparse one those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def made_elsewhere(name: str) -> UsageError:
    """Return the error for a gradient that something else than `job.backward` has made or changed."""
    return UsageError(
        "gradients should be made by job.backward, and changed only once they are sums over the ranks",
        f"the gradient of {name} was made or changed by something else than job.backward, while it was that of "
        "this rank's samples alone",
        "write job.backward(loss) in place of loss.backward(), job.clip(max_norm) in place of "
        "clip_grad_norm_, and call job.gradients() before other changes",
    )
