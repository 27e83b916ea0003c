"""Describe as JSON what `shard`, `tensor` and `pipeline` make of a model, without peers and without values."""

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
from paceline.graph.dry_run import stage_traffic
from paceline.graph.expert_layout import describe_experts
from paceline.graph.explain import explain
from paceline.graph.layout import choose_layout
from paceline.graph.placement import Split
from paceline.graph.sharding_strategies import operations
from paceline.graph.skeleton import skeleton
from paceline.graph.stages import assign_stages
from paceline.nouns.mesh import AXES, CUTTING_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import Cut, ShardSpec
from paceline.nouns.workload import Workload
from paceline.parallel.elementwise import find_whole_parameters
from paceline.parallel.graph_adapter import check_whole_experts, cut_parameters
from paceline.parallel.graph_model import SplitModel
from paceline.parallel.low_precision_states import CutOf, with_low_precision
from paceline.parallel.optimizer_list import as_one
from paceline.parallel.shard.blocks import find_blocks, kept_whole
from paceline.parallel.whole_update import CutParameter, assign_owners
from paceline.train.compiler_import import defer_compiler_import
from paceline.train.data import cut_into, cut_without_changing, open_data
from paceline.train.parallelize import split_model
from paceline.train.stream_loader import rank_loader

Owners = dict[str, dict[str, int]]  # of what the optimizer updates whole, the owner's index on each axis that cuts it


def describe_split(workload: Workload, plan: Plan, place: int = 0, data_part: int = 0) -> tuple[dict[str, Any], Owners]:
    """Return the layout, and for each rank of the pipeline what it holds and sends in the first step.

    Args:
        workload: whose model.
        plan: how it is split.
        place: whose pieces, which rank of `expert` times `context` times `tensor`: where sizes don't divide, the first
            ranks' are larger.
        data_part: whose part of the batch.

    Returns:
        `layout`: a line per weight (name, shape, placement, why); `attention`: how `context` shares each; `experts`:
        how `expert` spreads each layer; `gathered`: what runs whole under these two; `ranks`: by pipeline rank
        `parameters` (sizes of this rank's pieces, those with a gradient), `frozen` (the others), `graph` (a list of
        ledger rows per micro-batch), `sends` (bytes of each message per micro-batch), `tied` (bytes sent per tied
        parameter); `share` (of the work of each stage); `stages`, `micro_batches`, `coupled`, `is_even` (every rank of
        `tensor` has as much of all weights and activations). And the owners of what the optimizer updates whole.
    """
    mesh = Mesh.parse(plan.mesh)
    form = form_of(workload)
    device = torch.device("cpu")
    loader = rank_loader(open_data("data", workload.data), workload, (0, mesh.data_size), device)
    example = loader.example()
    splits = []
    for rank in range(mesh.size("pipeline")):
        at = {"pipeline": rank, **mesh.at_place(place)}
        comms = comms_without_groups(mesh, at, Ledger())
        splits.append(split_model(workload, form, comms, plan, device))
    first = splits[0]
    captured = first.decide(workload.loss, example)
    for split in splits[1:]:
        split.copy_decisions(first)
    micro_batches = cut_without_changing(plan, cut_into(plan, mesh, workload), first.coupled)
    loader = dataclasses.replace(loader, pieces_wanted=micro_batches, rank=data_part)
    batch = next(iter(loader.training(0, loader.order(workload.batch_size).batch_at(0).stop)))
    graphs = [first.capture(workload.loss, micro_batch) for micro_batch in batch.microbatches]
    # `shard` cuts by rows: of which rank is of no matter for the owners.
    names = _updated_whole(workload, form, plan)
    check_whole_experts(first, names)
    whole = cut_parameters(first, comms_without_groups(mesh, {}, Ledger())["shard"], names)
    description = {
        "layout": _layout(captured, first, mesh),
        **_sequences(captured, first),
        "ranks": [_describe_rank(split, graphs) for split in splits],
        "share": _shares(captured, first),
        "stages": first.stages,
        "micro_batches": len(batch.microbatches),
        "coupled": first.coupled,
        "is_even": all(_is_even(first, graph) for graph in graphs),
    }
    return description, assign_owners(whole, mesh)


