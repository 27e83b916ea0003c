"""Choose the plan that a command line asks for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.copies import check_url
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import AXES, SHORT, Mesh
from paceline.nouns.options import without_effect
from paceline.nouns.plan import OPTIONS, SHORT_OPTIONS, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The plan that the user asks for.

    Args:
        ranks: the number of ranks of the job; None: as many as the plan covers.
        text: the axes with sizes and options, or the path of a plan.json; "": replicate over the ranks.
        checkpoint_every, keep, copy_to, check: the values in place of those in the plan; None: as the plan has it.
    """

    ranks: int | None = None
    text: str = ""
    checkpoint_every: int | None = None
    keep: int | None = None
    copy_to: str | None = None
    check: str | None = None

    def with_ranks(self, ranks: int | None) -> PlanRequest:
        """Return the same request for so many ranks, unless it has a number itself."""
        return dataclasses.replace(self, ranks=self.ranks or ranks)


def choose_plan(request: PlanRequest, notice: Callable[[str], None], grows: bool = False) -> Plan:
    """Return the plan that is asked for.

    Args:
        request: the request of the command.
        notice: a function that is called for options that change nothing, because their axis has size 1.
        grows: True if the number of ranks follows from the hosts that there are, and may change.

    Raises:
        UsageError: there is no rank, the plan is a folder, or no copies can go to `copy_to`.
        MeshError: the mesh names no axis, or does not cover the ranks.
        PlanError: a value is none that a plan can have, or an option has no effect under the plan's axes.
    """
    _check(request)
    text = _with_ranks(request.text, 1 if grows else request.ranks)
    is_file = text.endswith(".json")
    plan = Plan.read(Path(text)) if is_file else Plan.parse(text or "replicate=1")
    mesh = Mesh.parse(plan.mesh)
    mesh.check_fits(request.ranks or mesh.world_size)
    changes: dict[str, Any] = {}
    if request.checkpoint_every is not None:
        changes["checkpoint_every"] = request.checkpoint_every
    if request.keep is not None:
        changes["keep"] = request.keep
    if request.copy_to is not None:
        changes["copy_to"] = request.copy_to.rstrip("/")
    if request.check is not None:
        changes["check"] = request.check
    plan = dataclasses.replace(plan, **changes, mesh=str(mesh))
    if plan.copy_to:
        check_url(plan.copy_to, "--copy-to")
    if not grows:
        options = dict(item.strip().partition("=")[::2] for item in text.split(","))
        for name in without_effect(options, mesh):
            notice(f"paceline: {name} changes nothing here: the axis it is about has size 1")
    return plan.settled()


def _check(request: PlanRequest) -> None:
    if request.ranks is not None and request.ranks < 1:
        raise UsageError(f"can't start {request.ranks} ranks", "a job has at least one", "write -n 1 or more")
    may_be_axes = "=" in (request.text or "=")
    if not may_be_axes and os.path.isdir(request.text):  # False, not an error, for what is longer than a path can be
        fix = "name the plan.json in it, or axes with sizes such as replicate=2"
        raise UsageError(f"can't read the plan {request.text}", "it is a folder", fix)


def says_ranks(text: str) -> bool:
    """Return True if a plan says how many ranks it covers: it names an axis, or is a file."""
    return text.endswith(".json") or not _names(text).isdisjoint({*AXES, *SHORT})


def _names(text: str) -> set[str]:
    return {item.partition("=")[0].strip() for item in text.split(",")}


def _with_ranks(text: str, ranks: int | None) -> str:
    """Return the plan, with the ranks of -n, or the workers of servers, where it names no axis."""
    # `-n 4 --plan server=2` means four workers: the axis is left out, so -n says its size.
    is_unknown = bool(_names(text) - {"", *OPTIONS, *SHORT_OPTIONS})  # an error then quotes what was written
    if not ranks or says_ranks(text) or is_unknown:
        return text
    return f"replicate={ranks},{text}" if text else f"replicate={ranks}"
