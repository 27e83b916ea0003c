"""Check that each option of a plan has an effect: under its axes, or with parameter servers.

An option that has no effect is refused. Naming its axis with size 1 is enough, so that one line serves any number of
ranks: then the option is left out of the plan, and the command says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import GRAPH_AXES, Mesh


@dataclass(frozen=True, slots=True)
class Scope:
    """The plans in which an option has an effect.

    Args:
        axes: the axes of which the option needs one; none: any plan will do.
        neutral: the values that ask for nothing, and may stand in any plan.
        beside_split: the values that it can have where tensor or pipeline splits the model too; None: any.
        of_servers: True where it needs parameter servers, and no axis.
    """

    axes: tuple[str, ...] = ()
    neutral: tuple[Any, ...] = ()
    beside_split: tuple[Any, ...] | None = None
    of_servers: bool = False


SCOPES = {
    "zero": Scope(("shard",), beside_split=(1,)),
    "offload": Scope(("shard",), neutral=("off",), beside_split=("off",)),
    "optimizer_states": Scope(neutral=("full",)),
    "sequence": Scope(("tensor",), neutral=("off",)),
    "context_by": Scope(("context",), neutral=("auto",)),
    "schedule": Scope(("pipeline",)),
    "micro_batches": Scope(("pipeline",), neutral=(0,)),
    "checkpointing": Scope(),
    "compile": Scope(),
    "float8": Scope(neutral=("off",)),
    "check": Scope(neutral=("on",)),
    "server": Scope(),
    "mode": Scope(of_servers=True),
    "quorum": Scope(of_servers=True, neutral=(0,)),
    "staleness": Scope(of_servers=True, neutral=(0,)),
    "deadline": Scope(of_servers=True, neutral=(0,)),
    "replicas": Scope(of_servers=True),
    "transport": Scope(("replicate", "expert", "context"), neutral=("auto",)),
    "compression": Scope(("replicate", "shard", "expert", "context"), neutral=("none",)),
    "bucket_bytes": Scope(("replicate", "expert", "context")),
    "checkpoint_every": Scope(),
    "keep": Scope(),
    "copy_to": Scope(neutral=("",)),
}


def check_options(options: Mapping[str, Any], mesh: Mesh, named: set[str], servers: int) -> None:
    """Raise PlanError where an option of a plan has no effect.

    Args:
        options: the values of the options that the user wrote, by name.
        mesh: the mesh of the plan.
        named: the axes that the plan names, with any size.
        servers: the plan's number of parameter servers.
    """
    for name, value in options.items():
        scope = SCOPES[name]
        if value in scope.neutral:
            continue
        if scope.of_servers and not servers:
            raise PlanError(f"the plan's {name}={value}", "it has no servers", f"add server=2, or leave {name} out")
        if name == "replicas" and value > servers:
            raise PlanError(
                f"the plan's replicas={value}",
                f"each is a server of its own, and it has {servers}",
                f"write server={value}, or replicas={servers}",
            )
        if scope.axes and not named & {*_axes_of(scope, options, mesh)}:
            raise _without_axis(name, value, scope)
        _check_beside_split(name, value, mesh)


def _without_axis(name: str, value: object, scope: Scope) -> PlanError:
    axis = scope.axes[0]
    return PlanError(
        f"the plan's {name}={value}",
        f"it changes nothing without the axis {' or '.join(scope.axes)}, and the plan does not name it",
        f"add {axis}=N to the plan, such as {axis}=2, or leave {name} out",
    )


def _check_beside_split(name: str, value: object, mesh: Mesh) -> None:
    """Raise PlanError where tensor or pipeline leaves an option of `shard` without effect."""
    beside = mesh.used(GRAPH_AXES)
    scope = SCOPES[name]
    if not beside:
        return
    if scope.beside_split is not None and mesh.size("shard") > 1 and value not in scope.beside_split:
        raise PlanError(
            f"the plan's {name}={value} beside {beside[0]}",
            "there shard splits optimizer state on the rank's device (zero=1), and nothing else",
            f"leave {name} out, or leave {beside[0]} out",
        )


def without_effect(options: Mapping[str, object], mesh: Mesh) -> Iterator[str]:
    """Yield the names of options that change nothing because their axes have size 1.

    Args:
        options: the values of options, or the words for them, by name; other names are passed over.
        mesh: the mesh of the plan.
    """
    for name, value in options.items():
        scope = SCOPES.get(name, Scope())
        if not scope.axes or str(value) in [str(neutral) for neutral in scope.neutral]:
            continue
        if all(mesh.size(axis) == 1 for axis in _axes_of(scope, options, mesh)):
            yield name


def _axes_of(scope: Scope, options: Mapping[str, Any], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of which an option needs one: `shard` with zero=1 sums gradients as `replicate` does."""
    is_summed = str(options.get("zero")) == "1" or bool(mesh.used(GRAPH_AXES))
    return (*scope.axes, "shard") if "replicate" in scope.axes and is_summed else scope.axes


def check_torchao(name: str, value: str) -> None:
    """Raise PlanError where an option's value needs torchao, which is not installed.

    Args:
        name: the name of the option.
        value: the value of the option.
    """
    if importlib.util.find_spec("torchao") is None:
        raise PlanError(
            f"the plan's {name}={value}", "the package torchao is not installed", "pip install 'paceline[lowbits]'"
        )
