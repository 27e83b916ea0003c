"""The collectives of `comm/api.py` with gradients: what each becomes in the backward pass.

    forward                  backward
    all_reduce, sum or mean  all_reduce with the same reduction
    all_gather               reduce_scatter: each rank gets the sum of the gradients of its own rows
    broadcast                reduce to the root; zeros on the other ranks
    reduce_scatter           all_gather; divided by the number of ranks for a mean
    all_to_all               all_to_all, back to where the rows came from

The loss of the job is the sum of the ranks' losses. A collective is linear, so its backward pass is the transposed map,
whose own backward pass is the collective again: second derivatives need no more code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm.collectives import AxisComm, check_dtype, split_rows
from paceline.nouns.errors import UsageError

Map = Callable[[torch.Tensor], torch.Tensor]


def check_gradient(collective: str, tensor: torch.Tensor, op: str = "sum") -> None:
    """Raise UsageError unless gradients can flow through `collective`."""
    if op not in ("sum", "mean"):
        over_ranks = {"min": "amin", "max": "amax", "product": "prod"}[op]
        raise UsageError(
            f"{collective} with grad=True needs the reduction sum or mean",
            f"the reduction is {op!r}",
            f"leave grad=True out, or write all_gather(tensor.unsqueeze(0), grad=True).{over_ranks}(0)",
        )
    check_dtype("sum", tensor.dtype)  # the backward pass adds up
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(
            f"{collective} with grad=True needs a tensor of a floating-point dtype",
            f"the dtype is {tensor.dtype}, which has no gradients",
            "leave grad=True out, or convert the tensor first, as with tensor.float()",
        )


def all_reduce(comm: AxisComm, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return the sum or mean over ranks."""

    def reduced(values: torch.Tensor) -> torch.Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(result, op)
        return result

    return _apply(tensor, reduced, reduced)


def all_gather(comm: AxisComm, tensor: torch.Tensor) -> torch.Tensor:
    """Return every rank's rows, in rank order."""
    if comm.size == 1:
        return _apply(tensor, torch.clone, torch.clone)
    count = torch.tensor([tensor.shape[0]], device=tensor.device)
    counts = [int(rows) for rows in comm.all_gather_along(count, [1] * comm.size, 0)]
    return _apply(
        tensor,
        lambda values: torch.cat(comm.all_gather_along(values, counts, 0)),
        lambda gradient: comm.reduce_scatter_list(gradient.split(counts)),
    )


def broadcast(comm: AxisComm, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Return the tensor of rank `root`."""

    def sent(values: torch.Tensor) -> torch.Tensor:
        result = values.clone(memory_format=torch.contiguous_format)
        comm.broadcast(result, root)
        return result

    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.reduce(total, root)
        # The other ranks' values were not sent. What torch leaves in their tensors is not defined.
        return total if comm.rank == root else torch.zeros_like(total)

    return _apply(tensor, sent, reduced)


def reduce_scatter(comm: AxisComm, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return this rank's rows of the sum or mean over ranks."""
    if comm.size == 1:
        return _apply(tensor, torch.clone, torch.clone)
    counts = split_rows(tensor.shape[0], comm.size)

    def gathered(gradient: torch.Tensor) -> torch.Tensor:
        rows = torch.cat(comm.all_gather_along(gradient, counts, 0))
        return rows / comm.size if op == "mean" else rows

    return _apply(tensor, lambda values: comm.reduce_scatter(values, op), gathered)


def all_to_all(comm: AxisComm, tensor: torch.Tensor, splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Send `splits[i]` rows to rank i; return the rows received, in rank order, and how many from each."""
    if comm.size == 1:
        return _apply(tensor, torch.clone, torch.clone), list(splits)
    single_rows = [1] * comm.size
    counts = comm.all_to_all_sized(torch.tensor(splits, device=tensor.device), single_rows, single_rows).tolist()
    rows = _apply(
        tensor,
        lambda values: comm.all_to_all_sized(values, splits, counts),
        lambda gradient: comm.all_to_all_sized(gradient, counts, splits),
    )
    return rows, counts


def _apply(tensor: torch.Tensor, forth: Map, back: Map) -> torch.Tensor:
    """Return `forth(tensor)`; its gradient goes through `back`."""
    if torch.is_grad_enabled() and not tensor.requires_grad:
        # Every rank has to take part in the backward pass, also one whose own tensor needs no gradient.
        tensor = tensor.detach().requires_grad_()
    result: torch.Tensor = _Linear.apply(tensor, forth, back)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forth: Map, back: Map) -> torch.Tensor:
        ctx.forth, ctx.back = forth, back
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Linear.apply(gradients[0], ctx.back, ctx.forth), None, None  # type: ignore[no-untyped-call]
