"""Buffers, such as a batch norm's running statistics, made equal on all ranks after each step.

Only those that a forward pass changed are sent. A change shows in the tensor's version counter, or in another
tensor in its place; batch norms write their statistics past that counter, so one changed buffer of a module stands
for all of them. Writes through `.data` pass it too: the first step's values are compared with those before it, and
what was changed so is compared in every step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.collectives import AxisComm

_Slots = tuple[torch.nn.Module, dict[str, torch.Tensor | None]]


class Buffers:
    """The buffers of a model on this rank."""

    def __init__(self, model: torch.nn.Module, comm: AxisComm) -> None:
        self.comm = comm
        number: dict[int, int] = {}
        self.slots: list[tuple[torch.nn.Module, str]] = []  # where each buffer is: forward may assign another tensor
        for module in model.modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in number:
                    number[id(tensor)] = len(self.slots)
                    self.slots.append((module, key))
        self.modules = [
            [number[id(tensor)] for tensor in module.buffers(recurse=False) if id(tensor) in number]
            for module in model.modules()
        ]
        self.seen = self._versions()
        self.changed = [False] * len(self.slots)
        self.compared = set(range(len(self.slots)))  # whose values are compared: all in the first step
        self.is_first = True
        self.before: dict[int, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers as they are now."""
        return [module._buffers[key] for module, key in self.slots]  # type: ignore[misc]

    def begin_step(self) -> None:
        """Remember the buffers as they are."""
        self.seen = self._versions()
        tensors = self.tensors
        is_compared = self.comm.size > 1 and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        here = {index for index in self.compared if is_compared and not tensors[index].is_meta}
        self.before = {index: tensors[index].detach().clone() for index in here}

    def find_changed(self) -> list[bool]:
        """Which buffers this rank's forward passes changed since `begin_step`."""
        now, tensors = self._versions(), self.tensors
        differ = {index for index in range(len(tensors)) if now[index] != self.seen[index]}
        touched = {index for indices in self.modules if differ.intersection(indices) for index in indices}
        unseen = {index for index, kept in self.before.items() if not _same(kept, tensors[index])} - touched
        if self.is_first:  # from the second step on those alone that a write reached unseen
            self.compared, self.is_first = unseen, False
        self.before = {}
        self.changed = [
            index in touched | unseen and not tensor.is_meta  # which another stage holds
            for index, tensor in enumerate(tensors)
        ]
        return self.changed

    def reduce(self, ranks_changed: list[int]) -> None:
        """Float buffers become the mean over the ranks that changed them, others the largest.

        Args:
            ranks_changed: for each buffer, on how many ranks it changed.
        """
        if self.comm.size == 1 or not any(ranks_changed):
            return
        by_dtype: dict[torch.dtype, list[int]] = {}
        tensors = self.tensors
        for index, ranks in enumerate(ranks_changed):
            if ranks and not tensors[index].is_meta:  # on the meta device: another stage's
                by_dtype.setdefault(tensors[index].dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            self._reduce_dtype(dtype, indices, ranks_changed)

    def _reduce_dtype(self, dtype: torch.dtype, indices: list[int], ranks_changed: list[int]) -> None:
        is_mean = dtype.is_floating_point
        # In float64 the sum of equal values is exact, and that of a mask's smallest number is no -inf.
        wide = torch.float64 if is_mean else torch.int64
        tensors = self.tensors
        flats = [tensors[index].detach().reshape(-1).to(wide) for index in indices]
        if is_mean:  # a rank without samples holds old statistics: they must not count
            flats = [flat * self.changed[index] for flat, index in zip(flats, indices, strict=True)]
        sent = torch.cat(flats)
        self.comm.all_reduce(sent, "sum" if is_mean else "max")
        for index, part in zip(indices, sent.split([flat.numel() for flat in flats]), strict=True):
            result = part / ranks_changed[index] if is_mean else part
            tensors[index].detach().copy_(result.view_as(tensors[index]))

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self.tensors]


class KeptBuffers:
    """The buffers of some modules as they are now; while it is entered the modules see copies of these.

    What a forward pass writes meanwhile is gone afterwards. Other tensors take the buffers' places: old values written
    into the buffers themselves would change what autograd has saved of them.

    Args:
        modules: whose own buffers are meant, without those of modules inside them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.before = _copied([(module, module._buffers) for module in modules])
        self.now: list[_Slots] = []

    def __enter__(self) -> None:
        self.now = [(module, dict(module._buffers)) for module, _ in self.before]
        _put(_copied(self.before))

    def __exit__(self, *error: object) -> None:
        _put(self.now)
        self.now = []


def _copied(slots: Iterable[_Slots]) -> list[_Slots]:
    """Copies of the tensors in `slots`; one that stands in two places stays one."""
    copies: dict[int, torch.Tensor | None] = {}
    result = []
    for module, buffers in slots:
        for tensor in buffers.values():
            if tensor is None or tensor.requires_grad:  # autograd sees to the writes into its own tensors
                copies[id(tensor)] = tensor
            elif id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
        result.append((module, {key: copies[id(tensor)] for key, tensor in buffers.items()}))
    return result


def _put(slots: Iterable[_Slots]) -> None:
    for module, buffers in slots:
        module._buffers.clear()
        module._buffers.update(buffers)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))
