"""Describe what the parameter servers of a plan hold."""

from __future__ import annotations

from typing import Any

import torch

from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.optimizer_list import as_one, check_servers_can_run


def describe_servers(workload: Workload, model: torch.nn.Module, plan: Plan | None) -> dict[str, Any]:
    """Return `ranges`: the bytes of each segment, by the range of parameters that a server keeps; {} without servers.

    Raises:
        PlanError: the servers can't run the optimizer.
    """
    if plan is None or not plan.server:
        return {}
    from paceline.server.handle import laid_out

    optimizer = as_one(workload.optimizer(model))
    check_servers_can_run(optimizer)
    _, layout, *_ = laid_out(model, optimizer, 0)
    return {"ranges": [[segment.nbytes for segment in segments] for segments in layout.ranges(plan.server)]}
