"""Several optimizers as one: `Workload(optimizer=...)` may return a list of them.

Each has parameters of its own, and all step at each step. A strategy sees one optimizer; what is found out by trying
an optimizer is found out for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.nouns.errors import PlanError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.parallel.optimizer_parts import contains, groups_of

_ASKED = "the workload's optimizer should make torch optimizers, each over parameters of its own"
_NAMED = 3  # parameters that an error names


class OptimizerList(torch.optim.Optimizer):
    """Optimizers that step together. `job.optimizer` is one where the workload returns several.

    `job.optimizer.optimizers` has them. Indexing and iterating give them too, so that a workload's
    `scheduler(optimizer)` may make one scheduler for each; a scheduler of the whole changes the groups of all.

    Args:
        optimizers: the optimizers that the workload returned.

    Attributes:
        optimizers: the same optimizers.
    """

    optimizers: list[torch.optim.Optimizer]

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        # Not `super().__init__`, which wants parameters, and would make groups of them.
        self.__setstate__({"optimizers": optimizers, "state": {}, "defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the groups of all, in order: the very dicts that the optimizers have."""
        groups = []
        for optimizer in self.optimizers:
            groups += optimizer.param_groups
        return groups

    def __len__(self) -> int:
        return len(self.optimizers)

    def __getitem__(self, index: int) -> torch.optim.Optimizer:
        return self.optimizers[index]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer, in their order."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the gradients of all go."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: it would be unclear to which of them the parameters go.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "parameters should be added to one of the workload's optimizers",
            f"there are {len(self.optimizers)}",
            "write job.optimizer[0].add_param_group(...), with the number of the one that is meant",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put the states back.

        Raises:
            ValueError: they are of more or fewer optimizers.
        """
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def alone(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a list, or the one optimizer: each of these can be tried by itself."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerList) else [optimizer]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class; of several, of all."""
    kinds = [type(single).__name__ for single in alone(optimizer)]
    return f"list of {', '.join(kinds)}" if isinstance(optimizer, OptimizerList) else kinds[0]


def as_one(result: Any) -> Any:
    """Return a list or tuple of optimizers, from the workload's `optimizer` function, as one; all else as it is.

    Raises:
        WorkloadError: the list is empty, or has something else in it, or has an optimizer or a parameter twice.
    """
    if not isinstance(result, list | tuple):
        return result
    if not result:
        raise WorkloadError(_ASKED, "it returned none", "return e.g. [torch.optim.AdamW(model.parameters())]")
    for number, single in enumerate(result):
        if not isinstance(single, torch.optim.Optimizer):
            raise WorkloadError(
                _ASKED,
                f"number {number} of the {len(result)} that it returned is {shown(single)}",
                "return objects, such as [torch.optim.Muon(matrices), torch.optim.AdamW(others)]",
            )
        if contains(result[:number], single):
            raise WorkloadError(
                _ASKED, f"number {number} of the {len(result)} that it returned is there twice", "return each once"
            )
    return OptimizerList(list(result))


def check_servers_can_run(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError if parameter servers should run several optimizers."""
    if isinstance(optimizer, OptimizerList):
        kinds = ", ".join(type(single).__name__ for single in optimizer)
        raise PlanError(
            "the servers should run the workload's optimizer",
            f"it returns {len(optimizer)} ({kinds}), and servers run one, with any number of groups",
            "return one optimizer, with a group for each setting, or write replicate, shard, tensor or pipeline in "
            "place of server",
        )


def check_shared_out(optimizer: OptimizerList, model: torch.nn.Module) -> None:
    """Raise WorkloadError unless every trained parameter of the model is in exactly one of the optimizers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[torch.nn.Parameter, int] = {}
    for number, single in enumerate(optimizer.optimizers):
        members = set()
        for group in groups_of(single):
            members.update(group["params"])
        for parameter, name in names.items():  # in the model's order, so that all ranks name the same
            if parameter not in members:
                continue
            if parameter in owners:
                raise WorkloadError(
                    _ASKED,
                    f"{name} is in number {owners[parameter]} and in number {number}",
                    "give each parameter to one of them, e.g. by parameter.dim() == 2 and its opposite",
                )
            owners[parameter] = number
    missing = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in owners]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise WorkloadError(
            "the workload's optimizers should have every parameter that is trained",
            f"{', '.join(missing[:_NAMED])}{more} {'is' if len(missing) == 1 else 'are'} in none of the "
            f"{len(optimizer)}",
            "give it to one of them, or call requires_grad_(False) on what stays as it is, in the model's function",
        )
