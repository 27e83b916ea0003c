"""Find out, before anything runs, whether all ranks would begin the same collectives.

Started as `python -m paceline.verify.ranks.dry_run SETTINGS.json`.

One process plays every rank in turn. The user's loss runs on a few samples of the first batch, and calls
like `paceline.all_reduce` in it are answered and written down; the graphs of `tensor` and `pipeline` run on fake
tensors. It also finds a loss that depends on the rank, which no plan can make equal to one process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from paceline.comm import api
from paceline.comm.batch_norm import without_sync
from paceline.comm.collectives import AxisComm
from paceline.comm.dtypes import widen
from paceline.comm.ledger import Ledger
from paceline.comm.process_group import RankInfo
from paceline.comm.pytree import signature
from paceline.launch.process_exit import exit_process
from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.patching import patched, patched_items
from paceline.nouns.plan import Plan
from paceline.nouns.schedule import make_schedule
from paceline.nouns.workload import Workload
from paceline.profile.describe import depends_on_data, describe
from paceline.profile.simulate import Rows, made_without_values, step_traffic
from paceline.train.data import cut_into, cut_without_changing, open_data, rank_loader
from paceline.train.loader import moved
from paceline.train.parallelize import split_model
from paceline.train.plain_step import checked
from paceline.train.prepare import check_model
from paceline.train.seed import seed_everything
from paceline.verify.ranks.child import answer
from paceline.verify.ranks.randomness import controlled
from paceline.verify.ranks.trace import Trace, asked_at

if TYPE_CHECKING:
    from paceline.parallel.graph_model import SplitModel

_FLOAT64_BYTES = 8  # of an element: the float64 run is the largest
_TRAINED = 4  # copies of a parameter while training: parameter, gradient, Adam's two moments
_RECORDED = 9  # copies kept to compare: the first parameters; parameters, gradients and moments of two steps
_EQUAL = 1e-9  # a relative difference of losses in float64 that is rounding


def main(workload: Workload, settings: dict[str, Any], folder: Path) -> None:
    """Write dry.json: every rank's collectives, and what a step sends."""
    plan = Plan.of(settings["plan"], "the settings")
    # Refusals before anything computes: a model of no right form, then one too large for this host.
    check_model(made_without_values(workload))
    model = describe(workload, plan)
    check_fits(model, plan)
    found = {
        "calls_in_loss": calls_in_loss(workload, plan.world_size),
        "graphs": graph_calls(workload, plan) if "split" in model else {},
        "traffic": predicted_traffic(workload, plan, model),
        "precision": workload.precision,
    }
    (folder / "dry.json").write_text(json.dumps(found))


def predicted_traffic(workload: Workload, plan: Plan, model: Mapping[str, Any]) -> list[Rows] | None:
    """Return the traffic of each rank in the first step; None where it depends on the data.

    Replicas whose samples have the same shapes are simulated once.

    Args:
        workload: the workload that is trained.
        plan: the mesh and options under which it is trained.
        model: the description of its model under the plan.
    """
    if depends_on_data(plan, model):
        return None
    mesh = Mesh.parse(plan.mesh)
    micro_batches = cut_into(plan, mesh, workload)
    if "split" in model:
        micro_batches = cut_without_changing(plan, micro_batches, model["split"]["coupled"])
    data = open_data("data", workload.data)
    shapes = []  # by part of the batch
    for part in range(mesh.data_size):
        loader = rank_loader(data, workload, (part, mesh.data_size), torch.device("cpu"), micro_batches)
        batch = next(loader.training(0, loader.order(workload.batch_size).batch_at(0).stop))
        shapes.append(tuple(signature(micro_batch) for micro_batch in batch.microbatches))
    found: dict[Any, Rows] = {}
    ranks = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        key = (shapes[mesh.data_part(rank)], *(at[axis] for axis in AXES if axis != "replicate"))
        if key not in found:
            found[key] = step_traffic(workload, plan, rank)
        ranks.append(found[key])
    return ranks


