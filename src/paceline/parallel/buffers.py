"""Buffers, such as a batch norm's running statistics, made equal on all ranks after each step.

Only those that a forward pass changed are sent. A change shows in the tensor's version counter; batch
norms write their statistics past that counter, so one changed buffer of a module stands for all of them.
"""

from __future__ import annotations

import torch

from paceline.comm.collectives import AxisComm


class Buffers:
    """The buffers of a model on this rank."""

    def __init__(self, model: torch.nn.Module, comm: AxisComm) -> None:
        self.comm = comm
        self.tensors = list(model.buffers())
        number = {id(tensor): index for index, tensor in enumerate(self.tensors)}
        self.modules = [
            [number[id(tensor)] for tensor in module.buffers(recurse=False) if id(tensor) in number]
            for module in model.modules()
        ]
        self.seen = self._versions()
        self.changed = [False] * len(self.tensors)

    def begin_step(self) -> None:
        """Remember the buffers as they are."""
        self.seen = self._versions()

    def find_changed(self) -> list[bool]:
        """Which buffers this rank's forward passes changed since `begin_step`."""
        now = self._versions()
        self.changed = [False] * len(self.tensors)
        for indices in self.modules:
            if any(now[index] != self.seen[index] for index in indices):
                for index in indices:
                    self.changed[index] = not self.tensors[index].is_meta  # which another stage holds
        return self.changed

    def reduce(self, ranks_changed: list[int]) -> None:
        """Float buffers become the mean over the ranks that changed them, others the largest.

        Args:
            ranks_changed: for each buffer, on how many ranks it changed.
        """
        if self.comm.size == 1 or not any(ranks_changed):
            return
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, ranks in enumerate(ranks_changed):
            if ranks and not self.tensors[index].is_meta:  # on the meta device: another stage's
                by_dtype.setdefault(self.tensors[index].dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            self._reduce_dtype(dtype, indices, ranks_changed)

    def _reduce_dtype(self, dtype: torch.dtype, indices: list[int], ranks_changed: list[int]) -> None:
        is_mean = dtype.is_floating_point
        # In float64 the sum of equal values is exact, and that of a mask's smallest number is no -inf.
        wide = torch.float64 if is_mean else torch.int64
        flats = [self.tensors[index].reshape(-1).to(wide) for index in indices]
        if is_mean:  # a rank without samples holds old statistics: they must not count
            flats = [flat * self.changed[index] for flat, index in zip(flats, indices, strict=True)]
        sent = torch.cat(flats)
        self.comm.all_reduce(sent, "sum" if is_mean else "max")
        for index, part in zip(indices, sent.split([flat.numel() for flat in flats]), strict=True):
            result = part / ranks_changed[index] if is_mean else part
            self.tensors[index].copy_(result.view_as(self.tensors[index]))

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]
