"""The learning-rate schedulers of a workload: one, or several in a list.

Those whose `step` wants nothing step after every update. One that wants a metric, such as ReduceLROnPlateau, steps when
the loop calls `job.schedule`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, PlanError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.workload import Workload
from paceline.parallel.optimizer_parts import contains, parts_of
from paceline.train.alike import load_scheduler, scheduler_state

_KEY = "schedulers"  # of the states of a list
_ASKED = "the workload's scheduler should make a learning-rate scheduler, or a list of them"
_MADE_FROM = "make it from what the function is handed: scheduler=lambda optimizer: StepLR(optimizer, 10)"
# What `step` of other libraries' schedulers is handed: not a metric, but a count that the loop keeps.
_COUNTS = ("epoch", "epochs", "step", "steps", "iteration", "num_updates", "num_steps", "t", "t_cur")


def make_schedulers(workload: Workload, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedulers that the workload's `scheduler` function makes; None if it has none.

    Raises:
        WorkloadError: there is something else in it, one that wants a count, or one of another optimizer.
    """
    if workload.scheduler is None:
        return None
    schedulers = workload.scheduler(optimizer)
    is_list = isinstance(schedulers, list | tuple)
    members = list(schedulers) if is_list else [schedulers]
    if not members:
        raise WorkloadError(_ASKED, "it returned an empty list", "leave scheduler out, or return at least one")
    for number, scheduler in enumerate(members):
        if not _is_scheduler(scheduler):
            found = f"number {number} of the list is {shown(scheduler)}" if is_list else f"it made {_named(scheduler)}"
            raise WorkloadError(_ASKED, found, "return objects of torch.optim.lr_scheduler")
        if contains(members[:number], scheduler):
            raise WorkloadError(_ASKED, f"number {number} of the list is there twice", "return each once")
        _check_wants(scheduler)
        check_optimizer(scheduler, [optimizer], "workload's scheduler", "workload's optimizer", _MADE_FROM)
    return schedulers


def _is_scheduler(value: object) -> bool:
    is_object = not isinstance(value, type | torch.optim.Optimizer)
    return is_object and all(callable(getattr(value, name, None)) for name in ("step", "state_dict"))


