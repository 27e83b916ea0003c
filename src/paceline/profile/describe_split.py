"""What `shard`, `tensor` and `pipeline` make of a model, as JSON: found out without peers and without values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.comm.ledger import Ledger
from paceline.deferred_init.defer import CantDefer, defer
from paceline.graph.capture import Captured, skeleton
from paceline.graph.dry_run import stage_traffic
from paceline.graph.explain import explain
from paceline.graph.layout import choose_layout
from paceline.graph.placement import Split
from paceline.graph.sharding_strategies import operations
from paceline.graph.stages import assign_stages
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.schedule import STAGES_PER_RANK
from paceline.nouns.workload import Workload
from paceline.parallel.graph_model import SplitModel
from paceline.parallel.shard.blocks import find_blocks, kept_whole
from paceline.train.data import RankLoader, cut_into, open_data


def describe_split(workload: Workload, plan: Plan, tensor_rank: int = 0, data_part: int = 0) -> dict[str, Any]:
    """The layout, and for each rank of the pipeline what it holds and sends in the first step.

    Args:
        workload: whose model.
        plan: how it is split.
        tensor_rank: whose pieces: where sizes don't divide, the first ranks' are larger.
        data_part: whose part of the batch.

    Returns:
        `layout`: a line per weight (name, shape, placement, why); `ranks`: by pipeline rank `parameters` (sizes of this
        rank's pieces, those with a gradient), `frozen` (the others), `graph` (a list of ledger rows per micro-batch),
        `sends` (bytes of each message per micro-batch), `tied` (bytes sent per tied parameter); `share` (of the work
        of each stage); `stages`, `micro_batches`, `coupled`, `is_even` (every rank of `tensor` has as much of all
        weights and activations).
    """
    mesh = Mesh.parse(plan.mesh)
    form = form_of(workload)
    device = torch.device("cpu")
    loader = RankLoader(open_data("data", workload.data), workload, 0, mesh.data_size, device)
    example = loader.example()
    splits = []
    for rank in range(mesh.size("pipeline")):
        comms = _comms(mesh, {"pipeline": rank, "tensor": tensor_rank})
        split = SplitModel(form, comms["tensor"], comms["pipeline"], plan, device, stages_of_plan(plan))
        split.precision = torch.bfloat16 if workload.precision == "bf16" else None
        splits.append(split)
    captured = splits[0].decide(workload.loss, example)
    for other in splits[1:]:
        other.placements, other.assignment = splits[0].placements, splits[0].assignment
        other.everywhere, other.coupled, other.pieces = splits[0].everywhere, splits[0].coupled, splits[0].pieces
        other.written = splits[0].written
    wanted = cut_into(plan, mesh, workload)
    if splits[0].coupled and wanted and not plan.micro_batches:
        wanted = 1
    cut = dataclasses.replace(loader, pieces_wanted=wanted, rank=data_part)
    batch = next(iter(cut.training(0, cut.order(workload.batch_size).batch_at(0).stop)))
    graphs = [splits[0].capture(workload.loss, micro) for micro in batch.microbatches]
    return {
        "layout": _layout(captured, splits[0], mesh),
        "ranks": [_rank(split, graphs) for split in splits],
        "share": _shares(captured, splits[0]),
        "stages": splits[0].stages,
        "micro_batches": len(batch.microbatches),
        "coupled": splits[0].coupled,
        "is_even": all(_is_even(splits[0], graph) for graph in graphs),
    }


def describe_shards(workload: Workload, plan: Plan) -> list[dict[str, Any]]:
    """Every parameter as `shard` holds it: shape, item_bytes, dtype, group, is_trained, is_whole."""
    model = form_of(workload)
    blocks = find_blocks(model)
    whole = set(kept_whole(model, blocks))
    return [
        {
            "shape": list(parameter.shape),
            "item_bytes": parameter.itemsize,
            "dtype": str(parameter.dtype)[6:],
            "group": next((block for block in blocks if name.startswith(f"{block}.")), ""),
            "is_trained": parameter.requires_grad,
            "is_whole": name in whole,
        }
        for name, parameter in model.named_parameters()
    ]


def form_of(workload: Workload) -> torch.nn.Module:
    """The workload's model without values, in its precision."""
    try:
        model = defer(workload.model).model
    except CantDefer:
        model = workload.model()
    return skeleton(model, torch.float64 if workload.precision == "float64" else None).train()


def stages_of_plan(plan: Plan) -> int:
    """Pipeline stages altogether."""
    ranks = Mesh.parse(plan.mesh).size("pipeline")
    return ranks * (STAGES_PER_RANK[plan.schedule] if ranks > 1 else 1)


def _comms(mesh: Mesh, at: dict[str, int]) -> dict[str, AxisComm]:
    return {axis: AxisComm(axis, at.get(axis, 0), tuple(range(mesh.size(axis))), None, Ledger()) for axis in AXES}


def _layout(captured: Captured, split: SplitModel, mesh: Mesh) -> list[dict[str, Any]]:
    if mesh.size("tensor") == 1:
        return []
    layout = choose_layout(captured, mesh.size("tensor"), split.placements, split.plan.sequence == "on")
    return [dataclasses.asdict(line) for line in explain(captured, layout, mesh.size("tensor"))]


def _rank(split: SplitModel, graphs: list[Captured]) -> dict[str, Any]:
    rows, sends = [], []
    for graph in graphs:
        captured, stages = split.stages_of(graph)
        shapes = split.local_shapes(captured)
        ledger = Ledger()
        messages = []
        for index in split.own_stages:
            pieces = stages[index * split.pieces : (index + 1) * split.pieces]
            for piece in pieces:
                one = stage_traffic(piece, captured, shapes, [split.tensor], split.recompute, split.precision)
                ledger.calls.update(one.calls)
                ledger.payload_bytes.update(one.payload_bytes)
            messages += [value.nbytes for value in pieces[-1].sent]
            flows = zip(pieces[0].received, pieces[0].has_gradient, strict=True)
            messages += [value.nbytes for value, is_flowing in flows if is_flowing]
        rows.append(ledger.rows())
        sends.append(messages)
    held: list[dict[str, Any]] = []
    frozen: list[dict[str, Any]] = []
    tied: list[int] = []
    for name, parameter in split.form.named_parameters():
        if not split.owns(name):
            continue
        shape = split.shard_spec(name).local_shape
        numel = torch.Size(shape).numel()
        (held if parameter.requires_grad else frozen).append(
            {
                "name": name,
                "shape": list(shape),
                "dtype": str(parameter.dtype)[6:],
                "numel": numel,
                "item_bytes": parameter.itemsize,
            }
        )
        if not parameter.requires_grad:
            continue
        holders = {stage % split.pipeline.size for stage in split.owners(name)}
        tied += [(numel + 1) * parameter.itemsize] * (len(holders) - 1)
    return {"parameters": held, "frozen": frozen, "graph": rows, "sends": sends, "tied": tied}


def _is_even(split: SplitModel, graph: Captured) -> bool:
    """Whether every rank of `tensor` computes and exchanges pieces of the same sizes."""
    parts = split.tensor.size
    if parts == 1:
        return True
    captured, _ = split.stages_of(graph)
    placements: list[Any] = list(split.placements.values())
    for node in captured.graph.nodes:
        lies = node.meta.get("lies")
        placements += lies if isinstance(lies, tuple) else [lies]
        if hasattr(node.target, "__self__"):  # an exchange: what it converts to is among its arguments
            placements += [Split(*argument) for argument in node.args if _is_pieces(argument)]
    return all(placement is None or placement.is_even(parts) for placement in placements)


def _is_pieces(argument: Any) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[1], tuple)


def _shares(captured: Captured, split: SplitModel) -> list[float]:
    """The share of the work that each stage does."""
    work = [0.0] * split.stages
    for node, piece in assign_stages(captured, split.stages * split.pieces, split.assignment).items():
        work[piece // split.pieces] += operations(node)
    total = sum(work) or 1.0
    return [round(amount / total, 4) for amount in work]
