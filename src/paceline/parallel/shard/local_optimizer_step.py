"""The optimizer's step on this rank's rows as plain tensors.

FSDP2's parameters are DTensors: torch works out anew for each operation on each of them how its result is spread,
which for an update element by element is always the same. Of a step of a small BERT's AdamW that was three quarters.
Between steps the optimizer has the model's own parameters, as the person made it; their state is of plain rows.

Needs: an optimizer that updates element by element (`elementwise.py`).
Promises: the same bits as the step on DTensors.
Traffic: none.
"""

from __future__ import annotations

import itertools

import torch

from paceline.comm.fully_shard import is_part, local


def step_on_rows(optimizer: torch.optim.Optimizer) -> None:
    """Run `optimizer.step()`, with rows in the place of DTensors while it runs."""
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    rows: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for parameter in itertools.chain.from_iterable(before):
        if is_part(parameter):
            rows[parameter] = _rows(parameter)
    # The optimizer finds state by parameter: it goes along with the rows, and back afterwards, also after an error.
    for parameter, row in rows.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[row] = {key: local(value) for key, value in state.items()}
    for group, parameters in zip(groups, before, strict=True):
        group["params"] = [rows.get(parameter, parameter) for parameter in parameters]
    try:
        optimizer.step()
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        for parameter, row in rows.items():
            if row in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(row)


def _rows(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return this rank's rows of a parameter, and of its gradient, as plain tensors of the same memory."""
    row = torch.nn.Parameter(local(parameter), parameter.requires_grad)
    row.grad = None if parameter.grad is None else local(parameter.grad)
    return row
