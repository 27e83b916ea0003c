"""Read a model's own tensor plan, as transformers ships it (`model.tp_plan`): the layout starts from its placements."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch

from paceline.graph.capture import Captured
from paceline.graph.placement import Placement, Split
from paceline.graph.reshape_rules import shape_of

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_rep")


def own_plan(model: torch.nn.Module, captured: Captured, num_ranks: int) -> dict[str, Placement]:
    """Return the placements of weights that the model's own plan names, where their sizes divide."""
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    placements: dict[str, Placement] = {}
    for name, node in captured.states.items():
        module, _, kind = name.rpartition(".")
        shape = shape_of(node)
        dim = _dim(_style_of(module, plan), kind)
        # Uneven pieces are left to the derived layout.
        if dim is not None and dim < len(shape) and shape[dim] % num_ranks == 0:
            placements[name] = Split(dim, (shape[dim],))
    return placements


def _style_of(module: str, plan: Mapping[str, Any]) -> Any:
    """Return the style of the first pattern that a module's path matches, or None."""
    for pattern, style in plan.items():
        if fnmatch.fnmatchcase(module, pattern):
            return style
    return None


def _dim(style: Any, kind: str) -> int | None:
    """Return the dimension of a linear layer's "weight" or "bias" that a style splits."""
    if style in _COLUMNS:
        return 0
    if style in _ROWS and kind == "weight":  # its bias is added once, after the sum
        return 1
    return None
