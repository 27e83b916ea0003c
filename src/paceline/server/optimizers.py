"""The person's optimizer, taken over by the servers: which ones they can run, and how they are built there.

Every one updates each element by that element's own history, so pieces of parameters end where whole ones do, bit for
bit; a test holds each class against itself, whole and in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.nouns.errors import PlanError

KNOWN = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # have a CPU kernel of one pass, 3 to 7 times as fast (measured)
_IMPLEMENTATION = ("foreach", "capturable", "differentiable", "fused", "params", "initial_lr")


def describe(optimizer: torch.optim.Optimizer) -> tuple[str, list[dict[str, Any]]]:
    """The class's name, and every group's settings as JSON has them.

    Raises:
        PlanError: the servers can't run it.
    """
    kind = type(optimizer)
    name = kind.__name__
    if name not in KNOWN or kind is not getattr(torch.optim, name):
        raise PlanError(
            "the servers should run the workload's optimizer",
            f"it is a {kind.__module__}.{name}, which they can't run",
            f"take one of torch.optim's {', '.join(KNOWN)}, or the axis replicate in place of server",
        )
    return name, [settings_of(group) for group in optimizer.param_groups]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers, as they are now: what a schedule changes travels with every gradient.

    Raises:
        PlanError: one is not a number.
    """
    settings = {key: _plain(value) for key, value in group.items() if key not in _IMPLEMENTATION}
    try:
        json.dumps(settings)
    except TypeError as error:
        raise PlanError(
            "the optimizer's settings should be numbers", f"one is not ({error})", "use numbers in its groups"
        ) from None
    return settings


def build(
    name: str, pieces: Sequence[torch.nn.Parameter], settings: Mapping[str, Any], implementation: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer over pieces of parameters.

    Args:
        name: one of KNOWN.
        pieces: of one segment.
        settings: of their group.
        implementation: which of torch's: {"fused": True}, or as the person asked.

    Raises:
        PlanError: `name` is none of KNOWN, or its settings are none of its.
    """
    if name not in KNOWN:
        raise PlanError(
            f"can't run the optimizer {name!r} on a server", "it is unknown there", f"take one of {', '.join(KNOWN)}"
        )
    kind: Any = getattr(torch.optim, name)
    accepted = {key: _tuples(value) for key, value in settings.items() if key in _arguments(kind)}
    try:
        return kind(list(pieces), **accepted, **implementation)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"can't make the optimizer {name} with {dict(settings)}", f"torch refuses it ({error})", "mend its settings"
        ) from None


def implementation_of(optimizer: torch.optim.Optimizer, is_deterministic: bool) -> dict[str, Any]:
    """Which of torch's implementations the servers take: the person's if it was named, or if bits must be the same."""
    asked = {key: optimizer.defaults[key] for key in ("fused", "foreach") if optimizer.defaults.get(key) is not None}
    if asked or is_deterministic or type(optimizer).__name__ not in FUSED:
        return {key: value for key, value in asked.items() if value}
    return {"fused": True}


def set_group(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], share: float) -> None:
    """Take a step's settings; the learning rate counts by its share."""
    group = optimizer.param_groups[0]
    for key, value in settings.items():
        if key in group and key != "params":
            group[key] = _tuples(value)
    if share != 1.0:
        group["lr"] = group["lr"] * share


def _arguments(kind: Any) -> set[str]:
    return set(
        kind.__init__.__code__.co_varnames[
            : kind.__init__.__code__.co_argcount + kind.__init__.__code__.co_kwonlyargcount
        ]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
