"""Run a file with a loop of its own on one rank of a verification, in float64, and record what its steps make.

The file itself calls `paceline.prepare` and trains.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

import paceline
from paceline.comm.dtypes import widen
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.nouns.user_program import UserProgram
from paceline.parallel.observer import StepObserver
from paceline.parallel.optimizer_parts import groups_of
from paceline.train.loop_job import LoopJob
from paceline.train.loop_job import prepare as plain_prepare
from paceline.train.precision import grouped_products_in_float64
from paceline.train.prepare import DATA_PARTS
from paceline.train.seed import seed_everything
from paceline.verify.ranks.draw_trace import DrawTrace, is_called_by
from paceline.verify.ranks.randomness import DROPS, controlled, hash_of_draws
from paceline.verify.ranks.reference_step import one_rounding_off
from paceline.verify.ranks.step_copies import RankRecord


class _AllStepsTaken(BaseException):
    """The loop has taken as many steps as are compared."""


class _LoopRecord(RankRecord, StepObserver):
    """Records a loop's steps as they end, and ends the loop after the last one."""

    job: LoopJob

    def __init__(self, job: LoopJob, steps: int) -> None:
        super().__init__(job)
        self.steps = steps
        self.facts["draws"] = [hash_of_draws()]
        self.trace = DrawTrace(lambda: is_called_by(job.model))
        for number, optimizer in enumerate(job.objects.optimizers, 1):
            optimizer.register_step_pre_hook(functools.partial(self._before_update, number))
        full_tensor = job.parallel.models.full_tensor
        full_values = {name: full_tensor(parameter) for name, parameter in self._parameters().items()}
        self.enter_values(0, full_values)

    @property
    def step(self) -> int:
        """Return the number of steps that have ended."""
        return len(self.facts["losses"])

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return all parameters, also those that no optimizer has."""
        return self.job.parts or dict(self.job.model.named_parameters())

    def _before_update(
        self, number: int, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Copy an optimizer's gradients as its update sees them; of several updates in a step those of the last."""
        self.enter_gradients(self.step + 1, self.job.parallel.sums.targets[number - 1].parameters)

    def parameters_updated(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Record a step."""
        assert self.job.last is not None
        # No weights: without a loader each rank may count the same samples, and their mean is that of one process.
        self.facts["drawn"].append(self.trace.take())
        self.facts["losses"].append(self.job.last.loss)
        self.facts["norms"].append(self.job.last.gradient_norm or 0.0)
        groups = groups_of(self.job.optimizer)
        self.facts["rates"].append([float(group["lr"]) for group in groups if "lr" in group])
        self.enter_values(self.step, self._parameters())
        self.enter_states(self.step, parameters, self.job.objects.optimizers)
        if self.step == self.steps:
            raise _AllStepsTaken

    def end(self) -> None:
        """Enter what is known after the last step."""
        self.facts |= {
            "has_draws": DROPS.has_dropped or any(bits for _, bits in self.facts["drawn"]),
            "modules": [name for name, _ in self.job.model.named_modules()],
        }


def run_loop(program: UserProgram, asked: dict[str, Any]) -> RankRecord:
    """Run the file until its loop has taken the steps that are asked for, and return what they made."""
    os.environ["PACELINE_PLAN"] = json.dumps({**asked["plan"], "check": "off"})
    os.environ[DATA_PARTS] = str(asked["data_parts"])
    torch.set_default_dtype(torch.float64)
    records: list[_LoopRecord] = []

    def prepare(*objects: Any, **options: Any) -> tuple[Any, ...]:
        for item in objects:
            if isinstance(item, torch.nn.Module):
                widen(item)
        prepared = plain_prepare(*objects, **{**options, "sinks": ()})  # they are for training
        job: LoopJob = prepared[0]
        job.to_float64 = True
        record = _LoopRecord(job, asked["steps"])
        job.parallel.observe(record)
        records.append(record)
        stack.enter_context(record.trace)
        if asked["is_noisy"]:
            stack.enter_context(one_rounding_off(job.model, torch.finfo(torch.float64).eps, seed=1))
        return prepared

    seed_everything(0)  # a loop that sets no seed of its own begins alike with one rank and with several
    control = grouped_products_in_float64() if asked["draws"] else controlled(False)
    with ExitStack() as stack, control, patched(paceline, prepare=prepare):
        try:
            _run_file(program)
            for record in records:
                record.job.close(save=False)  # the last step ends with the job
        except _AllStepsTaken:
            pass
    if not records or not records[0].step:
        raise WorkloadError(
            "the loop should take steps by paceline.prepare",
            "it ended without an update",
            "call job.backward(loss) and optimizer.step() in the file, outside of functions that nobody calls",
        )
    records[0].end()
    return records[0]


def _run_file(program: UserProgram) -> None:
    """Run the program as Python does, which may end by `sys.exit()`."""
    try:
        program.run()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
