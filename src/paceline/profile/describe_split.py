"""Describe as JSON how the axes that split a graph split a model, without peers and without values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.deferred_init.defer import CantDefer, defer
from paceline.graph.capture import Captured
from paceline.graph.expert.expert_layout import describe_experts
from paceline.graph.skeleton import skeleton
from paceline.graph.stages import assign_stages
from paceline.graph.tensor.choices import operations
from paceline.graph.tensor.explain import explain
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.graph_model import SplitModel
from paceline.train.data import cut_into, cut_without_changing, open_data, rank_loader
from paceline.train.parallelize import split_model


def describe_split(workload: Workload, plan: Plan) -> dict[str, Any]:
    """Return the layout, and what each rank of the pipeline holds.

    Args:
        workload: the workload whose model is split.
        plan: the plan with the axes that split it.

    Returns:
        `layout`: a row per weight (name, shape, placement, why); `attention`: how `context` shares each; `experts`:
        how `expert` spreads each layer; `gathered`: the operations that run whole under these two; `held`: by
        pipeline rank the bytes of its shards of parameters, on the first rank of the other axes, which has most where
        sizes don't divide; `share` (of the work of each stage); `micro_batches`; `coupled` (where samples meet).
    """
    mesh = Mesh.parse(plan.mesh)
    form = form_of(workload)
    device = torch.device("cpu")
    loader = rank_loader(open_data("data", workload.data), workload, (0, mesh.data_size), device)
    splits = []
    for rank in range(mesh.size("pipeline")):
        comms = comms_without_groups(mesh, {"pipeline": rank}, Ledger())
        splits.append(split_model(workload, form, comms, plan, device))
    first = splits[0]
    captured = first.decide(workload.loss, loader.example())
    for split in splits[1:]:
        split.copy_decisions(first)
    micro_batches = cut_without_changing(plan, cut_into(plan, mesh, workload), first.coupled)
    loader = dataclasses.replace(loader, micro_batches_wanted=micro_batches)
    batch = next(iter(loader.training(0, loader.order(workload.batch_size).batch_at(0).stop)))
    return {
        "layout": _layout(captured, first, mesh),
        **_sequences(captured, first),
        "held": [_held_bytes(split) for split in splits],
        "share": _shares(captured, first),
        "micro_batches": len(batch.microbatches),
        "coupled": first.coupled,
    }


def form_of(workload: Workload) -> torch.nn.Module:
    """Return the workload's model without values, in its precision."""
    try:
        model = defer(workload.model).model
    except CantDefer:
        model = workload.model()
    dtype = torch.float64 if workload.precision == "float64" else None
    return skeleton(model, dtype).train()


def comms_without_groups(mesh: Mesh, at: Mapping[str, int], ledger: Ledger) -> dict[str, AxisComm]:
    """Return an AxisComm for each axis without a process group: graphs are only dry-run."""
    return {axis: AxisComm(axis, at.get(axis, 0), tuple(range(mesh.size(axis))), None, ledger) for axis in AXES}


def _layout(captured: Captured, split: SplitModel, mesh: Mesh) -> list[dict[str, Any]]:
    """Return a line per weight: name, shape, placement, why."""
    ranks = mesh.size("tensor")
    if ranks == 1:
        return []
    captured = split.of_first_rank(captured, "tensor")
    layout = split.tensor_layout(captured)
    return [dataclasses.asdict(line) for line in explain(captured, layout, ranks)]


def _sequences(captured: Captured, split: SplitModel) -> dict[str, Any]:
    """Return the spread of attention and experts, and how often each operation runs whole on every rank."""
    attention: list[dict[str, Any]] = []
    gathered: Counter[str] = Counter()
    if split.context is not None:
        layout = split.sequence_layout(captured)
        attention = [dataclasses.asdict(found) for found in layout.found]
        gathered.update(layout.gathered)
    experts: list[dict[str, Any]] = []
    if split.expert is not None:
        captured = split.of_first_rank(captured, "expert")
        spread = split.expert_layout(captured)
        experts = [dataclasses.asdict(line) for line in describe_experts(captured, spread, split.expert.size)]
        gathered.update(spread.gathered)
    return {"attention": attention, "experts": experts, "gathered": dict(gathered)}


def _held_bytes(split: SplitModel) -> int:
    """Return the bytes of a rank's shards of parameters."""
    nbytes = 0
    for name, parameter in split.form.named_parameters():
        if split.owns(name):
            nbytes += torch.Size(split.shard_spec(name).local_shape).numel() * parameter.itemsize
    return nbytes


def _shares(captured: Captured, split: SplitModel) -> list[float]:
    """Return the share of the work that each stage does."""
    work = [0.0] * split.stages
    for node, part in assign_stages(captured, split.stages * split.segments, split.assignment).items():
        work[part // split.segments] += operations(node)
    total = sum(work) or 1.0  # a loss without operations that count
    return [round(amount / total, 4) for amount in work]
