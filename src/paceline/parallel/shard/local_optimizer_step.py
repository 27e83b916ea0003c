"""The optimizer's step on other tensors than the model's own parameters, such as this rank's rows as plain tensors.

FSDP2's parameters are DTensors: torch works out anew for each operation on each of them how its result is spread,
which for an update element by element is always the same. Of a step of a small BERT's AdamW that was three quarters.
Between steps the optimizer has the model's own parameters, as the user made it; their state is of plain rows.

Needs: an optimizer that updates element by element (`elementwise.py`).
Promises: the same bits as the step on DTensors.
Traffic: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline.comm.dtensor_parts import is_part, local
from paceline.parallel.optimizer_parts import groups_of, parts_of


def step_on_rows(optimizer: torch.optim.Optimizer) -> None:
    """Run `optimizer.step()`, with rows in the place of DTensors while it runs."""
    with stand_ins(optimizer, rows_of(optimizer)):
        optimizer.step()


class StandIns:
    """As `stand_ins`, around a step that somebody else calls."""

    def __init__(self) -> None:
        self.running: AbstractContextManager[None] | None = None

    def begin(
        self, optimizer: torch.optim.Optimizer, replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter | None]
    ) -> None:
        """Put other parameters in the place of the optimizer's own."""
        self.end()  # of a step that raised
        self.running = stand_ins(optimizer, replaced)
        self.running.__enter__()

    def end(self) -> None:
        """Put the optimizer's own parameters back."""
        running, self.running = self.running, None
        if running is not None:
            running.__exit__(None, None, None)


@contextmanager
def stand_ins(
    optimizer: torch.optim.Optimizer, replaced: Mapping[torch.nn.Parameter, torch.nn.Parameter | None]
) -> Iterator[None]:
    """Put other parameters in the place of the optimizer's own, with their state; afterwards, put the own ones back.

    Args:
        optimizer: the optimizer, which may be made of several.
        replaced: for each parameter, the one that the optimizer has in its place; None: it has none, and the state
            stays. A group that has become empty has a tensor without elements and gradient: some optimizers look at the
            device of the first one, or count no step in an empty group.
    """
    groups = groups_of(optimizer)
    before = [group["params"] for group in groups]
    moved = {parameter: stand_in for parameter, stand_in in replaced.items() if stand_in is not None}
    # The optimizer finds state by parameter: it goes along with the stand-ins, and back afterwards, also after an
    # error.
    for part in parts_of(optimizer):
        for parameter, stand_in in moved.items():
            if parameter in part.state:
                part.state[stand_in] = {key: local(value) for key, value in part.state.pop(parameter).items()}
    for group, parameters in zip(groups, before, strict=True):
        group["params"] = [
            moved.get(parameter, parameter)
            for parameter in parameters
            if parameter in moved or parameter not in replaced
        ]
    empty = _fill_empty(groups, before)
    try:
        yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        for part in parts_of(optimizer):
            for parameter, stand_in in moved.items():
                if stand_in in part.state:
                    part.state[parameter] = part.state.pop(stand_in)
            for parameter in empty:
                part.state.pop(parameter, None)


def _fill_empty(
    groups: Sequence[dict[str, Any]], before: Sequence[Sequence[torch.nn.Parameter]]
) -> list[torch.nn.Parameter]:
    """Put a parameter without elements into each group that has become empty, and return these."""
    fillers = []
    for group, parameters in zip(groups, before, strict=True):
        if parameters and not group["params"]:
            like = local(parameters[0].detach())
            fillers.append(torch.nn.Parameter(like.new_empty((0,) * like.dim()), requires_grad=False))
            group["params"] = fillers[-1:]
    return fillers


def rows_of(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Return this rank's rows, as plain tensors, of each of the optimizer's parameters that is a DTensor."""
    rows: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for group in groups_of(optimizer):
        for parameter in group["params"]:
            if is_part(parameter):
                rows[parameter] = _rows(parameter)
    return rows


def _rows(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return this rank's rows of a parameter, and of its gradient, as plain tensors of the same memory."""
    row = torch.nn.Parameter(local(parameter), parameter.requires_grad)
    row.grad = None if parameter.grad is None else local(parameter.grad)
    return row
