"""Take the job's own steps on one rank of a verification, and write a copy of what they made.

`rank_main.py SETTINGS.json` is the script of ordinary ranks. Nothing here computes: the steps are those of `Job`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm import api
from paceline.comm.fully_shard import local
from paceline.graph.own_modules import PATHS
from paceline.nouns.mesh import PLACE_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.shard_spec import LocalShard
from paceline.nouns.workload import Workload
from paceline.parallel.optimizer_list import alone
from paceline.parallel.replicate.bucket import local_gradient
from paceline.train.control_flow_trace import Branches
from paceline.train.data import Batch
from paceline.train.find_workload import find_workload
from paceline.train.grouped_float64 import grouped_products_in_float64
from paceline.train.job import Job
from paceline.verify.child_setup import read_settings
from paceline.verify.ranks.draw_digest import DrawDigest
from paceline.verify.ranks.dropout_trace import DropoutTrace, MaskPiece, watch_pieces
from paceline.verify.ranks.fingerprint import prints_of
from paceline.verify.ranks.keep_float64 import dtypes_as_asked
from paceline.verify.ranks.placed_draws import PLACES, call_of_the_loss
from paceline.verify.ranks.randomness import controlled, hash_of_draws
from paceline.verify.ranks.reference_step import dense_copy, save_tensors, scale_of
from paceline.verify.ranks.trace import Trace, begin_heartbeat
from paceline.verify.ranks.watch import ModuleWatch, watch_graph, watch_modules


def main(path: Path) -> None:
    """Do what the settings ask for, one run after another."""
    settings, folder, program = read_settings(path)
    run_dir = os.environ.pop("PACELINE_RUN_DIR")  # a job of this process keeps no run directory
    try:
        api.init()
        rank = api.rank()
        # From here on a hang is noticed: HangWatch waits until every rank has a heartbeat.
        begin_heartbeat(folder / f"beat-{rank}.json")
        workload = find_workload(program)
        for run in settings["runs"]:
            with (folder / f"{run['name']}-trace-{rank}.jsonl").open("w") as file:
                api.world().comm.ledger = trace = Trace(file=file)
                _RankRun(workload, run, folder, rank).play()
                trace.file = None  # groups that are still open speak when they close
        api.world().comm.barrier()  # no rank ends, and closes its connections, while another still needs it
    finally:
        os.environ["PACELINE_RUN_DIR"] = run_dir


class _RankRun:
    """One job of some steps."""

    def __init__(self, workload: Workload, run: dict[str, Any], folder: Path, rank: int) -> None:
        self.run = run
        self.folder = folder
        self.rank = rank
        self.plan = dataclasses.replace(Plan.of(run["plan"], "the settings"), checkpoint_every=0, check="off")
        self.mesh = Mesh.parse(self.plan.mesh)
        self.branches: list[list[tuple[str, bool | None]]] = []  # of every call of the loss
        self.calls: list[tuple[float, float]] = []  # of every micro-batch: loss sum and weight
        self.watch = ModuleWatch()
        self.mask_pieces: list[MaskPiece] = []  # one for every split dropout of a step
        self.tensors: dict[str, torch.Tensor] = {}
        self.whole_states: dict[str, LocalShard] = {}
        self.facts: dict[str, Any] = {
            "losses": [], "norms": [], "weights": [], "draws": [],
            "masks": [], "kept": [], "drawn": [], "ledger": [], "rates": [],
        }  # fmt: skip
        self.workload = dataclasses.replace(
            workload,
            precision=run["precision"],
            steps=run["steps"],
            loader_workers=0,  # samples are loaded in this process
            sinks=(),  # they are for training
            model=self._model(workload),
            loss=self._loss(workload),
        )

    def play(self) -> None:
        """Take the steps and write down what they made."""
        # In narrow precisions both sides' values differ by rounding, and dropout by value would drop other elements.
        is_off = self.run["precision"] != "float64"
        PLACES.copies = PATHS
        with ExitStack() as stack:
            if self.run.get("draws"):
                stack.enter_context(grouped_products_in_float64())
            else:
                stack.enter_context(controlled(is_off, self.plan.is_compiled))
            job = Job(self.workload, self.plan)
            if job.parallel.loss_scale is not None:
                job.parallel.loss_scale.value = scale_of(self.workload)
            first = 1
            if self.run.get("load"):
                job.load(self.run["load"])
                first = job.step_number + 1
                self.facts["state_of_draws"] = hash_of_draws()
            # Of parameters that the optimizer updates whole, one rank has the state.
            for name, shard in job.parallel.held().items():
                if name.startswith(OPTIMIZER):
                    self.whole_states[name.removeprefix(OPTIMIZER)] = shard
            self._record(job, first - 1)
            if self.run.get("watch"):
                self._look_on(job)
            if self.run.get("draws") and not self.plan.is_compiled:
                self._look_at_dropout(job)
            batches = iter(job.batches())
            for step in range(first, self.run["steps"] + 1):
                self._step(job, next(batches), step)
                if self.run.get("save") and step == self.run.get("save_at"):
                    job.save(self.run["save"])
                    self.facts["state_of_draws"] = hash_of_draws()
            job.close(save=False)
        self._write(job)

    def _step(self, job: Job, batch: Batch, step: int) -> None:
        """Take a step; enter what it began with, what it returned and what it sent."""
        ledger = job.ledger
        assert isinstance(ledger, Trace)
        calls_before = dict(ledger.calls)  # the ledger counts from the job's begin; a step is a difference
        bytes_before = dict(ledger.payload_bytes)
        self.facts["draws"].append(hash_of_draws())
        self.facts["batch"] = [batch.positions.start, batch.positions.stop]
        self.facts["pieces"] = [[piece.start, piece.stop] for piece in job.loader.pieces(batch.positions)]
        if self.run.get("watch"):
            self.facts["samples"] = [prints_of(micro_batch) for micro_batch in batch.microbatches]
        if step == 1:
            self.branches.clear()  # the loss may have been tried before
        self.facts["losses"].append(self._take_step(job, batch))  # everything above is of the time before the step
        self.facts["rates"].append([float(group["lr"]) for group in job.optimizer.param_groups])
        assert job.last is not None
        if job.last.gradient_norm is not None:
            self.facts["norms"].append(job.last.gradient_norm)
        self.facts["weights"].append(job.last.weight)
        self.facts["ledger"].append(_ledger_since(calls_before, bytes_before, ledger))
        if step == 1:
            buffers = job.parallel.buffers
            pairs = zip(buffers.names, buffers.changed, strict=True)
            self.facts["changed_buffers"] = [name for name, is_changed in pairs if is_changed]
        if step in (1, self.run["steps"]):
            self._record(job, step)

    def _take_step(self, job: Job, batch: Batch) -> float:
        """Take a step and return its loss; in a run with the model's own dropout enter its masks, too."""
        if not self.run.get("draws") or self.plan.is_compiled:
            return job.step(batch)
        self.mask_pieces.clear()
        with DrawDigest() as digest, DropoutTrace() as drawn:
            loss = job.step(batch)
        self.facts["drawn"].append(digest.take())
        self.facts["masks"].append([drawn.forward, drawn.again])
        self.facts["kept"].append(list(self.mask_pieces))
        return loss

    def _look_at_dropout(self, job: Job) -> None:
        """Let split dropouts enter which elements this rank of `tensor` or `context` keeps."""
        placed: Any = job.parallel.placed
        if placed.is_captured:
            sharing = placed.mesh.places
            placed.split.watch = watch_pieces(self.mask_pieces, sharing)

    def _look_on(self, job: Job) -> None:
        """Let modules, or operations of a graph, enter what they make in the next step."""
        self.calls.clear()  # the loss may have been tried before the first step (train/prepare.py)
        placed: Any = job.parallel.placed
        if placed.is_captured:
            places = {axis: (placed.axes[axis].rank, placed.axes[axis].size) for axis in PLACE_AXES}
            placed.split.watch = watch_graph(self.watch, places)
        else:
            watch_modules(job.model, self.watch, lambda: str(len(self.calls)))

    def _record(self, job: Job, step: int) -> None:
        """Copy this rank's part of everything, under STEP/KIND/NAME as in the reference."""
        # By the same names `updated` has what this rank's optimizer updates: its rows, its pieces, or the parameters.
        parameters = {**dict(job.model.named_parameters()), **job.parallel.placed.updated()}
        for name, parameter in parameters.items():
            if parameter.is_meta:  # not on this rank
                continue
            self.tensors[f"{step}/parameter/{name}"] = dense_copy(local(parameter))
            if step:
                self._record_update(job, step, name, parameter)
        for name, buffer in job.model.named_buffers():
            if not buffer.is_meta:
                self.tensors[f"{step}/buffer/{name}"] = dense_copy(buffer)

    def _record_update(self, job: Job, step: int, name: str, parameter: torch.nn.Parameter) -> None:
        """Copy a parameter's gradient and the optimizer's states of its shape, or of the whole one's."""
        gradient = local_gradient(parameter)
        if gradient is not None:
            self.tensors[f"{step}/gradient/{name}"] = dense_copy(gradient)
        whole = self.whole_states.get(name)
        shape = local(parameter).shape if whole is None else whole.shard_spec.local_shape
        states = [item for one in alone(job.optimizer) for item in one.state.get(parameter, {}).items()]
        for state, value in states:
            if not isinstance(value, torch.Tensor):
                continue
            shard = local(value)
            if shard.dim() and shard.shape == shape:
                self.tensors[f"{step}/state/{state}/{name}"] = dense_copy(shard)

    def _write(self, job: Job) -> None:
        """Write RUN-RANK.safetensors and .json."""
        buffers = job.model.named_buffers()
        self.facts |= {
            "dtypes": {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in buffers},
            "placements": {name: held.shard_spec.to_json() for name, held in job.parallel.held().items()},
            "whole_states": {name: bool(shard.holders) for name, shard in self.whole_states.items()},
            "has_gradient": {name: parameter.requires_grad for name, parameter in job.model.named_parameters()},
            "branches": self.branches,
            "calls": self.calls,
        }
        if self.run.get("watch"):
            self.facts["watch"] = self.watch.to_json()
        self.facts["coordinate"] = self.mesh.coordinate(self.rank)
        self.facts["data_part"] = self.mesh.data_part(self.rank)
        path = self.folder / f"{self.run['name']}-{self.rank}"
        save_tensors(self.tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(self.facts))

    def _model(self, workload: Workload) -> Any:
        """Return the factory; under `replicate` alone one that makes other values on other ranks than 0.

        The broadcast from rank 0 must replace them.
        """

        def made() -> Any:
            with dtypes_as_asked():  # the reference makes its model before it controls draws and dtypes
                return workload.model()

        if self.rank == 0 or self.mesh.size("replicate") != self.mesh.world_size:
            return made

        def with_other_values() -> Any:
            model = made()
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.mul_(0.5).add_(0.01 * self.rank)
            return model

        return with_other_values

    def _loss(self, workload: Workload) -> Any:
        """Return the loss; it enters the branches that it took and what it returned."""

        def recorded(model: Any, batch: Any) -> Any:
            with Branches() as branches, call_of_the_loss(model):
                result = workload.loss(model, batch)
            self.branches.append(branches.taken)
            if not isinstance(result[0], FakeTensor):  # a capture calls the loss, too, without values
                self.calls.append((float(result[0].detach()), float(result[1])))
            return result

        return recorded


def _ledger_since(
    calls_before: dict[tuple[str, str], int], bytes_before: dict[tuple[str, str], int], ledger: Trace
) -> list[dict[str, Any]]:
    """Return what the ledger counted since, by collective and axis."""
    rows = []
    for key, total_calls in sorted(ledger.calls.items()):
        calls = total_calls - calls_before.get(key, 0)
        if calls > 0:
            collective, axis = key
            payload_bytes = ledger.payload_bytes[key] - bytes_before.get(key, 0)
            rows.append({"collective": collective, "axis": axis, "calls": calls, "bytes": payload_bytes})
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1]))
