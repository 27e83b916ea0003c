"""`shard` beside `tensor` or `pipeline`: parameters and optimizer state split between steps (ZeRO-1).

FSDP2 gathers a module's parameters as the module's own code is called; a split model runs as graphs instead. Here
each rank keeps rows of every parameter (of its piece of it) and their optimizer state; before a step all rows are
gathered, after it gradients are summed and each rank keeps its rows' again.

Needs: an optimizer that works element by element; what does not is given whole parameters (`whole_update.py`).
Promises: the update is that of whole parameters; parameter names and dimensions stay.
Traffic per step: per dtype one all_gather of this rank's rows, and one reduce_scatter of the gradients of parameters
that are trained; one all_reduce for parameters without dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.shard_spec import chunk_range


@dataclass(slots=True)
class FlatShard:
    """The strategy on this rank.

    Args:
        whole: the parameters that the graphs read, by name; emptied between steps.
        comm: the `shard` axis.
    """

    whole: Mapping[str, torch.nn.Parameter]
    comm: AxisComm
    rows: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def split(self) -> None:
        """Keep this rank's rows, once the parameters have their values."""
        for name, parameter in self.whole.items():
            self.shapes[name] = parameter.shape
            if parameter.dim() == 0:
                # Without dimensions there are no rows: every rank holds it, and `_sum_scalars` sums its gradient.
                self.rows[name] = parameter
                continue
            start, stop = chunk_range(parameter.shape[0], self.comm.rank, self.comm.size)
            rows = parameter.detach()[start:stop].clone()
            self.rows[name] = torch.nn.Parameter(rows, parameter.requires_grad)
            _empty(parameter)

    def gather(self) -> None:
        """Make the parameters whole for a step."""
        for name, rows in self.rows.items():  # which may have been frozen, or trained again, since the last step
            self.whole[name].requires_grad_(rows.requires_grad)
        with torch.no_grad():
            for names in self._by_dtype():
                # One message per dtype. Each rank sends as many numbers, so the rows are padded to those of the rank
                # with most.
                mine = torch.cat([self._padded(name).reshape(-1) for name in names])
                by_rank = self.comm.all_gather_along(mine, [mine.numel()] * self.comm.size, 0)
                start = 0
                for name in names:
                    shape = self.shapes[name]
                    stop = start + self._padded_rows(name) * _row_numel(shape)
                    # Cut as by `torch.chunk`, so only the last ranks have fewer rows: all padding is at the end.
                    padded = torch.cat([values[start:stop] for values in by_rank])
                    self.whole[name].data = padded[: shape.numel()].view(shape)
                    start = stop

    def scatter(self) -> None:
        """Sum the gradients and keep this rank's rows of them; let the whole parameters go."""
        for names in self._by_dtype(trained_only=True):
            # A gradient of zeros is not the same as none: AdamW would decay what no rank used.
            used = self._used(names)
            # Not padded: each rank receives as many numbers as its own rows have.
            by_rank = [self._flat_gradients(names, rank) for rank in range(self.comm.size)]
            mine = self.comm.reduce_scatter_list(by_rank)
            start = 0
            for name, is_used in zip(names, used, strict=True):
                rows = self.rows[name]
                stop = start + rows.numel()
                rows.grad = mine[start:stop].view_as(rows) if is_used else None
                start = stop
                self.whole[name].grad = None
        # Before the update: the whole parameters and the optimizer's temporaries are not held at once.
        self.release()
        self._sum_scalars()

    def _flat_gradients(self, names: list[str], rank: int) -> torch.Tensor:
        """Return the gradients of another rank's rows, in one row."""
        return torch.cat([self._gradient_rows(name, rank).reshape(-1) for name in names])

    def _sum_scalars(self) -> None:
        """Sum the gradients of parameters without dimensions, which every rank holds.

        A second number counts the ranks that have one: where none has, there is none afterwards.
        """
        for scalar in self.whole.values():
            if scalar.dim() > 0 or not scalar.requires_grad:
                continue
            both = torch.stack([torch.zeros_like(scalar.detach()), torch.zeros_like(scalar.detach())])
            if scalar.grad is not None:
                both[0] = scalar.grad
                both[1] = 1
            self.comm.all_reduce(both)
            # Where this rank has one, nothing is read, for which the host would wait.
            has_gradient = scalar.grad is not None or float(both[1]) > 0
            scalar.grad = both[0] if has_gradient else None

    def release(self) -> None:
        """Let the whole parameters go, after a step or an evaluation."""
        for name, parameter in self.whole.items():
            if parameter.dim():
                _empty(self.whole[name])

    def _by_dtype(self, trained_only: bool = False) -> list[list[str]]:
        groups: dict[torch.dtype, list[str]] = {}
        for name, parameter in self.whole.items():
            if self.shapes[name] and (parameter.requires_grad or not trained_only):
                groups.setdefault(parameter.dtype, []).append(name)
        return list(groups.values())

    def _used(self, names: list[str]) -> list[bool]:
        """Return whether any rank has a gradient of each parameter."""
        flags = torch.tensor([self.whole[name].grad is not None for name in names], dtype=torch.int32)
        self.comm.all_reduce(flags, "max")
        return [bool(flag) for flag in flags.tolist()]

    def _padded_rows(self, name: str) -> int:
        """Return how many rows each rank sends: those of the rank with the most."""
        return -(-self.shapes[name][0] // self.comm.size)

    def _padded(self, name: str) -> torch.Tensor:
        """Return this rank's rows, with zeros up to as many as each rank sends."""
        rows = self.rows[name].detach()
        missing = self._padded_rows(name) - rows.shape[0]
        if not missing:
            return rows
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])

    def _gradient_rows(self, name: str, rank: int) -> torch.Tensor:
        start, stop = chunk_range(self.shapes[name][0], rank, self.comm.size)
        parameter = self.whole[name]
        if parameter.grad is None:
            return parameter.new_zeros((stop - start, *self.shapes[name][1:]))
        return parameter.grad[start:stop]


def _empty(parameter: torch.nn.Parameter) -> None:
    # The object stays: the graphs' arguments refer to it.
    parameter.data = parameter.data.new_empty(0)


def _row_numel(shape: torch.Size) -> int:
    return shape[1:].numel()
