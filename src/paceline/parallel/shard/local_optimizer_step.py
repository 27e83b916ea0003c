"""The optimizer's step on this rank's rows as plain tensors.

FSDP2's parameters are DTensors: torch works out anew for each operation on each of them how its result is spread,
which for an update element by element is always the same. Of a step of a small BERT's AdamW that was three quarters.
Between steps the optimizer has the model's own parameters, as the person made it; their state is of plain rows.

Needs: an optimizer that updates element by element (`elementwise.py`).
Promises: the same bits as the step on DTensors.
Traffic: none.
"""

from __future__ import annotations

import torch

from paceline.comm.fully_shard import is_part, local


def step_on_rows(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, with rows in the place of DTensors while it runs."""
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    rows = {parameter: _rows(parameter) for group in before for parameter in group if is_part(parameter)}
    for parameter, row in rows.items():
        if parameter in optimizer.state:
            optimizer.state[row] = {key: local(value) for key, value in optimizer.state.pop(parameter).items()}
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
    row = torch.nn.Parameter(local(parameter), parameter.requires_grad)
    row.grad = None if parameter.grad is None else local(parameter.grad)
    return row