def describe_shards(workload: Workload, plan: Plan) -> tuple[list[dict[str, Any]], Owners]:
    """Return every parameter as `shard` holds it: shape, item_bytes, dtype, group, is_trained, is_whole.

    And the owners of what the optimizer updates whole.
    """
    mesh = Mesh.parse(plan.mesh)
    model = form_of(workload)
    blocks = find_blocks(model)
    unsharded = set(kept_whole(model, blocks))
    shards = []
    for name, parameter in model.named_parameters():
        group = next((block for block in blocks if name.startswith(f"{block}.")), "")
        shards.append(
            {
                "shape": list(parameter.shape),
                "item_bytes": parameter.itemsize,
                "dtype": _dtype_name(parameter),
                "group": group,
                "is_trained": parameter.requires_grad,
                "is_whole": name in unsharded,
            }
        )
    whole: dict[str, CutParameter] = {}
    specs: dict[torch.nn.Parameter, ShardSpec] = {}
    for name, parameter in model.named_parameters():
        if name not in unsharded:
            shape = tuple(parameter.shape)
            specs[parameter] = ShardSpec(shape, (Cut(0, (shape[0],), 0, mesh.size("shard")),))
    names = _updated_whole(workload, model, plan, specs.get) - unsharded
    for name, parameter in model.named_parameters():
        if name in names:
            shape = tuple(parameter.shape)
            whole[name] = CutParameter(shape, {"shard": Cut(0, (shape[0],), 0, mesh.size("shard"))})
    return shards, assign_owners(whole, mesh)


def _updated_whole(workload: Workload, model: torch.nn.Module, plan: Plan, cut_of: CutOf | None = None) -> set[str]:
    """Return the parameters that the optimizer can't update in parts.

    Args:
        workload: makes the optimizer.
        model: without values.
        plan: its mesh and options.
        cut_of: as `find_whole_parameters` takes it.

    Raises:
        PlanError: it can't be used where axes cut parameters.
    """
    axes = Mesh.parse(plan.mesh).used(CUTTING_AXES)[::-1]
    if not axes:
        return set()
    defer_compiler_import()
    try:
        optimizer = as_one(workload.optimizer(model))
    except (RuntimeError, NotImplementedError):  # it reads values, which the model has not: most work on parts
        return set()
    whole = find_whole_parameters(with_low_precision(optimizer, plan.optimizer_states), axes, cut_of)
    return {name for name, parameter in model.named_parameters() if parameter in whole and parameter.requires_grad}


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
    captured = split.as_first_place(captured)
    layout = choose_layout(captured, ranks, split.placements, split.plan.sequence == "on")
    return [dataclasses.asdict(line) for line in explain(captured, layout, ranks)]


def _sequences(captured: Captured, split: SplitModel) -> dict[str, Any]:
    """Return how `context` and `expert` spread what they split, and how often an operation runs whole on every rank."""
    attention: list[dict[str, Any]] = []
    gathered: Counter[str] = Counter()
    if split.context is not None:
        layout = split.sequence_layout(captured)
        attention = [dataclasses.asdict(found) for found in layout.found]
        gathered.update(layout.gathered)
    experts: list[dict[str, Any]] = []
    if split.expert is not None:
        captured = split.of_first_positions(captured)
        spread = split.expert_layout(captured)
        experts = [dataclasses.asdict(line) for line in describe_experts(captured, spread, split.expert.size)]
        gathered.update(spread.gathered)
    return {"attention": attention, "experts": experts, "gathered": dict(gathered)}