def _named(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _check_wants(scheduler: Any) -> None:
    """Raise WorkloadError where `step` wants a count, or more than one argument."""
    names = required_arguments(scheduler.step)
    if len(names) > 1 or (names and names[0] in _COUNTS):
        raise WorkloadError(
            "the workload's scheduler steps after every update, and is handed nothing; or by job.schedule, with a "
            "metric",
            f"{type(scheduler).__name__}.step wants {' and '.join(names)}",
            "return one of torch.optim.lr_scheduler, such as LambdaLR with a function of the step",
        )


def check_optimizer(
    scheduler: object, optimizers: Sequence[torch.optim.Optimizer], scheduler_name: str, optimizers_name: str, fix: str
) -> None:
    """Raise WorkloadError where a scheduler of torch's changes the rates of another optimizer.

    Args:
        scheduler: the scheduler that is checked.
        optimizers: the optimizers that it may be of.
        scheduler_name, optimizers_name: the names of both in an error.
        fix: the advice of the error.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    parts = list(itertools.chain.from_iterable(map(parts_of, optimizers)))
    if isinstance(optimizer, torch.optim.Optimizer) and not contains(parts, optimizer):
        raise WorkloadError(
            f"the {scheduler_name} should change the rates of the {optimizers_name}",
            f"{type(scheduler).__name__} has another {type(optimizer).__name__}",
            fix,
        )


def all_of(scheduler: object) -> list[Any]:
    """Return the schedulers, in order."""
    if isinstance(scheduler, list | tuple):
        return list(scheduler)
    return [] if scheduler is None else [scheduler]


def required_arguments(function: Any) -> list[str]:
    """Return the arguments that `function` can't be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # a callable without a signature: the first step shows whether it can be called
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    empty = inspect.Parameter.empty
    return [parameter.name for parameter in parameters if parameter.kind not in variadic and parameter.default is empty]


def by_metric(scheduler: object) -> list[Any]:
    """Return those that step by a metric."""
    return [member for member in all_of(scheduler) if required_arguments(member.step)]


def check_servers_can_schedule(scheduler: object) -> None:
    """Raise PlanError where workers of servers should step by a metric."""
    for member in by_metric(scheduler):
        raise PlanError(
            f"workers of parameter servers should step {type(member).__name__} by a metric",
            "each worker has its own scheduler, and one that takes a lost one's place has heard of no metric: their "
            "rates would differ",
            "write replicate, shard, tensor or pipeline in place of server, or take a schedule by steps",
        )


def counts_of(scheduler: object) -> list[Any]:
    """Return the steps of the schedulers that step after every update, where they count them."""
    by_step = [member for member in all_of(scheduler) if not required_arguments(member.step)]
    return [getattr(member, "last_epoch", None) for member in by_step]


def step_all(scheduler: object) -> None:
    """Step what steps after every update."""
    for member in all_of(scheduler):
        if not required_arguments(member.step):
            member.step()


def checked_metric(scheduler: object, metric: object, comm: AxisComm) -> float:
    """Return the metric that the schedulers are to step by. Collective.

    Raises:
        UsageError: there is none that wants one; the metric is no number, or another on some rank.
    """
    if not by_metric(scheduler):
        raise UsageError(
            "job.schedule steps the workload's schedulers by a metric",
            "it has none that wants one: the others step after every update",
            "leave the call out, or write scheduler=lambda optimizer: ReduceLROnPlateau(optimizer)",
        )
    return same_number("job.schedule", metric, comm)


def same_number(call: str, metric: object, comm: AxisComm, may_be_nan: bool = False) -> float:
    """Return a metric as a number. Collective.

    Args:
        call: the call that was handed the metric.
        metric: a number as Python's, numpy's or a tensor of one element.
        comm: the communicator of the ranks.
        may_be_nan: True to take NaN too.

    Raises:
        UsageError: it is no number, or another on some rank.
    """
    # All ranks come to the comparison, also those whose metric is no number, so that none waits.
    number = _number(metric)
    is_number = may_be_nan and isinstance(metric, float | torch.Tensor)
    rows = comm.all_gather(torch.tensor([number], dtype=torch.float64))
    if math.isnan(number) and not is_number:
        raise UsageError(
            f"{call} should be handed a number",
            f"it is {shown(metric)}",
            "hand it e.g. job.evaluate()['loss'], which is NaN where nothing was evaluated",
        )
    for rank, row in zip(comm.peers, rows, strict=True):
        value = float(row)
        if value != number and not (math.isnan(value) and math.isnan(number)):
            raise UsageError(
                f"{call} should be handed the same metric on every rank",
                f"it is {number!r} on rank {comm.peers[comm.rank]} and {value!r} on rank {rank}",
                "hand it what job.evaluate or job.step returns, or what paceline.all_reduce has summed",
            )
    return number


def _number(metric: Any) -> float:
    """Return a number; NaN for what is none."""
    if isinstance(metric, str | bytes | bool):
        return math.nan
    try:
        return float(metric)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def state_of(scheduler: Any) -> Any:
    """Return the state as a checkpoint keeps it; None without a scheduler."""
    if isinstance(scheduler, list | tuple):
        return {_KEY: [member.state_dict() for member in scheduler]}
    return None if scheduler is None else scheduler.state_dict()


def checked_state(scheduler: Any, saved: Mapping[str, object]) -> Any:
    """Return a checkpoint's state as `restore` takes it.

    Raises:
        CheckpointError: it is the state of other schedulers.
    """
    states: Any = saved.get(_KEY)
    is_list = isinstance(scheduler, list | tuple)
    if not is_list and not isinstance(states, list):
        return scheduler_state(scheduler, saved)
    fits = is_list and isinstance(states, list) and len(states) == len(scheduler)
    if not fits or not all(isinstance(state, dict) for state in states):
        raise CheckpointError(
            f"the checkpoint should have the state of the workload's schedulers, {_counted(scheduler)}",
            f"it has that of {_counted(states if isinstance(states, list) else None)}",
            "make them as they were when the checkpoint was saved, or start without the checkpoint",
        )
    return [scheduler_state(member, state) for member, state in zip(scheduler, states, strict=True)]


def _counted(schedulers: object) -> str:
    return f"a list of {len(schedulers)}" if isinstance(schedulers, list | tuple) else "one without a list"


def restore(scheduler: Any, state: Any) -> None:
    """Put the state back.

    Raises:
        CheckpointError: a scheduler does not take it.
    """
    states = state if isinstance(scheduler, list | tuple) else [state]
    for member, member_state in zip(all_of(scheduler), states, strict=True):
        load_scheduler(member, member_state)
