"""`state_dict()`, `load_state_dict()` and copies of a loop's model of which each rank holds a part.

torch would hand out this rank's rows (DTensors), which nobody can load without the other ranks. Inside `job.gathered()`
the model's tensors are whole, and so are those of its `state_dict()`; elsewhere the call is refused. Checkpoints, which
know what is cut, ask with `keep_vars`. Whole tensors may be loaded anywhere: each rank takes its rows of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from paceline.comm.dtensor_parts import is_part, local
from paceline.nouns.errors import WorkloadError
from paceline.parallel.shard.shard_strategy import Shard


class WholeStateDicts:
    """Watches over the state dicts of one model.

    Args:
        model: the model, of which each rank holds parts.
        shard: the strategy that holds the model's parts.
    """

    def __init__(self, model: torch.nn.Module, shard: Shard) -> None:
        self.name = type(model).__name__
        self.shard = shard
        if shard.groups is not None:
            shard.groups.leave_state_dicts_alone()
        for module in model.modules():
            module.register_state_dict_pre_hook(self._before)
            module.register_state_dict_post_hook(partial(self._after))  # torch writes an attribute to it
            module.register_load_state_dict_pre_hook(self._before_load)

    def _before(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse what would have parts.

        Raises:
            WorkloadError: the loop asks for a state dict outside of `job.gathered()`.
        """
        if keep_vars:
            if not self.shard.is_held:
                self.shard.reshard()
        elif not self.shard.is_held:
            raise WorkloadError(
                "the model is in parts, and state_dict() should have whole tensors",
                f"that of the {self.name} would have this rank's rows alone",
                "write `with job.gathered():` around it, on every rank; or job.save(FOLDER), and `paceline export` for "
                "a file",
            )

    def _after(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Hand out copies: whole parameters are freed when `job.gathered()` ends."""
        if not self.shard.is_held:
            return
        for name in module._parameters:
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor):
                state[prefix + name] = value.detach().clone()

    def _before_load(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Put this rank's rows in the place of whole tensors that are to be loaded.

        Raises:
            WorkloadError: they are to take the parameters' places.
        """
        check_copies(metadata, self.name)
        if self.shard.is_held:  # what is loaded into whole parameters counts when `job.gathered()` ends
            return
        self.shard.reshard()
        names = {parameter: name for name, parameter in self.shard.parameters.items()}
        for key, parameter in module._parameters.items():
            value: Any = state.get(prefix + key)
            if parameter is None or not is_part(parameter) or not _is_whole(value, parameter.shape):
                continue
            rows = torch.empty_like(parameter.detach(), dtype=value.dtype)
            local(rows).copy_(self.shard.rows_of(names[parameter], value))
            state[prefix + key] = rows

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise WorkloadError(
            "a model in parts can't be copied",
            f"a copy of the {self.name} was asked for: it would have this rank's rows alone",
            "make the copy before paceline.prepare, and hand it in too",
        )


def _is_whole(value: Any, shape: torch.Size) -> bool:
    """Return whether a value is a plain tensor of this shape; torch's own errors say what else is wrong."""
    return isinstance(value, torch.Tensor) and not is_part(value) and value.shape == shape


def check_copies(metadata: Any, name: str) -> None:
    """Raise WorkloadError if `load_state_dict` is to put its tensors in the parameters' places, by `assign=True`."""
    if metadata.get("assign_to_params_buffers", False):
        raise WorkloadError(
            "load_state_dict should copy into the model's parameters, which the optimizer updates",
            f"the {name} is in parts, and assign=True would put other tensors in their places",
            "leave assign=True out, or load before paceline.prepare",
        )
