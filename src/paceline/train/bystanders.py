"""What a trial's code does to modules other than the copy that is tried: found, and undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn


class Buffers:
    """The buffers of a model as they are now; forward may write into them, or put others in their place."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def put_back(self) -> None:
        """Make the model's buffers what they were."""
        for slots, name, buffer, before in self.kept:
            buffer.data.copy_(before)
            slots[name] = buffer


class ReachedError(Exception):
    """The code computes with the model that will train, whatever model it is given."""


class Bystanders:
    """Keeps buffers and gradients of the models that will train, and of every module that the code calls besides.

    A loss may be a closure over the model, or ask a teacher that has batch norm.

    Args:
        trained: models that the code must not reach.
    """

    def __init__(self, *trained: nn.Module) -> None:
        self.trained = {id(part): part for model in trained for part in model.modules()}
        self.parameters = [parameter for model in trained for parameter in model.parameters()]
        self.known: dict[int, nn.Module] = {}
        self.own: set[int] = set()
        self.buffers = [Buffers(model) for model in trained]
        self.gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.is_reached = False

    def __enter__(self) -> Bystanders:
        self._take_gradients(self.parameters)
        self.handle = nn.modules.module.register_module_forward_pre_hook(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.remove()
        self._put_back()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Run the code on `model`; afterwards all else is as it was.

        Raises:
            ReachedError: the code reached a model that will train.
        """
        self.own = {id(part) for part in model.modules()}
        try:
            yield
        finally:
            is_reached = self.is_reached or any(parameter.grad is not None for parameter in self.parameters)
            self._put_back()
        if is_reached:
            raise ReachedError

    def _look(self, module: nn.Module, arguments: Any) -> None:
        if id(module) in self.own or id(module) in self.known:
            return
        if id(module) in self.trained:
            self.is_reached = True  # also where the code goes on after the error
            raise ReachedError
        self.known.update((id(part), part) for part in module.modules())
        self.buffers.append(Buffers(module))
        self._take_gradients(list(module.parameters()))

    def _take_gradients(self, parameters: list[nn.Parameter]) -> None:
        taken = {id(parameter) for parameter, _ in self.gradients}
        for parameter in parameters:
            if id(parameter) not in taken:
                taken.add(id(parameter))
                self.gradients.append((parameter, parameter.grad))
                parameter.grad = None  # a backward pass would add to it in place

    def _put_back(self) -> None:
        for buffers in self.buffers:
            buffers.put_back()
        for parameter, _ in self.gradients:
            parameter.grad = None
