"""Effects of a model and its optimizers beside their arithmetic, and the plans that keep them.

Hooks, storage that parameters share, a replaced `step`: a plan that holds the user's own tensors and runs the user's
own code keeps them, one that cuts tensors or runs a graph of the code would lose them. `EFFECTS` has one row for each
kind, with the placements that keep it; a new kind is a row there. It is asked before the first step.
`tests/parallel/test_effects.py` trains each kind under each placement: to the numbers of one process, or to the
refusal.

Parameters that the forward pass writes to are found while it runs: see `parameter_writes.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinMethodType
from typing import Any

import torch

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import GRAPH_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.parallel.optimizer_parts import parts_of
from paceline.torch_private.autograd import (
    backward_hooks_of,
    backward_hooks_of_every_module,
    gradient_hooks,
    step_hooks_of_every_optimizer,
    step_post_hooks,
    step_pre_hooks,
)
from paceline.torch_private.optim import is_wrapped_by_scheduler
from paceline.torch_private.tensors import storage_key

_PACKAGE = Path(__file__).parents[1]

ALONE = "one rank"  # whole tensors, and the whole batch
REPLICAS = "replicate"  # whole tensors, a part of the batch
OWNERS = "shard with zero=1 in a loop"  # whole tensors, each updated by one rank
SHARDS = "shard"  # rows of tensors, the user's own code
GRAPHS = "tensor, context, expert and pipeline"  # a graph of the code
SERVERS = "server"  # the optimizer runs elsewhere

_WHOLE_TENSORS = frozenset({ALONE, REPLICAS, OWNERS})


def placement_of(plan: Plan, is_loop: bool) -> str:
    """Return the placement of the models under a plan: one of the names above."""
    mesh = Mesh.parse(plan.mesh)
    if plan.strategy == "servers":
        return SERVERS
    if mesh.used(GRAPH_AXES):
        return GRAPHS
    if mesh.size("shard") > 1:
        return OWNERS if is_loop and plan.zero == 1 else SHARDS
    return REPLICAS if mesh.size("replicate") > 1 else ALONE


@dataclass(frozen=True, slots=True)
class Effect:
    """A kind of effect.

    Attributes:
        find: a function that yields a description of each such effect in a model and its optimizers.
        kept_by: the placements under which the job has the effect of one process.
        lost: the consequence under the other placements, for the error.
        fix: the advice of the error.
        is_hook: whether it can be registered after the model is cut.
    """

    find: Callable[[torch.nn.Module, Sequence[torch.optim.Optimizer]], Iterator[str]]
    kept_by: frozenset[str]
    lost: str
    fix: str = "write replicate in the plan, which keeps it"
    is_hook: bool = True


def check_effects(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], placement: str, is_cut: bool = False
) -> None:
    """Raise WorkloadError if the placement would lose an effect of the model or its optimizers.

    Args:
        model: the model as the user made it, before it is cut; its tensors need no values.
        optimizers: the optimizers over its parameters, maybe none.
        placement: the placement that `placement_of` returned.
        is_cut: whether the model is cut already, and the user may have registered hooks since.
    """
    for effect in EFFECTS:
        if placement in effect.kept_by or (is_cut and not effect.is_hook):
            continue
        for found in effect.find(model, optimizers):
            raise WorkloadError(
                f"the plan should keep what the model and its optimizer do beside their arithmetic ({placement})",
                f"{found}; {effect.lost}",
                effect.fix,
            )


def _gradient_hooks(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        for hook in hooks_of(parameter):
            yield f"{name} has a hook on its gradient ({_shown(hook)})"


def hooks_of(parameter: torch.Tensor) -> list[Any]:
    """Return the user's hooks on a parameter's gradient."""
    before, after = gradient_hooks(parameter)
    return [hook for hook in (*(before or {}).values(), *(after or {}).values()) if not is_own_hook(hook)]


def _module_hooks(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for hook in backward_hooks_of_every_module():
        yield f"every module has a hook in the backward pass ({_shown(hook)})"
    for name, module in model.named_modules():
        for hook in backward_hooks_of(module):
            yield f"{name or type(module).__name__} has a hook in the backward pass ({_shown(hook)})"


def _optimizer_hooks(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for optimizer in optimizers:
        for part in parts_of(optimizer):
            for hook in (*step_pre_hooks(part).values(), *step_post_hooks(part).values()):
                if not is_own_hook(hook):
                    yield f"{type(part).__name__} has a hook on its step ({_shown(hook)})"


def _global_optimizer_hooks(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for hook in step_hooks_of_every_optimizer():
        if not is_own_hook(hook):
            yield f"every optimizer has a hook on its step ({_shown(hook)})"


def _replaced_steps(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for optimizer in optimizers:
        for part in parts_of(optimizer):
            step = vars(part).get("step")
            # A scheduler wraps `step` to see whether it was called.
            if step is not None and not is_wrapped_by_scheduler(step):
                yield f"the step of this {type(part).__name__} is replaced ({_shown(step)})"


def _shared_storage(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for first, second in overlapping(dict(model.named_parameters())):
        yield f"{first} and {second} are two parameters in one memory"


def overlapping(parameters: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the names of parameters that share memory, two at a time; a parameter with two names is one."""
    by_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.numel():
            by_storage.setdefault(storage_key(parameter), []).append(name)
    found = []
    for names in by_storage.values():
        names.sort(key=lambda name: _extent(parameters[name])[0])
        end, last = -1, ""
        for name in names:
            begin, until = _extent(parameters[name])
            if begin < end:
                found.append((last, name))
            if until > end:
                end, last = until, name
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _renormalized_embeddings(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            yield f"{name or type(module).__name__} has max_norm={module.max_norm:g}"


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook is Paceline's."""
    if isinstance(hook, BuiltinMethodType):  # a list's `append`, which notes what a backward pass reaches
        return True
    function = _function_of(hook)
    if str(getattr(function, "__module__", "")).startswith("paceline."):
        return True
    code = getattr(function, "__code__", None)  # a module of the package that runs as a process is named __main__
    return code is not None and Path(code.co_filename).is_relative_to(_PACKAGE)


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return inspect.unwrap(getattr(hook, "__func__", hook))  # a decorator such as torch.no_grad() is torch's own code


def _shown(hook: Any) -> str:
    """Return a function's name with the line of its code, where it has one."""
    function = _function_of(hook)
    name = getattr(function, "__qualname__", type(function).__name__).rpartition(".")[2]
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


EFFECTS = (
    Effect(
        _gradient_hooks,
        _WHOLE_TENSORS,
        "a rank has only a part of the gradient to call it with",
    ),
    Effect(
        _module_hooks,
        _WHOLE_TENSORS | {SHARDS},
        "gradients are not those of one process where it is called, or it is not called at all",
    ),
    Effect(
        _optimizer_hooks,
        _WHOLE_TENSORS,
        "it would see parts of parameters, or not be called",
    ),
    Effect(
        _global_optimizer_hooks,
        frozenset({ALONE}),
        "it would see parts of parameters, or gradients before they are summed",
        "register the hook on the optimizer itself (optimizer.register_step_pre_hook) and write replicate in the plan",
    ),
    Effect(
        _replaced_steps,
        _WHOLE_TENSORS,
        "it would see parts of parameters, or not be called",
    ),
    Effect(
        _shared_storage,
        frozenset({ALONE, REPLICAS}),
        "each would get a memory of its own",
        is_hook=False,
    ),
    Effect(
        _renormalized_embeddings,
        frozenset({ALONE}),
        "each rank would shorten only the rows that its own samples use",
        "train it on one rank (-n 1), or shorten all rows of the table in forward without max_norm: "
        "weight * (limit / weight.norm(dim=1, keepdim=True)).clamp(max=1)",
        is_hook=False,
    ),
)
