"""Run a file with a loop of its own on one rank of a verification, in float64, and write what its steps made.

`loop_main.py SETTINGS.json` is the script of ordinary ranks; the file itself calls `paceline.prepare` and trains.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.comm import api
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.parallel.observer import StepObserver
from paceline.train.loop_job import LoopJob
from paceline.train.loop_job import prepare as plain_prepare
from paceline.train.prepare import DATA_PARTS
from paceline.train.seed import seed_everything
from paceline.verify.child_setup import read_settings
from paceline.verify.ranks.keep_float64 import widen
from paceline.verify.ranks.randomness import controlled
from paceline.verify.ranks.reference_step import save_tensors
from paceline.verify.ranks.trace import begin_heartbeat


class _AllStepsTaken(BaseException):
    """The loop has taken as many steps as are compared."""


class _Recorder(StepObserver):
    """Copies the parameters after each step."""

    def __init__(self, job: LoopJob, steps: int) -> None:
        self.job = job
        self.steps = steps
        self.tensors: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []

    def record(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Keep copies under the number of the steps that were taken; whole ones."""
        for name, parameter in parameters.items():
            self.tensors[f"{len(self.losses)}/{name}"] = self.job.parallel.whole(parameter).clone().contiguous()

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Record a step, and end the loop after the last one."""
        assert self.job.last is not None
        self.losses.append(self.job.last.loss)
        self.record(parameters)
        if len(self.losses) == self.steps:
            raise _AllStepsTaken


def main(path: Path) -> None:
    """Run the file until its loop has taken the steps that are asked for."""
    settings, folder = read_settings(path)
    run_dir = os.environ.pop("PACELINE_RUN_DIR")  # a job of this process keeps no run directory
    os.environ["PACELINE_PLAN"] = json.dumps(settings["plan"])
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
        recorder.record(job.parallel.named())
        job.parallel.observe(recorder)
        recorders.append(recorder)
        return prepared

    try:
        api.init()
        rank = api.rank()
        begin_heartbeat(folder / f"beat-{rank}.json")
        seed_everything(0)  # a loop that sets no seed of its own begins alike with one rank and with several
        with controlled(False), patched(paceline, prepare=prepare):
            try:
                _run_file(settings["script"])
                for recorder in recorders:
                    recorder.job.close(save=False)  # the last step ends with the job
            except _AllStepsTaken:
                pass
        _write(recorders, folder, f"{settings['run']}-{rank}")
        api.world().comm.barrier()  # no rank ends, and closes its connections, while another still needs it
    finally:
        os.environ["PACELINE_RUN_DIR"] = run_dir


def _run_file(script: str) -> None:
    """Run the file as `python FILE` does, which may end by `sys.exit()`."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise


def _write(recorders: list[_Recorder], folder: Path, name: str) -> None:
    if not recorders or not recorders[0].losses:
        raise WorkloadError(
            "the loop should take steps by paceline.prepare",
            "it ended without an update",
            "call job.backward(loss) and optimizer.step() in the file, outside of functions that nobody calls",
        )
    recorder = recorders[0]
    save_tensors(recorder.tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"losses": recorder.losses, "position": recorder.job.position}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
