"""Describe a model's sizes as JSON, for commands that start without torch.

The model is made on the meta device, so that no weights are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.comm.dtypes import widen
from paceline.launch.simulators import ranks_to_profile
from paceline.nouns.mesh import GRAPH_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload, too_small_batch
from paceline.parallel.optimizer_list import as_one, check_servers_can_run
from paceline.parallel.replicate.replicate_strategy import sparse_names
from paceline.profile.simulate import Rows, made_without_values, step_traffic
from paceline.train.data import no_data


def describe(workload: Workload, plan: Plan | None = None) -> dict[str, Any]:
    """Return names, shapes and dtypes of everything the model holds; under a plan, also what its axes make of it.

    Args:
        workload: the workload whose model is described.
        plan: a plan with `tensor`, `context`, `expert`, `pipeline` or `server`; only its split is described.

    Raises:
        WorkloadError: its data is None, so that nothing is known of its batches; or a rank would have no sample.
        PlanError: the model can't be split so, or the servers can't run the optimizer.
    """
    if workload.data is None:
        raise no_data()
    plan = plan or Plan()
    mesh = Mesh.parse(plan.mesh)
    if workload.batch_size < mesh.data_size:
        raise too_small_batch(workload.batch_size, mesh.data_size)
    model = made_without_values(workload)
    if workload.precision == "float64":
        model = widen(model)
    description: dict[str, Any] = {
        "parameters": [
            _sizes(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ],
        # These get no gradients, so nothing of them is summed; `shard` and `tensor` still hold and gather them.
        "frozen": [
            _sizes(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad
        ],
        "buffers": [_sizes(name, buffer) for name, buffer in model.named_buffers()],
        "is_sparse": bool(sparse_names(model)),
        "batch_size": workload.batch_size,
        "micro_batch_size": workload.micro_batch_size,
    }
    if plan.server:
        description["ranges"] = _servers(workload, model, plan)
    if mesh.used(GRAPH_AXES):
        from paceline.profile.describe_split import describe_split

        description["split"] = describe_split(workload, plan)
    return description


def _servers(workload: Workload, model: torch.nn.Module, plan: Plan) -> list[list[int]]:
    """Return the bytes of each segment, by the range of parameters that a server keeps.

    Raises:
        PlanError: the servers can't run the optimizer.
    """
    from paceline.server.handle import laid_out

    optimizer = as_one(workload.optimizer(model))
    check_servers_can_run(optimizer)
    _, layout, *_ = laid_out(model, optimizer, 0)
    ranges = []
    for segments in layout.ranges(plan.server):
        ranges.append([segment.nbytes for segment in segments])
    return ranges


def stages_traffic(workload: Workload, plan: Plan, model: Mapping[str, Any]) -> list[Rows] | None:
    """Return the traffic of a rank of each pipeline stage in the first step; None where it depends on the data.

    Args:
        workload: the workload that is trained.
        plan: the mesh and options under which it is trained.
        model: the description of its model under the plan.
    """
    if depends_on_data(plan, model):
        return None
    return [step_traffic(workload, plan, rank) for rank in ranks_to_profile(plan)]


def depends_on_data(plan: Plan, model: Mapping[str, Any]) -> bool:
    """Return whether the values in a batch decide how much a step sends."""
    mesh = Mesh.parse(plan.mesh)
    if plan.server or mesh.world_size == 1:
        return False
    # `tensor` sums rows of experts, of which there are as many as the router sends.
    has_routed_sums = mesh.size("expert") > 1 and mesh.size("tensor") > 1
    return model["is_sparse"] or plan.compression in ("topk", "powersgd") or has_routed_sums


def _sizes(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "numel": tensor.numel(),
        "item_bytes": tensor.dtype.itemsize,
    }
