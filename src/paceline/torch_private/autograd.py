"""Autograd: its state in a backward pass, the hooks that users have registered, the functions that differentiate.

State: `torch.autograd.graph` has hooks and nodes, but does not say what runs now. Its own hooks ask the functions of
`torch._C` below.

Hooks on gradients, on modules and on an optimizer's step: torch registers them by public functions, and has none to
list them. Paceline refuses or moves hooks that one rank can't call rightly, and puts its own before the user's.

`apis` and `eager_transforms` are where `torch.vmap` and `torch.func` are implemented. They are exchanged while a model
is traced, for every name that these functions have: users' files import the public functions by name, where nothing can
exchange them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

from paceline.nouns.patching import patched

__all__ = [
    "DIFFERENTIATES",
    "Hook",
    "HooksByKey",
    "apis",
    "backward_hooks_of",
    "backward_hooks_of_every_module",
    "backward_passes_within",
    "eager_transforms",
    "gradient_hooks",
    "is_in_backward",
    "is_profiler_running",
    "next_node_number",
    "running_node_number",
    "set_gradient_hooks",
    "step_hooks_of_every_optimizer",
    "step_post_hooks",
    "step_pre_hooks",
]

DIFFERENTIATES = ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")  # of eager_transforms
Hook = Callable[..., Any]
HooksByKey = dict[int, Any]

# Also where autograd's own thread calls: each thread has its own answer.
_current_task = torch._C._current_graph_task_id


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return _current_task() != -1


def running_node_number() -> int | None:
    """Return the sequence number of the node that runs in this thread; None outside of a backward pass.

    A node's number is the one that `next_node_number` returned just before the operation that made it.
    """
    if not is_in_backward():
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())  # type: ignore[attr-defined]


def next_node_number() -> int:
    """Return the sequence number that autograd gives the next node."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def is_profiler_running() -> bool:
    """Return whether a profiler of torch records now, the user's own included."""
    return bool(torch._C._autograd._profiler_enabled())


@contextmanager
def backward_passes_within(mode: AbstractContextManager[object]) -> Iterator[None]:
    """Run backward passes that begin inside within `mode`.

    What checkpointing computes again runs in a backward pass, where the modes of the forward pass are not active.
    """
    run_in_engine: Callable[..., object] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*arguments: object, **named: object) -> object:
        with mode:
            return run_in_engine(*arguments, **named)

    with patched(torch.autograd, _engine_run_backward=run_backward):
        yield


def gradient_hooks(tensor: torch.Tensor) -> tuple[HooksByKey | None, HooksByKey | None]:
    """Return the hooks on a tensor's gradient, before and after it is added: handles remove from these dicts."""
    return tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)


def set_gradient_hooks(tensor: torch.Tensor, before: HooksByKey | None, after: HooksByKey | None) -> None:
    """Give a tensor other hooks on its gradient; nothing public takes hooks off that others registered."""
    tensor._backward_hooks = before
    tensor._post_accumulate_grad_hooks = after  # type: ignore[assignment]


def backward_hooks_of(module: torch.nn.Module) -> Iterator[Hook]:
    """Yield a module's hooks in the backward pass."""
    return chain(module._backward_hooks.values(), module._backward_pre_hooks.values())


def backward_hooks_of_every_module() -> Iterator[Hook]:
    """Yield the hooks that run in the backward pass of every module."""
    return chain(of_modules._global_backward_hooks.values(), of_modules._global_backward_pre_hooks.values())


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> HooksByKey:
    """Return the hooks before an optimizer's step, in the order of their calls; the dict can be changed."""
    return optimizer._optimizer_step_pre_hooks


def step_post_hooks(optimizer: torch.optim.Optimizer) -> HooksByKey:
    """Return the hooks after an optimizer's step, as `step_pre_hooks` does."""
    return optimizer._optimizer_step_post_hooks


def step_hooks_of_every_optimizer() -> Iterable[Hook]:
    """Return the hooks that run at every optimizer's step."""
    before, after = of_optimizers._global_optimizer_pre_hooks, of_optimizers._global_optimizer_post_hooks
    return [*before.values(), *after.values()]
