"""A model's own tensor plan, as transformers ships it (`model.tp_plan`), as placements that the layout starts from."""

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


def own_plan(model: torch.nn.Module, captured: Captured, parts: int) -> dict[str, Placement]:
    """The placements of weights that the model's own plan names, where their sizes divide; empty without one."""
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    placements: dict[str, Placement] = {}
    for name, node in captured.states.items():
        module, _, kind = name.rpartition(".")
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(module, pattern)), None)
        shape = shape_of(node)
        dim = _dim(style, kind)
        if dim is not None and dim < len(shape) and shape[dim] % parts == 0:
            placements[name] = Split(dim, (shape[dim],))
    return placements


def _dim(style: Any, kind: str) -> int | None:
    if style in _COLUMNS:
        return 0
    return 1 if style in _ROWS and kind == "weight" else None
