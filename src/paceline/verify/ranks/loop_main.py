"""Run a file with a loop of its own on one rank of a verification, in float64, and write what its steps made.

`loop_main.py SETTINGS.json` is the script of ordinary ranks; the file itself calls `paceline.prepare` and trains.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm import api
from paceline.comm.fully_shard import local
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.nouns.user_program import UserProgram
from paceline.parallel.observer import StepObserver
from paceline.parallel.optimizer_parts import groups_of, parts_of
from paceline.parallel.replicate.bucket import local_gradient
from paceline.train.grouped_float64 import grouped_products_in_float64
from paceline.train.loop_job import LoopJob
from paceline.train.loop_job import prepare as plain_prepare
from paceline.train.prepare import DATA_PARTS
from paceline.train.seed import seed_everything
from paceline.verify.child_setup import read_settings
from paceline.verify.judge.compare import split_key, take
from paceline.verify.ranks.draw_digest import DrawDigest, is_called_by
from paceline.verify.ranks.keep_float64 import widen
from paceline.verify.ranks.randomness import DROPS, controlled, hash_of_draws
from paceline.verify.ranks.reference_step import dense_copy, one_rounding_off, save_tensors
from paceline.verify.ranks.trace import begin_heartbeat


class _AllStepsTaken(BaseException):
    """The loop has taken as many steps as are compared."""


class _Recorder(StepObserver):
    """Copies what each step makes, under STEP/KIND/NAME as a workload's reference has it: this rank's part of it."""

    def __init__(self, job: LoopJob, steps: int) -> None:
        self.job = job
        self.steps = steps
        self.tensors: dict[str, torch.Tensor] = {}
        # No weights: without a loader each rank may count the same samples, and their mean is that of one process.
        self.facts: dict[str, Any] = {"losses": [], "weights": [], "norms": [], "rates": [], "drawn": []}
        self.facts["draws"] = [hash_of_draws()]
        self.digest = DrawDigest(lambda: is_called_by(job.model))
        for number, optimizer in enumerate(job.objects.optimizers, 1):
            optimizer.register_step_pre_hook(functools.partial(self._record_gradients, number))
        for name, tensor in self._values():
            whole = job.parallel.whole(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor
            self.tensors[f"0/{name}"] = dense_copy(whole)

    @property
    def step(self) -> int:
        """Return how many steps have ended."""
        return len(self.facts["losses"])

    def _record_gradients(
        self, number: int, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Copy an optimizer's gradients as its update sees them; of several updates in a step those of the last."""
        for name, parameter in self.job.parallel.targets[number - 1].parameters.items():
            gradient = local_gradient(parameter)
            if gradient is not None:
                self.tensors[f"{self.step + 1}/gradient/{name}"] = dense_copy(gradient)

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Record a step, and end the loop after the last one."""
        assert self.job.last is not None
        self.facts["drawn"].append(self.digest.take())
        self.facts["losses"].append(self.job.last.loss)
        self.facts["norms"].append(self.job.last.gradient_norm or 0.0)
        groups = groups_of(self.job.optimizer)
        self.facts["rates"].append([float(group["lr"]) for group in groups if "lr" in group])
        for name, tensor in self._values():
            self.tensors[f"{self.step}/{name}"] = dense_copy(local(tensor))
        self._record_states(parameters)
        if self.step == self.steps:
            raise _AllStepsTaken

    def _values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all parameters, also those that no optimizer has, and all buffers, as KIND/NAME."""
        for name, parameter in (self.job.parts or dict(self.job.model.named_parameters())).items():
            yield f"parameter/{name}", parameter
        for name, buffer in self.job.model.named_buffers():
            yield f"buffer/{name}", buffer

    def _record_states(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Copy the optimizers' states, of whole parameters those that are on this rank."""
        held = self.job.parallel.held()
        parts = [part for optimizer in self.job.objects.optimizers for part in parts_of(optimizer)]
        for name, parameter in parameters.items():
            is_cut = name in held and OPTIMIZER + name not in held
            for state, value in [item for part in parts for item in part.state.get(parameter, {}).items()]:
                tensor = _as_tensor(value)
                # A count of steps has no shards; what else has another shape than its cut parameter can't be placed.
                if tensor is not None and (not is_cut or tensor.dim() == 0 or tensor.shape == local(parameter).shape):
                    self.tensors[f"{self.step}/state/{state}/{name}"] = dense_copy(tensor)

    def write(self, path: Path) -> None:
        """Write PATH.safetensors and PATH.json."""
        held = self.job.parallel.held()
        cuts = {name: shard.shard_spec for name, shard in held.items() if not name.startswith(OPTIMIZER)}
        for key, tensor in self.tensors.items():
            _, _, name, _ = split_key(key)
            # Before the first call of a model that `tensor` splits its parameters are whole; that may be any step.
            if name in cuts and tensor.shape == cuts[name].shape:
                self.tensors[key] = torch.from_numpy(take(tensor.numpy(), cuts[name])).contiguous()
        states = {name.removeprefix(OPTIMIZER): bool(held[name].holders) for name in held.keys() - cuts.keys()}
        self.facts |= {
            "placements": {name: shard_spec.to_json() for name, shard_spec in cuts.items()},
            "whole_states": states,
            "has_gradient": {},
            "data_part": self.job.data_part,
            "coordinate": self.job.mesh.coordinate(self.job.rank),
            "has_draws": DROPS.has_dropped or any(bits for _, bits in self.facts["drawn"]),
            "modules": [name for name, _ in self.job.model.named_modules()],
        }
        save_tensors(self.tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(self.facts))


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return local(value)
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, int | float) else None


