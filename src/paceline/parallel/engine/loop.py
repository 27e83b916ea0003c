"""A step of which the user's own loop makes each call: backward passes, sums over the ranks, updates.

`declared.py` runs a step from one loss function. Here the loop calls its models as often as it likes, and its
optimizers one after another. This can be right for any loop, because gradients are linear in the losses:

    backward(loss, weight)   adds the gradient of weight * loss / (the sum of the ranks' weights)
    reduce(optimizer)        sums the gradients of the optimizer's parameters over the ranks
    end_step()               makes buffers equal, and learns whether a rank was asked to stop

With one optimizer `backward` sums the gradients, bucket by bucket while they are made, and `reduce` finds them summed.
Gradients of earlier passes are set aside meanwhile, and added to the sums. Inside `accumulate`, and with several
optimizers, of which a pass may reach any, gradients stay this rank's until `reduce`.

A call that communicates begins with a message (`agreement.py`). An update, and a sum of what is summed already, have
none: the next message tells of them. The end of a step has none where the last one has said all that it would: nobody
was asked to stop, nothing is compared, and buffers, which nothing has changed, do not belong to the models' state.

Needs: every rank makes the same calls in the same order.
Promises: after `reduce` gradients are those of one rank that makes the same calls with the whole batch.
Traffic per step: the messages of `agreement.py`, also for each call of a model in parts; for each pass or update that
sums gradients that of `replicate`, without the numbers of the step, and with `shard` that of `shard/owned_update.py`
(zero=1) or `shard/sharded_loop_models.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.comm.dtensor_parts import is_part
from paceline.nouns.errors import CollectiveError, LossError, PacelineError
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.workload import Workload
from paceline.parallel import observer
from paceline.parallel.engine.agreement import (
    ALIKE,
    BAD,
    BAD_WEIGHT,
    LEFT_OUT,
    LOSS,
    SPLIT,
    STOP,
    UPDATE,
    WEIGHT,
    Agreement,
    Call,
    of_host,
)
from paceline.parallel.engine.engine import Comms, Engine, RankPlace
from paceline.parallel.engine.gradient_sums import GradientSums, Target, made_elsewhere
from paceline.parallel.engine.loop_models import LoopModels
from paceline.parallel.loss_scale import unscale
from paceline.parallel.model_adapter import EagerAdapter
from paceline.parallel.replicate.replicate_strategy import Replicate

if TYPE_CHECKING:
    from paceline.parallel.split_forward import SplitForward

_GRAPH_IS_GONE = "backward through the graph a second time"  # torch's words


class OwnLoss(NamedTuple):
    """A rank's loss, from which a backward pass starts.

    Attributes:
        loss: this rank's mean loss, one number.
        weight: the weight of the loss among the ranks' losses, such as the rank's number of samples.
        factor: the number by which a GradScaler, or the loop, has multiplied the loss; None for 1.
        whole_weight: the sum of the ranks' weights; None where this rank does not know it.
    """

    loss: torch.Tensor
    weight: torch.Tensor | float
    factor: torch.Tensor | None = None
    whole_weight: int | None = None


class Ended(NamedTuple):
    """The result of a step that has ended, known to all ranks.

    Attributes:
        weight, loss: the sums of the weights and of the weighted losses of the step's backward passes.
        is_stopping: whether a rank was asked to stop.
    """

    weight: float
    loss: float
    is_stopping: bool


class LoopEngine(Engine):
    """The step of a rank whose loop makes each of its calls.

    Under `replicate` and `shard` with zero=1 every rank has whole parameters and gradients; with zero=2 and 3 rows of
    them, under `tensor` pieces.

    Attributes:
        models: the loop's models, as this rank holds them.
        agreement: the messages between the ranks.
        sums: the gradients of the optimizers, and their sums.
    """

    is_loop = True
    placed: EagerAdapter
    agreement: Agreement
    sums: GradientSums

    def __init__(self, placed: EagerAdapter, workload: Workload, comms: Comms, plan: Plan, place: RankPlace) -> None:
        super().__init__(placed, workload, comms, plan, place)
        self.models = LoopModels(placed, comms, plan, place.device)
        # A rank without samples may take part in forward passes that count nothing.
        self.may_keep_pace = comms.step.size > 1
        # No other rank counts the same samples, as those of a tensor group would.
        self.counts_its_samples = comms.same_samples.rank == 0
        self.is_accumulating = False

    def _summed_over(self, parameters: Mapping[str, torch.nn.Parameter]) -> Replicate:
        """Return the strategy that sums gradients over all ranks, which see different samples. Collective."""
        sparse = self.placed.sparse() & parameters.keys()
        return Replicate(parameters, sparse, self.comms.data, self.plan, self.device)

    def _target(self, parameters: Mapping[str, torch.nn.Parameter]) -> Target:
        """Return one optimizer's parameters, with the strategies that sum their gradients. Collective."""
        if self.models.parts is None:
            return Target(parameters, self._summed_over(parameters), None)
        uncut = {name: parameter for name, parameter in parameters.items() if not is_part(parameter)}
        cut = {name: parameter for name, parameter in parameters.items() if is_part(parameter)}
        over_replicas = Replicate(cut, set(), self.comms.axes["replicate"], self.plan, self.device, overlaps=False)
        return Target(parameters, self._summed_over(uncut), over_replicas)

    def split_models(self, models: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Split each model over the axis `tensor` when it is called first.

        Args:
            models: the loop's models, by the prefix of their names in `self.model`.
            optimizers: the loop's optimizers, in the order of their numbers.
        """
        self.models.split(models, optimizers)
        assert self.models.tensor is not None
        for number, forward in enumerate(self.models.tensor.forwards, 1):
            forward.place = partial(self._split_model, number)
            forward.guard(True)

    @torch.inference_mode(False)  # the first call may be an evaluation; what is made here is trained with
    def _split_model(self, number: int, forward: SplitForward, inputs: Any) -> None:
        """Choose how to split a model by its first call, and keep this rank's pieces. Collective.

        Raises:
            WorkloadError, PlanError: it can't be split.
            CollectiveError: another rank is at another call.
        """
        tensor = self.models.tensor
        assert tensor is not None
        failure = None
        try:
            forward.decide(inputs, tensor.may_stay_whole)
        except PacelineError as error:
            failure = error
        call = Call(SPLIT, number)
        message = self.agreement.begin(call)
        message.write(message.offset + BAD, failure is not None)
        message.write(message.offset + ALIKE, forward.form_of(inputs))
        sums = self.agreement.sum()
        if failure is not None:
            raise failure
        self.agreement.read_all()
        self.agreement.read(call, sums.tolist())
        forward.agree(self.comms.step)
        cut = tensor.cut(forward)
        forward.guard(True)
        self.buffers.take_forms(cut)
        for target in self.sums.targets:
            if any(parameter is piece for parameter in target.parameters.values() for piece in cut):
                target.replicate.close()
                target.replicate = self._summed_over(target.parameters)

    def open_sums(self, optimizers: Sequence[Mapping[str, torch.nn.Parameter]]) -> None:
        """Sum the gradients of each optimizer's parameters apart from those of the others. Collective.

        Args:
            optimizers: for each optimizer, the parameters that it updates, by name.
        """
        comms = self.comms
        self.sums = GradientSums(self.gradient_hooks, comms.axes["replicate"], comms.data)
        for parameters in optimizers:
            target = self._target(parameters)
            self.models.owned.assign(parameters)
            self.sums.add(target)
        # Shared memory between the ranks that sum gradients, where these are all ranks.
        self.shared_opener = self._summed_over({})
        shared = self.shared_opener.shared if comms.step is comms.data else None
        self.agreement = Agreement(comms.step, shared, self.device, self.mesh, len(self.buffers.tensors))
        if self.models.tensor is not None:
            self.agreement.digest = self.models.tensor.take_digest
        self.models.agreement = self.agreement
        self.buffers.begin_step()

    def regroup(self, number: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Sum the gradients of other parameters with those of an optimizer, whose groups have changed. Collective."""
        self._finish_failed()
        after = self._target(parameters)
        self.models.regroup(number, parameters)
        self.sums.replace(number, after)

    def attach(self) -> None:
        """Have models in rows tell the observers, and what other ranks say and send read by `peer_values`."""
        super().attach()
        self.agreement.peer_values = self.peer_values
        for prefix, shard in self.models.in_rows():
            shard.attach(observer.BlocksOf(self.observers, prefix), self.peer_values)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Leave the gradients of backward passes inside to this rank, until a pass or an update outside sums them."""
        was_accumulating, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = was_accumulating

    def backward(
        self, own_loss: OwnLoss, call: Call, keeps_pace: bool, retain_graph: bool, is_stopping: bool = False
    ) -> None:
        """Add the gradient of the mean loss over all ranks to the parameters' gradients.

        Where the sum of the weights is known the ranks do not wait for each other: what they say is read after the
        backward pass, whose gradients are then taken back if a loss is bad.

        Args:
            own_loss: this rank's loss and weight.
            call: the call that this rank announces to the others.
            keeps_pace: whether this rank has no samples, and runs the pass only because the others wait for it.
            retain_graph: the option of `torch.Tensor.backward` of this name.
            is_stopping: whether this rank was asked to stop; the end of the step tells the others.

        Raises:
            LossError: it is not finite on some rank, or the weights add up to 0; gradients are as they were.
            CollectiveError: another rank is at another call, or the weights add up to something else.
        """
        self._settle()
        sums = self.sums
        if sums.looks_for_uncleared:
            sums.look_for_uncleared()
        target = self._summed_in_backward()
        if target is None:
            sums.count_once(sums.known.values())
        agreement = self.agreement
        if agreement.on_host is not agreement.on_device:
            agreement.meet_on_host(call)
        loss, own_weight = self._say_loss(own_loss, call, keeps_pace, is_stopping)
        failure = None
        # One rank waits for nobody, and knows what is wrong before its pass. A device is not waited for anyhow.
        may_be_ahead = own_loss.whole_weight is not None and self.comms.step.size > 1 and self.device.type == "cpu"
        if may_be_ahead and self.models.have_whole_gradients() and sums.may_take_back():
            assert own_loss.whole_weight is not None
            agreement.send_ahead(call, own_loss.whole_weight)
            agreement.finish_failed = self._finish_failed
            share: Any = torch.tensor(own_weight / own_loss.whole_weight, dtype=torch.float64)
        else:
            summed = agreement.sum()
            agreement.read_later(call, summed)
            # A GPU is not waited for: the ranks' message is read before the update.
            if self.device.type == "cpu":
                failure = self._read_for(target)
            share = own_weight / summed[WEIGHT]
        root = loss * share.to(loss.dtype)
        if target is not None:
            self._run_and_sum(target, partial(self._run_backward, root, keeps_pace, retain_graph), failure)
        else:
            self._run_backward(root, keeps_pace, retain_graph)
            if agreement.ahead is not None:
                self._take_ahead()
            sums.note_unsummed(self.models.parts is not None)
        if self.is_observed:
            self.observers.backward_ended(self.model)

    def _summed_in_backward(self) -> Target | None:
        """Return the optimizer's parameters whose gradients the next pass sums; None if they wait for `reduce`."""
        # Of several optimizers a pass may reach any. FSDP2 sums the gradients of rows by itself, and of pieces the
        # loop could not tell whether they are sums.
        if len(self.sums.targets) > 1 or self.is_accumulating:
            return None
        if self.models.parts is not None or self.models.tensor is not None:
            return None
        return self.sums.targets[0]

    def _say_loss(
        self, own_loss: OwnLoss, call: Call, keeps_pace: bool, is_stopping: bool
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Write the message of a backward pass; return the loss it starts from, and its weight on this rank."""
        loss = own_loss.loss.reshape(())
        message = self.agreement.begin(call)
        own_weight = 0.0 if keeps_pace else of_host(own_loss.weight)
        if isinstance(own_weight, torch.Tensor) or own_weight == 0:
            is_left_out = ~torch.isfinite(loss.detach()) & (own_weight == 0)
            loss = torch.where(is_left_out, 0.0, loss)
            message.write(LEFT_OUT, is_left_out)
        detached = loss.detach()
        if own_loss.factor is not None:
            detached = detached / own_loss.factor
        value = of_host(detached)
        if self.counts_its_samples:
            message.write(WEIGHT, own_weight)
            message.write(LOSS, own_weight * value)
        if self._has_more_to_say(is_stopping):
            message.write(STOP, 1)
        message.write(message.offset + BAD, _badness(value, own_weight))
        if self.models.tensor is not None:
            message.write(message.offset + ALIKE, value)
        return loss, own_weight

    def _read_for(self, target: Target | None) -> LossError | None:
        """Read the ranks' message; return the error of a bad loss where the pass runs all the same.

        Ranks that know the weight without waiting hear of it after the pass, and want this rank in its sums.
        """
        try:
            if self.agreement.ahead is None:
                self.agreement.read_all()
            else:
                self.agreement.read_ahead()
        except LossError as error:
            if target is None or self.comms.step.size == 1:
                raise
            return error
        except CollectiveError:
            if self.sums.running is not None:
                self.agreement.finish_failed = None
                self.sums.take_back()
            raise
        return None

    def _take_ahead(self) -> None:
        """Read the message that was sent before the backward pass.

        Raises:
            LossError: a loss is not finite, and gradients are as they were.
            CollectiveError: another rank is at another call, or weights add up to something else.
        """
        self.agreement.finish_failed = None
        try:
            self.agreement.read_ahead()
        except PacelineError:
            self.sums.clear()
            raise

    def _run_and_sum(self, target: Target, run_backward: Callable[[], None], failure: PacelineError | None) -> None:
        """Run a backward pass, sum its gradients over the ranks, and add them to those that are sums already.

        Args:
            target: the optimizer's parameters, whose gradients are summed.
            run_backward: a function that runs the backward pass.
            failure: the error that is known before the pass; None without one.

        Raises:
            LossError: a loss is not finite; gradients are as they were.
        """
        sums, agreement = self.sums, self.agreement
        raw = sums.find_raw(target) if sums.raw else ""
        sums.begin_summed_pass(target, failure is not None)
        agreement.finish_failed = self._finish_failed
        with sums.summing(target):
            run_backward()
            if agreement.ahead is not None:  # before this rank waits for one that is at another call
                failure = self._read_for(target)
        error = failure
        if raw:
            error = error or made_elsewhere(raw)
        if agreement.is_doubtful and self.device.type == "cpu":
            error = self._left_out() or error
        agreement.finish_failed = None
        if error is not None:
            sums.take_back()
            raise error
        sums.finish_summed_pass()

    def _run_backward(self, loss: torch.Tensor, keeps_pace: bool, retain_graph: bool) -> None:
        parts = self.models.parts
        if parts is not None:
            parts.open_backward(loss, keeps_pace)
        try:
            self.sums.run_backward(loss, retain_graph)
        except BaseException as error:
            if parts is not None:
                parts.forget()
            if isinstance(error, RuntimeError) and _GRAPH_IS_GONE in str(error):
                raise LossError(
                    "job.backward needs a loss of which no backward pass was made yet",
                    "what a backward pass of it needs was let go in one that came before",
                    "call job.backward once for each loss, in place of loss.backward(); for a second pass through the "
                    "same values write job.backward(loss, retain_graph=True) in the first, and .detach() what comes "
                    "from an earlier step",
                ) from error
            raise
        if parts is not None:
            parts.close_backward()

    def _settle(self) -> None:
        """Before a call: note what backward passes of the loop's own have reached, and end one that has raised."""
        if self.sums.reached or self.sums.raw:
            self.sums.note_passes_of_loop()
        if self.sums.running is not None:
            self._finish_failed()

    def _finish_failed(self) -> None:
        """Finish a backward pass that has raised, for which ranks without an error wait. Collective."""
        self.agreement.finish_failed = None
        self.sums.finish_failed()
        if self.agreement.ahead is not None:
            self._take_ahead()

    def reduce(self, call: Call, is_stopping: bool) -> None:
        """Make the gradients of `call.number` sums over the ranks, where they are not yet. Collective.

        Args:
            call: the call that this rank announces to the others.
            is_stopping: whether this rank was asked to stop; the end of the step tells the others.

        Raises:
            UsageError: a gradient was changed, or made, by something else than `backward`.
            CollectiveError: another rank is at another call.
            LossError: a gradient is not finite, of a loss with weight 0 that isn't either.
            WorkloadError: a dense parameter has a sparse gradient, or the other way round.
        """
        if self.is_observed:
            self.observers.phase_begins(observer.REDUCE)
        self._settle()
        targets = [self.sums.targets[call.number - 1]] if call.number else self.sums.targets
        if len(targets) == 1 and not targets[0].updated:
            self.sums.check_not_cleared(targets[0])
        agreement = self.agreement
        self._say_sums(call, targets, is_stopping)
        for target in targets:
            self.sums.check_untouched(target)
        if self.models.parts is not None:
            self.models.finish_gradients()
        for target in targets:
            if not target.is_summed:
                self.sums.sum_own(target)
        error = self._left_out() if agreement.is_doubtful else None
        if error is not None:
            raise error
        if self.is_observed:
            self.observers.gradients_reduced(self.named())

    def _left_out(self) -> LossError | None:
        """Return an error if a loss with weight 0 that is not finite has left such gradients on some rank."""
        self.agreement.is_doubtful = False
        return self.sums.left_out()

    def _say_sums(self, call: Call, targets: Sequence[Target], is_stopping: bool) -> None:
        """Tell the other ranks of a sum: now where it communicates, or the update after it; else with the next message.

        Raises:
            CollectiveError: another rank is at another call.
        """
        agreement = self.agreement
        is_plain = self.models.are_whole and len(self.sums.targets) == 1
        if is_plain and targets[0].is_summed and not targets[0].awaits_pass:
            if agreement.unread:
                agreement.read_all()
            agreement.silent_calls.append(call.code)
            return
        message = agreement.begin(call)
        if self._has_more_to_say(is_stopping):
            message.write(STOP, 1)
        agreement.agree(call)

    def begin_update(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Let the optimizer, counted from 1, update what this rank is to update; its gradients are sums."""
        if self.is_observed:
            self.observers.phase_begins(observer.UPDATE)
        self.agreement.silent_calls.append(Call(UPDATE, number).code)
        target = self.sums.targets[number - 1]
        self.sums.note_update(target)
        if not self.models.are_whole:
            self.models.begin_update(optimizer, number, target)

    def end_update(self, number: int) -> None:
        """Give every rank what the others have updated. Collective."""
        if not self.models.are_whole:
            self.models.end_update(number, self.sums.targets[number - 1])

    @property
    def notices(self) -> Sequence[str]:
        """Return notices for the user about how the models run."""
        split = [] if self.models.tensor is None else self.models.tensor.notices()
        return [*self.placed.notices, *split, *self.buffers.notices, *self.sums.notices]

    def local_shards(self) -> dict[str, LocalShard]:
        """Return this rank's shards of models, and of optimizer state that is not on every rank."""
        return self.models.local_shards(self.sums.targets)

    def end_step(self, call: Call, is_asked_to_stop: Callable[[], bool], may_skip_message: bool = False) -> Ended:
        """Make buffers equal on all ranks, and begin the next step. Collective.

        Args:
            call: the call that this rank announces to the others.
            is_asked_to_stop: a function that returns whether this rank was asked to stop. It is not called where the
                ranks send no message: they learn of it in the next step.
            may_skip_message: whether nothing is compared, and the next call shows whether all ranks were here.

        Returns:
            The step's summed weight and weighted loss, and whether a rank was asked to stop.

        Raises:
            CollectiveError: another rank is at another call.
            WorkloadError: the ranks' buffers have different shapes.
        """
        if self.is_observed:
            self.observers.phase_begins(observer.REDUCE)
        self._settle()
        agreement = self.agreement
        if self.may_keep_pace:
            self.models.counts_samples(True)
        if self.comms.step.size == 1:
            agreement.read_all()
            is_stopping = is_asked_to_stop()
            if self.buffers.slots:
                self.buffers.reduce(self.buffers.find_changed())
                self.buffers.begin_step()
        else:
            # A loss that is not read belongs to this step.
            skips_message = may_skip_message and agreement.is_end_agreed and not agreement.unread
            is_stopping = not skips_message and self._agree_on_end(call, is_asked_to_stop())
        agreement.is_end_agreed = False
        if self.models.shards or self.models.parts is not None:
            self.models.reshard()
        return Ended(*agreement.take_losses(), is_stopping)

    def _has_more_to_say(self, is_stopping: bool) -> bool:
        """Return whether this rank has a message for the others at the end of the step, as far as it knows."""
        # A single rank hears of a stop at once. Under tensor the ranks compare what they have in common.
        if is_stopping or self.comms.step.size == 1 or self.models.tensor is not None:
            return True
        # What is written after the sums only its rank knows then: a buffer of the model's state may not wait a step.
        return not self.buffers.are_derived or self.buffers.has_changed()

    def _agree_on_end(self, call: Call, is_stopping: bool) -> bool:
        """Make buffers equal; return whether a rank was asked to stop."""
        message = self.agreement.begin(call)
        message.write(STOP, is_stopping)
        changed = self.buffers.find_changed()
        if any(changed):
            for place, flag in enumerate(changed, self.agreement.buffers_at):
                message.write(place, flag)
        agreed = self.agreement.agree(call)
        # Ranks with the same samples change the same buffers: each change was counted by all of them.
        copies = self.comms.same_samples.size
        self.buffers.reduce([ranks // copies for ranks in agreed.changed])
        self.buffers.begin_step()
        return agreed.is_stopping

    def gradients_of(self, number: int = 0) -> dict[torch.nn.Parameter, str]:
        """Return the parameters of an optimizer that have a gradient, with their names; of all if it is 0."""
        return self.sums.with_gradient(number)

    def norm_of(self, number: int = 0) -> torch.Tensor:
        """Return the norm of the gradients of an optimizer's parameters, of all if it is 0; after `reduce`."""
        return self.models.norm_of(self.gradients_of(number))

    def unscale(self, parameters: Iterable[torch.nn.Parameter], inverse: float) -> bool:
        """Multiply gradients by `inverse`; return whether one is infinite or NaN on some rank. Collective."""
        with torch.no_grad():
            return self.peer_values.has_overflown(unscale(parameters, inverse, self.device, self.models.spreading()))

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the optimizers update, by name."""
        return {known.name: parameter for parameter, known in self.sums.known.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that gradient compression keeps from step to step, by name."""
        return self.sums.state()

    def close(self) -> None:
        """Let go of the other ranks."""
        self.agreement.is_closed = True
        super().close()
        self.shared_opener.close()
        self.sums.close()


def _badness(loss: torch.Tensor | float, weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return the fault of a loss and its weight: 0 for none, 1 for the loss, `BAD_WEIGHT` for the weight."""
    is_bad = ~torch.isfinite(loss) if isinstance(loss, torch.Tensor) else not math.isfinite(loss)
    if not isinstance(weight, torch.Tensor):
        return is_bad if 0 <= weight < math.inf else BAD_WEIGHT
    is_weight = torch.isfinite(weight) & (weight >= 0)
    return torch.where(is_weight, is_bad, BAD_WEIGHT)
