"""Several optimizers and schedulers, and before_update, in the reference: it shares no code with what it checks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from paceline.nouns.workload import Workload
from paceline.train.seed import kept_random_state, seed_everything


class Several(torch.optim.Optimizer):
    """Optimizers that step one after another; a scheduler sees the groups of all, or takes one by its index."""

    members: list[torch.optim.Optimizer]

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        # Not by torch's constructor, which wants parameters. The groups are the members' own.
        groups = [group for member in members for group in member.param_groups]
        self.__setstate__({"members": members, "param_groups": groups, "state": {}, "defaults": {}})

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> torch.optim.Optimizer:
        return self.members[index]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.members)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each."""
        for member in self.members:
            member.step()


def as_optimizer(made: Any) -> Any:
    """Return what a workload's `optimizer` made; a list as one."""
    return Several(list(made)) if isinstance(made, list | tuple) else made


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return what the optimizer, or that of several which has the parameter, keeps of it."""
    members = optimizer.members if isinstance(optimizer, Several) else [optimizer]
    state: dict[str, Any] = {}
    for member in members:
        state.update(member.state.get(parameter, {}))
    return state


def step_schedulers(made: Any) -> None:
    """Step what a workload's `scheduler` made, but for those that want a metric: no loop evaluates here."""
    if made is None:
        return
    for scheduler in made if isinstance(made, list | tuple) else [made]:
        parameters = inspect.signature(scheduler.step).parameters.values()
        if all(
            each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for each in parameters
        ):
            scheduler.step()


def change_gradients(workload: Workload, model: torch.nn.Module, steps: int) -> None:
    """Let the workload's before_update change the gradients, with the random numbers that it has on ranks.

    Args:
        workload: it has one.
        model: with gradients.
        steps: done before.
    """
    assert workload.before_update is not None
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    with kept_random_state(), torch.no_grad():
        seed_everything(workload.seed, 0x0BDA7E, steps)
        workload.before_update(gradients)