def _describe_rank(split: SplitModel, graphs: list[Captured]) -> dict[str, Any]:
    """Return what a rank of the pipeline holds, and what it sends for each micro-batch's graph."""
    ledgers, sends = [], []
    for graph in graphs:
        ledger, messages = _traffic(split, graph)
        ledgers.append(ledger.rows())
        sends.append(messages)
    return {**_held(split), "graph": ledgers, "sends": sends}


def _traffic(split: SplitModel, graph: Captured) -> tuple[Ledger, list[int]]:
    """Return what a rank's stages do for one micro-batch, and the bytes of its messages to other stages."""
    captured, stages = split.stages_of(graph)
    shapes = split.local_shapes(captured)
    ledger = Ledger()  # of all stages of this rank, of which `interleaved` has several
    messages = []
    for index in split.own_stages:
        pieces = stages[index * split.pieces : (index + 1) * split.pieces]
        for piece in pieces:
            stage = stage_traffic(piece, captured, shapes, split.comms, split.recompute, split.precision)
            ledger.calls.update(stage.calls)
            ledger.payload_bytes.update(stage.payload_bytes)
        messages += [value.nbytes for value in pieces[-1].sent]  # to the next stage
        # Backward, the gradients of what came in go the other way.
        received = zip(pieces[0].received, pieces[0].has_gradient, strict=True)
        messages += [value.nbytes for value, has_gradient in received if has_gradient]
    return ledger, messages


def _held(split: SplitModel) -> dict[str, Any]:
    """Return the sizes of a rank's pieces of parameters, and the bytes that it sends per tied parameter."""
    parameters: list[dict[str, Any]] = []
    frozen: list[dict[str, Any]] = []
    tied: list[int] = []
    for name, parameter in split.form.named_parameters():
        if not split.owns(name):
            continue
        shape = split.shard_spec(name).local_shape
        numel = torch.Size(shape).numel()
        sizes = {
            "name": name,
            "shape": list(shape),
            "dtype": _dtype_name(parameter),
            "numel": numel,
            "item_bytes": parameter.itemsize,
            "is_of_experts": name in split.of_experts,
        }
        if not parameter.requires_grad:
            frozen.append(sizes)
            continue
        parameters.append(sizes)
        # A tied weight is on several stages; each rank that has one sends its gradient to the others.
        holders = {stage % split.pipeline.size for stage in split.owners(name)}
        # To each other holder go the gradient and one number that says whether there is one.
        tied += [(numel + 1) * parameter.itemsize] * (len(holders) - 1)
    return {"parameters": parameters, "frozen": frozen, "tied": tied}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_even(split: SplitModel, graph: Captured) -> bool:
    """True if every rank of `tensor` computes and exchanges pieces of the same sizes."""
    ranks = split.tensor.size
    if split.context is not None or split.expert is not None:
        return False  # what moves between ranks is not the same on the first and the last
    if ranks == 1:
        return True
    captured, _ = split.stages_of(graph)
    placements: list[Any] = list(split.placements.values())
    for node in captured.graph.nodes:
        lies = node.meta.get("lies")
        placements += lies if isinstance(lies, tuple) else [lies]
        if hasattr(node.target, "__self__"):  # an exchange: what it converts to is among its arguments
            placements += [Split(*argument) for argument in node.args if _is_pieces(argument)]
    return all(placement is None or placement.is_even(ranks) for placement in placements)


def _is_pieces(argument: Any) -> bool:
    """True for an exchange's argument that says how a value is split: dimension and sizes of its blocks."""
    return isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[1], tuple)


def _shares(captured: Captured, split: SplitModel) -> list[float]:
    """Return the share of the work that each stage does."""
    work = [0.0] * split.stages
    for node, piece in assign_stages(captured, split.stages * split.pieces, split.assignment).items():
        work[piece // split.pieces] += operations(node)
    total = sum(work) or 1.0  # a loss without operations that count
    return [round(amount / total, 4) for amount in work]
