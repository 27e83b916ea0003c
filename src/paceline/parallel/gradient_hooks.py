"""Call the user's hooks on parameters' gradients with the gradient of the whole batch, as one process does.

A hook of `parameter.register_hook` or `register_post_accumulate_grad_hook` runs in the backward pass, where a rank of
several has the gradient of its own samples. So the hooks are taken off the parameters, and called once the gradients
are summed.

Needs: one backward pass for each sum of gradients.
Promises: hooks see and change what they would in one process, in the same order.
Traffic: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.nouns.errors import UsageError
from paceline.parallel.effects import hooks_of, is_own_hook
from paceline.torch_private.autograd import HooksByKey, gradient_hooks, set_gradient_hooks

_NONE: Mapping[torch.nn.Parameter, torch.Tensor] = {}
_Hooks = tuple[HooksByKey | None, HooksByKey | None]


class GradientHooks:
    """The hooks of some parameters, which this takes off them.

    Args:
        parameters: the parameters whose hooks are taken off, by name.
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
            self.hooks[parameter] = gradient_hooks(parameter)
            own_hooks = {key: hook for key, hook in (self.hooks[parameter][1] or {}).items() if is_own_hook(hook)}
            set_gradient_hooks(parameter, None, own_hooks or None)

    def give_back(self) -> None:
        """Put the hooks back on the parameters."""
        for parameter, (before, after) in self.hooks.items():
            own_hooks = gradient_hooks(parameter)[1] or {}
            set_gradient_hooks(parameter, before, {**(after or {}), **own_hooks})
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

    def call(
        self, parameters: Iterable[torch.nn.Parameter], earlier: Mapping[torch.nn.Parameter, torch.Tensor] = _NONE
    ) -> None:
        """Call the hooks of these parameters, whose gradients are those of the whole batch, and add earlier gradients.

        Args:
            parameters: the parameters of which a backward pass has made gradients.
            earlier: the gradients of earlier backward passes, to which these are added. As in one process a hook of
                `register_hook` gets only the new gradient, the other kind finds the sum.
        """
        if not self.hooks and not earlier:
            return
        with torch.no_grad():
            for parameter in parameters:
                is_called = parameter in self.hooks and parameter in self.reached and parameter.grad is not None
                before, after = self.hooks[parameter] if is_called else (None, None)
                for hook in list((before or {}).values()):
                    changed = hook(parameter.grad)
                    if changed is not None:
                        parameter.grad = changed
                if parameter in earlier:
                    parameter.grad = _added(earlier[parameter], parameter.grad)
                for hook in list((after or {}).values()):
                    if not is_own_hook(hook):
                        hook(parameter)
                self.reached.discard(parameter)


def _added(earlier: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return earlier
    if earlier.is_sparse or gradient.is_sparse:
        return earlier + gradient
    return gradient.add_(earlier)