def calls_in_loss(workload: Workload, ranks: int) -> list[list[list[Any]]]:
    """Return the collectives that the user's own loss begins on each rank: [collective, axis, bytes, line].

    Raises:
        WorkloadError: the loss of the same samples differs between ranks.
    """
    batch = _some_samples(workload)
    first_loss, _ = _loss_as_rank(workload, batch, 0, ranks)
    losses: list[float] = []
    calls: list[list[list[Any]]] = []
    for rank in range(ranks):  # rank 0 again: does it give the same again?
        loss, rank_calls = _loss_as_rank(workload, batch, rank, ranks)
        losses.append(loss)
        calls.append(rank_calls)
    if not _is_equal(first_loss, losses[0]):
        raise WorkloadError(
            "the loss should be the same when it is computed again",
            f"one process had {first_loss!r} and then {losses[0]!r} for the same model and samples",
            "find what remembers or draws (a counter, a time, numbers of its own) and switch it off for verifying",
        )
    # A loss that calls collectives may rightly differ by rank here: its own values come back in the others' place.
    has_calls = any(calls)
    for rank, loss in enumerate(losses):
        if not has_calls and not _is_equal(losses[0], loss):
            raise WorkloadError(
                "the loss should depend on the model and the batch alone",
                f"the same samples give {losses[0]!r} on rank 0 and {loss!r} on rank {rank}",
                "leave rank() out of the model and the loss; what differs by rank belongs into the loop",
            )
    return calls


def _some_samples(workload: Workload) -> Any:
    """Return a small batch in float64: the first that the trials before a job use, else an example."""
    loader = rank_loader(open_data("data", workload.data), workload, (0, 1), torch.device("cpu"))
    trials = loader.trials()
    batch = trials[0].batches[0] if trials else loader.example()
    return moved(batch, torch.device("cpu"), True)


def _loss_as_rank(workload: Workload, batch: Any, rank: int, ranks: int) -> tuple[float, list[list[Any]]]:
    """Return the mean loss of a fresh model as `rank` computes it, and the collectives that it begins."""
    seed_everything(workload.seed)
    with as_rank(rank, ranks) as calls, controlled():  # with gradients: a loss may take some of its own
        model = widen(workload.model()).train()
        without_sync(model)
        loss_sum, weight = checked(workload.loss(model, batch))
    return float(loss_sum.detach()) / max(float(weight), 1e-300), calls


def _is_equal(expected: float, loss: float) -> bool:
    return not abs(expected - loss) > _EQUAL * max(abs(expected), 1e-12)  # so written, NaN is equal


@dataclass(slots=True)
class _CallList(Ledger):
    """A ledger that lists each call: [collective, axis, bytes, line]."""

    begun: list[list[Any]] = field(default_factory=list)

    def add(self, collective: str, axis: str, payload_bytes: int) -> None:
        self.begun.append([collective, axis, payload_bytes, asked_at(sys._getframe(1))])


