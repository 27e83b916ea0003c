"""What each rank of a verification runs: the job's own steps on the person's workload, and a copy of what they made.

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
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm import api
from paceline.comm.fully_shard import local
from paceline.nouns.mesh import Mesh
from paceline.nouns.order import mix
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.replicate.bucket import local_gradient
from paceline.train.data import Batch
from paceline.train.find_workload import find_workload
from paceline.train.job import Job
from paceline.verify.child_setup import read_settings
from paceline.verify.ranks.control_flow_trace import Branches
from paceline.verify.ranks.dropout_trace import DropoutTrace, Kept, watch_pieces
from paceline.verify.ranks.fingerprint import prints_of
from paceline.verify.ranks.randomness import controlled, drawn_state
from paceline.verify.ranks.reference_step import kept
from paceline.verify.ranks.trace import Trace, begin_heartbeat
from paceline.verify.ranks.watch import ModuleWatch, watch_graph, watch_modules


def main(path: Path) -> None:
    """Do what the settings ask for, one run after another."""
    settings, folder = read_settings(path)
    run_dir = os.environ.pop("PACELINE_RUN_DIR")  # a job of this process keeps no run directory
    try:
        api.init()
        rank = api.rank()
        begin_heartbeat(folder / f"beat-{rank}.json")
        workload = find_workload(settings["script"])
        for run in settings["runs"]:
            with (folder / f"{run['name']}-trace-{rank}.jsonl").open("w") as file:
                api.world().comm.ledger = trace = Trace(file=file)
                _RankRun(workload, run, folder, rank).play()
                trace.file = None  # groups that are still open speak when they close
        api.world().comm.barrier()
    finally:
        os.environ["PACELINE_RUN_DIR"] = run_dir


class _RankRun:
    """One job of some steps."""

    def __init__(self, workload: Workload, run: dict[str, Any], folder: Path, rank: int) -> None:
        self.run, self.folder, self.rank = run, folder, rank
        self.plan = dataclasses.replace(Plan.of(run["plan"], "the settings"), checkpoint_every=0)
        self.mesh = Mesh.parse(self.plan.mesh)
        self.branches: list[tuple[str, bool]] = []
        self.calls: list[tuple[float, float]] = []  # of every micro-batch: loss sum and weight
        self.watch = ModuleWatch()
        self.kept: list[Kept] = []  # by every split dropout of a step
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {
            "losses": [],
            "norms": [],
            "weights": [],
            "draws": [],
            "masks": [],
            "kept": [],
            "ledger": [],
            "rates": [],
        }
        self.workload = dataclasses.replace(
            workload,
            precision=run["precision"],
            steps=run["steps"],
            loader_workers=0,
            model=self._model(workload),
            loss=self._loss(workload),
        )

    def play(self) -> None:
        """Take the steps and write down what they made."""
        is_off = self.run["precision"] != "float64"
        with ExitStack() as stack:
            if not self.run.get("draws"):
                stack.enter_context(controlled(is_off))
            job = Job(self.workload, self.plan)
            first = 1
            if self.run.get("load"):
                job.load(self.run["load"])
                first = job.step_number + 1
                self.facts["state_of_draws"] = mix(*drawn_state()[0][:256])
            self._note(job, first - 1)
            if self.run.get("watch"):
                self._look_on(job)
            if self.run.get("draws") and self.plan.compile == "off":
                self._look_at_dropout(job)
            batches = iter(job.batches())
            for step in range(first, self.run["steps"] + 1):
                self._step(job, next(batches), step)
                if self.run.get("save") and step == self.run.get("save_at"):
                    job.save(self.run["save"])
                    self.facts["state_of_draws"] = mix(*drawn_state()[0][:256])
            job.close(save=False)
        self._write(job)

    def _step(self, job: Job, batch: Batch, step: int) -> None:
        ledger = job.ledger
        assert isinstance(ledger, Trace)
        calls, sent = dict(ledger.calls), dict(ledger.payload_bytes)
        self.facts["draws"].append(mix(*drawn_state()[0][:256]))
        self.facts["batch"] = [batch.positions.start, batch.positions.stop]
        self.facts["pieces"] = [[piece.start, piece.stop] for piece in job.loader.pieces(batch.positions)]
        if self.run.get("watch"):
            self.facts["samples"] = [prints_of(micro) for micro in batch.microbatches]
        self.facts["losses"].append(self._stepped(job, batch))
        self.facts["rates"].append([float(group["lr"]) for group in job.optimizer.param_groups])
        assert job.last is not None
        self.facts["norms"] += [job.last.gradient_norm] if job.last.gradient_norm is not None else []
        self.facts["weights"].append(job.last.weight)
        rows = [
            {"collective": key[0], "axis": key[1], "calls": n - calls.get(key, 0),
             "bytes": ledger.payload_bytes[key] - sent.get(key, 0)}
            for key, n in sorted(ledger.calls.items()) if n > calls.get(key, 0)
        ]  # fmt: skip
        self.facts["ledger"].append(rows)
        if step == 1:
            buffers = job.parallel.buffers
            both = zip(buffers.names, buffers.changed, strict=True)
            self.facts["changed_buffers"] = [name for name, is_changed in both if is_changed]
        if step in (1, self.run["steps"]):
            self._note(job, step)

    def _stepped(self, job: Job, batch: Batch) -> float:
        if not self.run.get("draws") or self.plan.compile == "on":
            return job.step(batch)
        self.kept.clear()
        with DropoutTrace() as drawn:
            mean = job.step(batch)
        self.facts["masks"].append([drawn.forward, drawn.again])
        self.facts["kept"].append(list(self.kept))
        return mean

    def _look_at_dropout(self, job: Job) -> None:
        """See which elements each rank of `tensor` keeps."""
        placed: Any = job.parallel.placed
        if placed.is_captured:
            tensor = placed.axes["tensor"]
            placed.split.watch = watch_pieces(self.kept, tensor.rank, tensor.size)

    def _look_on(self, job: Job) -> None:
        """See what modules and operations make in the next step."""
        self.calls.clear()  # the loss may have been tried
        placed: Any = job.parallel.placed
        if placed.is_captured:
            tensor = placed.axes["tensor"]
            placed.split.watch = watch_graph(self.watch, tensor.rank, tensor.size)
        else:
            watch_modules(job.model, self.watch, lambda: str(len(self.calls)))

    def _note(self, job: Job, step: int) -> None:
        """This rank's part of everything, under STEP/KIND/NAME as in the reference."""
        placed, names = job.parallel.placed, dict(job.model.named_parameters())
        updated = placed.updated()
        for name, parameter in {**names, **updated}.items():
            if parameter.is_meta:
                continue
            self.tensors[f"{step}/parameter/{name}"] = kept(local(parameter))
            gradient = local_gradient(parameter)
            if gradient is not None and step:
                self.tensors[f"{step}/gradient/{name}"] = kept(gradient)
            for key, value in job.optimizer.state.get(parameter, {}).items() if step else ():
                own = local(value) if isinstance(value, torch.Tensor) else None
                if own is not None and own.dim() and own.shape == local(parameter).shape:
                    self.tensors[f"{step}/state/{key}/{name}"] = kept(own)
        for name, buffer in job.model.named_buffers():
            if not buffer.is_meta:
                self.tensors[f"{step}/buffer/{name}"] = kept(buffer)

    def _write(self, job: Job) -> None:
        shard_specs = {name: held.shard_spec.to_json() for name, held in job.parallel.held().items()}
        buffers = {name: str(buffer.dtype)[6:] for name, buffer in job.model.named_buffers()}
        self.facts["dtypes"] = buffers
        trained = {name: parameter.requires_grad for name, parameter in job.model.named_parameters()}
        self.facts |= {
            "placements": shard_specs,
            "has_gradient": trained,
            "branches": self.branches,
            "calls": self.calls,
        }
        if self.run.get("watch"):
            self.facts["watch"] = self.watch.to_json()
        self.facts["coordinate"] = self.mesh.coordinate(self.rank)
        self.facts["data_part"] = self.mesh.data_part(self.rank)
        where = self.folder / f"{self.run['name']}-{self.rank}"
        save_file(self.tensors, where.with_suffix(".safetensors"))
        where.with_suffix(".json").write_text(json.dumps(self.facts))

    def _model(self, workload: Workload) -> Any:
        """The factory; under `replicate` alone other ranks than 0 make other values, which it promises to replace."""
        if self.rank == 0 or self.mesh.size("replicate") != self.mesh.world_size:
            return workload.model

        def strange() -> Any:
            model = workload.model()
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    if tensor.is_floating_point():
                        tensor.mul_(0.5).add_(0.01 * self.rank)
            return model

        return strange

    def _loss(self, workload: Workload) -> Any:
        def noted(model: Any, batch: Any) -> Any:
            with Branches() as branches:
                result = workload.loss(model, batch)
            self.branches += branches.taken
            if not isinstance(result[0], FakeTensor):
                self.calls.append((float(result[0].detach()), float(result[1])))
            return result

        return noted


if __name__ == "__main__":
    main(Path(sys.argv[1]))
