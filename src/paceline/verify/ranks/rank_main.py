"""Take the job's own steps on one rank of a verification, and write a copy of what they made.

`rank_main.py SETTINGS.json` is the script of ordinary ranks. Nothing here computes: the steps are those of `Job`, or of
the loop in the user's file (`loop_run.py`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.comm import api
from paceline.graph.own_modules import PATHS
from paceline.nouns.mesh import PLACE_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.optimizer_list import alone
from paceline.torch_private.operations import FakeTensor
from paceline.train.control_flow_trace import Branches
from paceline.train.data import Batch
from paceline.train.find_workload import find_workload
from paceline.train.job import Job
from paceline.train.precision import grouped_products_in_float64
from paceline.verify.ranks.child import read_settings
from paceline.verify.ranks.draw_trace import DrawTrace
from paceline.verify.ranks.dropout_pieces import MaskPiece, watch_pieces
from paceline.verify.ranks.keep_float64 import dtypes_as_asked
from paceline.verify.ranks.loop_run import run_loop
from paceline.verify.ranks.placed_draws import PLACES, call_of_the_loss
from paceline.verify.ranks.randomness import controlled, hash_of_draws
from paceline.verify.ranks.reference_step import scale_of
from paceline.verify.ranks.step_copies import RankRecord
from paceline.verify.ranks.trace import Trace
from paceline.verify.ranks.watch import ModuleWatch, prints_of, watch_graph, watch_modules


def main(path: Path) -> None:
    """Do what the settings ask for, one run after another."""
    settings, folder, program = read_settings(path)
    run_dir = os.environ.pop("PACELINE_RUN_DIR")  # a job of this process keeps no run directory
    try:
        api.init()
        rank = api.rank()
        is_loop = settings["runs"][0].get("is_loop")
        workload = None if is_loop else find_workload(program)
        for asked in settings["runs"]:
            with (folder / f"{asked['name']}-trace-{rank}.jsonl").open("w") as file:
                api.world().comm.ledger = trace = Trace(file=file)
                record = run_loop(program, asked) if workload is None else WorkloadRun(workload, asked).play()
                record.write(folder / f"{asked['name']}-{rank}")
                trace.file = None  # groups that are still open speak when they close
        api.world().comm.barrier()  # no rank ends, and closes its connections, while another still needs it
    finally:
        os.environ["PACELINE_RUN_DIR"] = run_dir


class WorkloadRun:
    """Some steps of a workload's job on this rank."""

    def __init__(self, workload: Workload, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.rank = api.rank()
        self.plan = dataclasses.replace(Plan.of(asked["plan"], "the settings"), checkpoint_every=0, check="off")
        self.mesh = Mesh.parse(self.plan.mesh)
        self.branches: list[list[tuple[str, bool | None]]] = []  # of every call of the loss
        self.calls: list[tuple[float, float]] = []  # of every micro-batch: loss sum and weight
        self.watch = ModuleWatch()
        self.mask_pieces: list[MaskPiece] = []  # one for every split dropout of a step
        self.draws_itself = bool(asked.get("draws"))  # by the model's own dropout
        self.workload = dataclasses.replace(
            workload,
            precision=asked["precision"],
            steps=asked["steps"],
            loader_workers=0,  # samples are loaded in this process
            sinks=(),  # they are for training
            model=self._model(workload),
            loss=self._loss(workload),
        )

    def play(self) -> RankRecord:
        """Take the steps; return what they made."""
        # In narrow precisions both sides' values differ by rounding, and dropout by value would drop other elements.
        is_off = self.asked["precision"] != "float64"
        PLACES.copies = PATHS
        control = grouped_products_in_float64() if self.draws_itself else controlled(is_off, self.plan.is_compiled)
        with control:
            self.job = job = Job(self.workload, self.plan)
            self.record = RankRecord(job)
            if job.parallel.loss_scale is not None:
                job.parallel.loss_scale.value = scale_of(self.workload)
            if self.asked.get("load"):
                job.load(self.asked["load"])
                self.record.facts["state_of_draws"] = hash_of_draws()
            first = job.step_number + 1
            self.record.enter_values(first - 1, self._parameters())
            self._look_on()
            batches = iter(job.batches())
            for step in range(first, self.asked["steps"] + 1):
                self._step(next(batches), step)
                if self.asked.get("save") and step == self.asked.get("save_at"):
                    job.save(self.asked["save"])
                    self.record.facts["state_of_draws"] = hash_of_draws()
            job.close(save=False)
        buffers = job.model.named_buffers()
        self.record.facts |= {
            "dtypes": {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in buffers},
            "has_gradient": {name: parameter.requires_grad for name, parameter in job.model.named_parameters()},
            "branches": self.branches,
            "calls": self.calls,
        }
        if self.asked.get("watch"):
            self.record.facts["watch"] = self.watch.to_json()
        return self.record

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        # By the same names `updated` has what this rank's optimizer updates: its rows, its pieces, or the parameters.
        return {**dict(self.job.model.named_parameters()), **self.job.parallel.placed.updated()}

    def _step(self, batch: Batch, step: int) -> None:
        """Take a step; enter what it began with, what it returned and what it sent."""
        job, facts = self.job, self.record.facts
        ledger = job.ledger
        assert isinstance(ledger, Trace)
        calls_before = dict(ledger.calls)  # the ledger counts from the job's begin; a step is a difference
        bytes_before = dict(ledger.payload_bytes)
        facts["draws"].append(hash_of_draws())
        facts["batch"] = [batch.positions.start, batch.positions.stop]
        facts["pieces"] = [[part.start, part.stop] for part in job.loader.micro_batches_of(batch.positions)]
        if self.asked.get("watch"):
            facts["samples"] = [prints_of(micro_batch) for micro_batch in batch.microbatches]
        if step == 1:
            self.branches.clear()  # the loss may have been tried before
        facts["losses"].append(self._take_step(batch))  # everything above is of the time before the step
        facts["rates"].append([float(group["lr"]) for group in job.optimizer.param_groups])
        assert job.last is not None
        if job.last.gradient_norm is not None:
            facts["norms"].append(job.last.gradient_norm)
        facts["weights"].append(job.last.weight)
        facts["ledger"].append(_ledger_since(calls_before, bytes_before, ledger))
        if step == 1:
            buffers = job.parallel.buffers
            pairs = zip(buffers.names, buffers.changed, strict=True)
            facts["changed_buffers"] = [name for name, is_changed in pairs if is_changed]
        if step in (1, self.asked["steps"]):
            parameters = self._parameters()
            self.record.enter_values(step, parameters)
            self.record.enter_gradients(step, parameters)
            self.record.enter_states(step, parameters, alone(job.optimizer))

    def _take_step(self, batch: Batch) -> float:
        """Take a step and return its loss; in a run with the model's own dropout enter its masks, too."""
        if not self.draws_itself or self.plan.is_compiled:
            return self.job.step(batch)
        self.mask_pieces.clear()
        with DrawTrace() as drawn:
            loss = self.job.step(batch)
        facts = self.record.facts
        facts["masks"].append([drawn.forward, drawn.again])
        facts["drawn"].append(drawn.take())
        facts["kept"].append(list(self.mask_pieces))
        return loss

    def _look_on(self) -> None:
        """Let modules, or a graph's operations, enter what they make next; or split dropouts what they keep."""
        placed: Any = self.job.parallel.placed
        if self.draws_itself and placed.is_captured and not self.plan.is_compiled:
            placed.split.watch = watch_pieces(self.mask_pieces, placed.mesh.places)
        if not self.asked.get("watch"):
            return
        self.calls.clear()  # the loss may have been tried before the first step (train/prepare.py)
        if placed.is_captured:
            places = {axis: (placed.axes[axis].rank, placed.axes[axis].size) for axis in PLACE_AXES}
            placed.split.watch = watch_graph(self.watch, places)
        else:
            watch_modules(self.job.model, self.watch, lambda: str(len(self.calls)))

    def _model(self, workload: Workload) -> Any:
        """Return the factory; under a mesh with only `replicate` one that makes other values on other ranks than 0.

        The broadcast from rank 0 must replace them.
        """

        def make() -> Any:
            with dtypes_as_asked():  # the reference makes its model before it controls draws and dtypes
                return workload.model()

        if self.rank == 0 or self.mesh.size("replicate") != self.mesh.world_size:
            return make

        def with_other_values() -> Any:
            model = make()
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
            self.branches.append(branches.outcomes)
            if not isinstance(result[0], FakeTensor):  # a capture calls the loss, too, without values
                self.calls.append((float(result[0].detach()), float(result[1])))
            return result

        return recorded


def _ledger_since(
    calls_before: dict[tuple[str, str], int], bytes_before: dict[tuple[str, str], int], ledger: Trace
) -> list[dict[str, Any]]:
    """Return the calls and bytes that the ledger has counted since then, by collective and axis."""
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
