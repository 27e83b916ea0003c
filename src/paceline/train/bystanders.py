"""Keep a trial of the loss from changing modules other than the copy that is tried: a teacher, the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that torch keeps in a module's dictionary


class ModuleState:
    """A snapshot of a model's buffers and plain attributes.

    Forward may write into buffers, replace them, and count in attributes (`self.longest = n`): a cache and the number
    that says how long it is must be put back together.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self.attributes: list[tuple[dict[str, Any], dict[str, tuple[Any, Any]]]] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    self.buffers.append((module._buffers, name, buffer, buffer.detach().clone()))
            saved = {name: (value, _content_of(value)) for name, value in _plain_attributes(module)}
            self.attributes.append((vars(module), saved))

    def put_back(self) -> None:
        """Make buffers and attributes what they were."""
        for slots, name, buffer, before in self.buffers:
            buffer.data.copy_(before)
            slots[name] = buffer
        for attributes, saved in self.attributes:
            added = [name for name in attributes if name not in saved and name not in _OF_TORCH]
            for name in added:
                if not name.startswith("_"):  # torch's own wrappers keep theirs under such names
                    del attributes[name]
            for name, (value, content) in saved.items():
                _fill(value, content)
                attributes[name] = value


def _plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]


def _content_of(value: Any) -> Any:
    """Return a copy of what a list, dict or set holds; None for anything else."""
    return value.copy() if type(value) in (list, dict, set) else None


def _fill(value: Any, content: Any) -> None:
    if content is None:
        return
    value.clear()
    if isinstance(value, list):
        value.extend(content)
    else:
        value.update(content)


class ReachedError(Exception):
    """The code computes with the model that will train, whatever model it is given."""


class Bystanders:
    """Keeps the state and gradients of the models that will train, and of every other module that the code calls.

    A loss may be a closure over the model, or ask a teacher that has batch norm.

    Args:
        trained: the models that the code must not reach.
    """

    def __init__(self, *trained: nn.Module) -> None:
        # By `id`; the modules are kept too, so that no other object gets the id of one that is gone.
        self.trained: dict[int, nn.Module] = {}
        self.visited: dict[int, nn.Module] = {}  # modules that the code has called
        self.parameters: list[nn.Parameter] = []
        for model in trained:
            self.trained.update((id(module), module) for module in model.modules())
            self.parameters += model.parameters()
        self.tried: set[int] = set()  # ids of the modules of the copy that is tried
        self.states = [ModuleState(model) for model in trained]
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
        self.tried = {id(module) for module in model.modules()}
        try:
            yield
        finally:
            # Code may compute with the parameters without calling a module: then they have gradients.
            has_gradients = any(parameter.grad is not None for parameter in self.parameters)
            is_reached = self.is_reached or has_gradients
            self._put_back()
        if is_reached:
            raise ReachedError

    def _look(self, module: nn.Module, arguments: Any) -> None:
        if id(module) in self.tried or id(module) in self.visited:
            return
        if id(module) in self.trained:
            self.is_reached = True  # also where the code goes on after the error
            raise ReachedError
        self.visited.update((id(part), part) for part in module.modules())
        self.states.append(ModuleState(module))
        self._take_gradients(list(module.parameters()))

    def _take_gradients(self, parameters: list[nn.Parameter]) -> None:
        known = {id(parameter) for parameter, _ in self.gradients}
        for parameter in parameters:
            if id(parameter) not in known:
                known.add(id(parameter))
                self.gradients.append((parameter, parameter.grad))
                parameter.grad = None  # a backward pass would add to it in place

    def _put_back(self) -> None:
        for state in self.states:
            state.put_back()
        for parameter, _ in self.gradients:
            parameter.grad = None