def main(path: Path) -> None:
    """Run the file until its loop has taken the steps that are asked for."""
    settings, folder, program = read_settings(path)
    run_dir = os.environ.pop("PACELINE_RUN_DIR")  # a job of this process keeps no run directory
    os.environ["PACELINE_PLAN"] = json.dumps({**settings["plan"], "check": "off"})
    os.environ[DATA_PARTS] = str(settings["data_parts"])
    torch.set_default_dtype(torch.float64)
    recorders: list[_Recorder] = []

    def prepare(*objects: Any, **options: Any) -> tuple[Any, ...]:
        for each in objects:
            if isinstance(each, torch.nn.Module):
                widen(each)
        prepared = plain_prepare(*objects, **{**options, "sinks": ()})  # they are for training
        job: LoopJob = prepared[0]
        job.to_float64 = True
        recorder = _Recorder(job, settings["steps"])
        job.parallel.observe(recorder)
        recorders.append(recorder)
        stack.enter_context(recorder.digest)
        if settings["is_noisy"]:
            stack.enter_context(one_rounding_off(job.model, torch.finfo(torch.float64).eps, seed=1))
        return prepared

    try:
        api.init()
        rank = api.rank()
        begin_heartbeat(folder / f"beat-{rank}.json")
        seed_everything(0)  # a loop that sets no seed of its own begins alike with one rank and with several
        control = grouped_products_in_float64() if settings["draws"] else controlled(False)
        with ExitStack() as stack, control, patched(paceline, prepare=prepare):
            try:
                _run_file(program)
                for recorder in recorders:
                    recorder.job.close(save=False)  # the last step ends with the job
            except _AllStepsTaken:
                pass
        _write(recorders, folder, f"{settings['run']}-{rank}")
        api.world().comm.barrier()  # no rank ends, and closes its connections, while another still needs it
    finally:
        os.environ["PACELINE_RUN_DIR"] = run_dir


def _run_file(program: UserProgram) -> None:
    """Run the program as Python does, which may end by `sys.exit()`."""
    try:
        program.run()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise


def _write(recorders: list[_Recorder], folder: Path, name: str) -> None:
    if not recorders or not recorders[0].step:
        raise WorkloadError(
            "the loop should take steps by paceline.prepare",
            "it ended without an update",
            "call job.backward(loss) and optimizer.step() in the file, outside of functions that nobody calls",
        )
    recorders[0].write(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
