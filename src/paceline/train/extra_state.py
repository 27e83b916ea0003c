"""What modules keep beside parameters and buffers, by torch's `get_extra_state` and `set_extra_state`.

It is the module's own Python object, and no tensor that ranks have parts of: checkpoints have it as they have what
`job.keep` was handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

EXTRA_STATE = "model.extra_state"  # the name under which checkpoints have it
_SUFFIX = "_extra_state"  # of its key in a module's state_dict; torch's own constant is private


def has_extra_state(module: torch.nn.Module) -> bool:
    """True if the module itself has an extra state."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def state_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what `model.state_dict(keep_vars=True)` has, without the modules' extra state."""
    extra = set(extra_names(model))
    # keep_vars: a tied tensor is one and the same object.
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in extra:
            yield name, value


def extra_names(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules with an extra state by its name in the model's `state_dict`."""
    names: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        if has_extra_state(module):
            names[f"{path}.{_SUFFIX}" if path else _SUFFIX] = module
    return names


class ExtraState:
    """The extra state of all modules of a model, as one object that a checkpoint can keep."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return what each module returns."""
        return {name: module.get_extra_state() for name, module in extra_names(self.model).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand each module what it has returned; a module that is new keeps what it has."""
        for name, module in extra_names(self.model).items():
            if name in state:
                module.set_extra_state(state[name])