class _Answered(AxisComm):
    """An axis on which nobody else is; what is sent comes back."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self._enter("all_reduce", tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._enter("broadcast", tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._enter("all_gather", tensor)
        return [tensor] * self.size

    def reduce_scatter(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        self._enter("reduce_scatter", tensor)
        # The shape must be right, the values need not: they are compared between ranks only without collectives.
        chunks = tensor.chunk(self.size)  # of few rows there are fewer than ranks
        return chunks[min(self.rank, len(chunks) - 1)].clone()

    def all_to_all(self, tensor: torch.Tensor, splits: Any) -> tuple[torch.Tensor, list[int]]:
        self._enter("all_to_all", tensor)
        return tensor.clone(), list(splits)

    # What gradients of the functions above begin, in a loss that takes some of its own.
    def all_gather_along(self, tensor: torch.Tensor, lengths: Any, dim: int) -> list[torch.Tensor]:
        self._enter("all_gather", tensor)
        shapes = [(*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]) for length in lengths]
        return [tensor if tensor.shape == shape else tensor.new_zeros(shape) for shape in shapes]

    def reduce_scatter_list(self, parts: Any) -> torch.Tensor:
        self._enter("reduce_scatter", torch.cat([part.reshape(-1) for part in parts]))
        return torch.zeros_like(parts[self.rank])

    def all_to_all_sized(
        self, tensor: torch.Tensor, send: Any, receive: Any, payload_bytes: int | None = None
    ) -> torch.Tensor:
        self._enter("all_to_all", tensor)
        return tensor.clone()

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        self._enter("reduce", tensor)

    def barrier(self) -> None:
        self.ledger.add("barrier", self.axis, 0)


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[list[list[Any]]]:
    """Let the user's code take this process for `rank`; collectives return what it gave, and are entered in a list.

    Yields:
        The list: [collective, axis, bytes, line] of each call.
    """
    ledger = _CallList()
    calls = ledger.begun

    def recorded(name: str) -> Any:
        """Return a stand-in for a collective of torch.distributed, which a loss may call by itself."""

        def collective(tensor: Any = None, *arguments: Any, **named: Any) -> None:
            size = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
            calls.append([name, "world", size, asked_at(sys._getframe(1))])

        return collective

    rank_info = RankInfo(rank, ranks, rank, ranks)
    world = api.World(rank_info, _Answered("world", rank, tuple(range(ranks)), None, ledger))
    # All the ways in which code may ask for its rank: Paceline's functions, launchers' variables, torch.distributed.
    variables = {
        "PACELINE_RANK": rank, "PACELINE_WORLD_SIZE": ranks, "PACELINE_LOCAL_RANK": rank, "RANK": rank,
        "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "PACELINE_LOCAL_SIZE": ranks,
    }  # fmt: skip
    environment = {name: str(value) for name, value in variables.items()}
    collectives = {name: recorded(name) for name in ("all_reduce", "broadcast", "barrier")}
    world_before = list(api._world)
    api._world[:] = [world]
    try:
        with (
            patched_items(os.environ, environment),
            patched(
                dist, get_rank=lambda group=None: rank, get_world_size=lambda group=None: ranks,
                is_initialized=lambda: True, **collectives,
            ),
        ):  # fmt: skip
            yield calls
    finally:
        api._world[:] = world_before


def graph_calls(workload: Workload, plan: Plan) -> dict[str, list[list[Any]]]:
    """Return the collectives of each rank's graph for the first micro-batch, on fake tensors, by "STAGE,NUMBER".

    The pipeline's schedule is made, and thereby proved free of deadlock.
    """
    from paceline.profile.describe_split import comms_without_groups, form_of

    mesh = Mesh.parse(plan.mesh)
    stages = mesh.size("pipeline")
    if stages > 1:
        make_schedule(plan.schedule, stages, max(plan.micro_batches, 2 * stages))
    form = form_of(workload)
    loader = rank_loader(open_data("data", workload.data), workload, (0, mesh.data_size), torch.device("cpu"))
    example = loader.example()
    first: SplitModel | None = None
    captured = None
    calls = {}
    for pipeline, number in itertools.product(range(stages), range(mesh.places)):
        at = {"pipeline": pipeline, **mesh.at_place(number)}
        comms = comms_without_groups(mesh, at, Trace())
        split = split_model(workload, form, comms, plan, torch.device("cpu"))
        if first is None or captured is None:
            first = split
            captured = split.decide(workload.loss, example)
        split.copy_decisions(first)
        calls[f"{pipeline},{number}"] = _calls_of(split, *split.stages_of(captured))
    return calls


def _calls_of(split: SplitModel, captured: Any, stages: list[Any]) -> list[list[Any]]:
    """Return the rows of the ledger for a rank's stages: [collective, axis, calls, ""]."""
    from paceline.graph.fake_run import stage_traffic

    calls: list[list[Any]] = []
    for index in split.own_stages:
        for segment in stages[index * split.segments : (index + 1) * split.segments]:
            shapes = split.local_shapes(captured)
            ledger = stage_traffic(segment, captured, shapes, split.comms, split.recompute, split.precision)
            for row in ledger.rows():
                calls.append([row["collective"], row["axis"], row["calls"], ""])
    return calls


def needed_bytes(model: Mapping[str, Any], plan: Plan) -> int:
    """Return roughly the largest number of bytes that the processes of a verification hold, without activations."""
    numel = sum(tensor["numel"] for tensor in [*model["parameters"], *model["frozen"]])
    mesh = Mesh.parse(plan.mesh)
    shards = 1
    for axis in plan.spreading_axes:
        shards *= mesh.size(axis)
    # Each rank holds its shard of everything; under `replicate` the shard is the whole model on each.
    # The reference keeps the records of two runs at once: its own, and that of the variation it is compared with.
    reference = _TRAINED + 2 * _RECORDED
    ranks = (_TRAINED + _RECORDED) * mesh.world_size / shards
    return int(numel * _FLOAT64_BYTES * (reference + ranks))


def available_bytes() -> int | None:
    """Return the bytes of memory that can be used without swapping; None where the system does not say."""
    with contextlib.suppress(OSError, KeyError):  # a container may hide it
        return int(psutil.virtual_memory().available)
    return None


def check_fits(model: Mapping[str, Any], plan: Plan, available: int | None = None) -> None:
    """Raise WorkloadError when a model is too large for this host: it holds float64 copies of all processes at once."""
    if available is None:
        available = available_bytes()
    needed = needed_bytes(model, plan)
    if available is not None and needed > available:
        raise WorkloadError(
            f"can't verify on {plan.world_size} ranks of this host, in float64, beside one process",
            f"that takes about {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are free",
            "verify a shallower model of the same config (num_hidden_layers=2): every layer is split alike",
        )


if __name__ == "__main__":
    exit_process(answer(main))
