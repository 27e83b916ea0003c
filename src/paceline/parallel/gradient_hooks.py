"""Call the user's hooks on parameters' gradients with the gradient of the whole batch, as one process does.

A hook of `parameter.register_hook` or `register_post_accumulate_grad_hook` runs in the backward pass, where a rank of
several has the gradient of its own samples. So the hooks are taken off the parameters, and called once the gradients
are summed.

Needs: one backward pass for each update.
Promises: hooks see and change what they would in one process, in the same order.
Traffic: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paceline.nouns.errors import UsageError
from paceline.parallel.effects import hooks_of

_Hooks = tuple[dict[int, Any] | None, dict[int, Any] | None]


class GradientHooks:
    """The hooks of some parameters, which this takes off them.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.names: dict[torch.nn.Parameter, str] = {}
        self.hooks: dict[torch.nn.Parameter, _Hooks] = {}
        self.reached: set[torch.nn.Parameter] = set()  # by a backward pass, since they were called
        self.take(parameters)

    def take(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Take the hooks off these parameters, by name; of one that had some before, none may have come since.

        Raises:
            UsageError: some have.
        """
        for name, parameter in parameters.items():
            if not hooks_of(parameter):
                continue
            if parameter in self.hooks:
                raise UsageError(
                    "hooks on a parameter's gradient should be registered before the job is made, or all after it",
                    f"{name} had some before, and has more now",
                    "register them before paceline.prepare, or in the workload's model function",
                )
            self.names[parameter] = name
            # The very dicts: a handle removes its hook from them.
            self.hooks[parameter] = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
            parameter._backward_hooks = None
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def give_back(self) -> None:
        """Put the hooks back on the parameters."""
        for parameter, (before, after) in self.hooks.items():
            own = parameter._post_accumulate_grad_hooks or {}
            parameter._backward_hooks = before
            parameter._post_accumulate_grad_hooks = {**(after or {}), **own}
        self.hooks = {}

    def note_backward(self, reached: Iterable[torch.nn.Parameter]) -> None:
        """Note the parameters that a backward pass has reached.

        Raises:
            UsageError: an earlier one has reached one of them, and the hook was to be called after that.
        """
        if not self.hooks:
            return
        now = self.hooks.keys() & set(reached)
        twice = [self.names[parameter] for parameter in now & self.reached]
        self.reached |= now
        if twice:
            raise UsageError(
                "a parameter with a hook on its gradient should be reached by one backward pass for each update",
                f"two have reached {twice[0]}; on several ranks its hook is called once, with their sum",
                "take the hook away and change job.gradients() before optimizer.step(), or train it on one rank",
            )

    def call(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Call the hooks of these parameters; their gradients are those of the whole batch."""
        if not self.hooks:
            return
        for parameter in parameters:
            if parameter in self.reached and parameter.grad is not None:
                self._call(parameter)
            self.reached.discard(parameter)

    def _call(self, parameter: torch.nn.Parameter) -> None:
        before, after = self.hooks[parameter]
        with torch.no_grad():
            for hook in list((before or {}).values()):
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
            for hook in list((after or {}).values()):
                hook(parameter)
