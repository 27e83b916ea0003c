"""Describe the user's optimizer on a worker, and build it on a server over pieces of parameters.

Every one updates each element by that element's own history, so pieces of parameters end where whole ones do, bit for
bit; a test holds each class against itself, whole and in pieces.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.nouns.errors import PlanError
from paceline.nouns.reading import shown

KNOWN = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # have a CPU kernel of one pass, 3 to 7 times as fast (measured)
# Keys of a group that say how torch computes, not what.
_IMPLEMENTATION = ("foreach", "capturable", "differentiable", "fused")
_MOST = 2**63  # a whole number beyond is sent as a float


def describe(optimizer: torch.optim.Optimizer) -> tuple[str, list[dict[str, Any]]]:
    """Return the class's name, and every group's settings as JSON has them.

    Raises:
        PlanError: the servers can't run it.
    """
    kind = type(optimizer)
    name = kind.__name__
    # The very class: a subclass of the same name may update by more than an element's own history.
    if name not in KNOWN or kind is not getattr(torch.optim, name):
        raise PlanError(
            "the servers should run the workload's optimizer",
            f"it is a {kind.__module__}.{name}, which they can't run",
            f"take one of torch.optim's {', '.join(KNOWN)}, or an axis in place of server: replicate runs any "
            "optimizer, shard and tensor run those that update each parameter by itself",
        )
    return name, [settings_of(optimizer, group) for group in optimizer.param_groups]


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, object]) -> dict[str, Any]:
    """Return a group's numbers as they are now: what a schedule changes is sent with every gradient.

    Keys that the class does not read, such as a name or a scheduler's `initial_lr`, stay with the worker.

    Raises:
        PlanError: one that it reads is not a number, and no tuple of numbers.
    """
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key not in optimizer.defaults or key in _IMPLEMENTATION:
            continue
        try:
            settings[key] = [_number(item) for item in value] if isinstance(value, list | tuple) else _number(value)
        except TypeError as error:
            raise PlanError(
                f"the servers should know {key!r} of the optimizer {type(optimizer).__name__}",
                f"a group of it has {error}, which is no number",
                "give the group a number (or a tuple of numbers, as for betas), or write replicate for server",
            ) from None
    return settings


def build(
    name: str,
    pieces: Sequence[torch.nn.Parameter],
    settings: Mapping[str, object],
    implementation: Mapping[str, object],
) -> torch.optim.Optimizer:
    """Return the optimizer over pieces of parameters.

    Args:
        name: the optimizer's name, one of KNOWN.
        pieces: the pieces of one segment.
        settings: the settings of their group.
        implementation: the options that choose torch's implementation: {"fused": True}, or as the user asked.

    Raises:
        PlanError: `name` is none of KNOWN, or its settings are none of its.
    """
    if name not in KNOWN:
        raise PlanError(
            f"can't run the optimizer {name!r} on a server", "it is unknown there", f"take one of {', '.join(KNOWN)}"
        )
    kind: Any = getattr(torch.optim, name)
    arguments = _arguments(kind)
    # A scheduler or a user may have put other keys into the group.
    accepted = {key: _tuples(value) for key, value in settings.items() if key in arguments}
    try:
        return kind(list(pieces), **accepted, **implementation)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"can't make the optimizer {name} with {dict(settings)}", f"torch refuses it ({error})", "mend its settings"
        ) from None


def implementation_of(optimizer: torch.optim.Optimizer, is_deterministic: bool) -> dict[str, Any]:
    """Return the options that choose torch's implementation, for the servers.

    It is the user's if one was named, or if the bits must be the same; else the fused one, where there is one.
    """
    asked: dict[str, Any] = {}
    # torch's default is None: it then chooses by itself.
    for key in ("fused", "foreach"):
        value = optimizer.defaults.get(key)
        if value is not None:
            asked[key] = value
    if asked or is_deterministic or type(optimizer).__name__ not in FUSED:
        return {key: value for key, value in asked.items() if value}
    return {"fused": True}


def set_group(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], share: float) -> None:
    """Set a step's settings; the learning rate is multiplied by its share."""
    group = optimizer.param_groups[0]
    for key, value in settings.items():
        if key in group and key != "params":
            group[key] = _tuples(value)
    if share != 1.0:
        group["lr"] = group["lr"] * share


def _arguments(kind: Any) -> set[str]:
    """Return the names of a class's arguments."""
    code = kind.__init__.__code__
    count = code.co_argcount + code.co_kwonlyargcount  # co_varnames has the other local variables after them
    return set(code.co_varnames[:count])


def _number(value: object) -> bool | int | float | None:
    """Return a setting as a number of Python's own.

    Raises:
        TypeError: it is none; the message shows it.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number) < _MOST else float(number)
    if isinstance(value, numbers.Real):  # such as numpy's
        return float(value)
    raise TypeError(shown(value))


def _tuples(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
