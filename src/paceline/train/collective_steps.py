"""What of a job depends on how its ranks go on: here all of them take every step together.

`train/servers.py` has the same for workers of parameter servers, which may be at different steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.train.agree import check_same_start
from paceline.train.data import Batch
from paceline.train.schedulers import step_all

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.comm.collectives import AxisComm
    from paceline.comm.process_group import RankInfo
    from paceline.train.job import Job


class CollectiveSteps:
    """How a rank of a job goes on from step to step, and what it saves, where ranks exchange tensors."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def board_place(self) -> RankInfo:
        """Return this rank among those that wait for each other in `save`, `load`, `evaluate` and `close`."""
        return self.job.rank_info

    @property
    def writer_place(self) -> tuple[int, int]:
        """Return this rank's number among those that write a checkpoint together, and how many they are."""
        return self.job.rank, self.job.size

    @property
    def is_saving(self) -> bool:
        """True if this rank takes part in writing checkpoints."""
        return True

    holds_replicas = True  # ranks hold the same tensors at the same step

    @property
    def saved_mesh(self) -> str:
        """Return the mesh of the ranks that write a checkpoint together."""
        return str(self.job.mesh)

    @property
    def evaluation_part(self) -> tuple[int, int]:
        """Return which part of the evaluation's samples this rank takes, of how many."""
        return self.job.data_part, self.job.mesh.data_size

    @property
    def log_comm(self) -> AxisComm:
        """Return the ranks over which `job.log` adds up: all. Those of one sample add equal ones."""
        return self.job.world

    def begin_run(self) -> None:
        """Do nothing: the job is at its step, with its random numbers."""

    def check_start(self, resume: str | None) -> None:
        """Raise UsageError where ranks start from different checkpoints. Collective."""
        # Before `load`, in which ranks with a checkpoint would wait for those without one.
        check_same_start(resume, self.job.world)

    def check_may_load(self) -> None:
        """Do nothing: the parameters are here, and may be replaced between any two steps."""

    def check_may_keep(self, call: str) -> None:
        """Do nothing: every rank writes its part of a checkpoint."""

    def restore_own_state(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Restore what belongs to this rank alone: random states, what compression left out."""
        self.job.restore_own_state(folder, manifest)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's part of every global batch from here to the last step."""
        yield from self.job.loader.training(self.job.position, self.job.end)

    def length(self, manifest: dict[str, Any]) -> tuple[int, int]:
        """Return the steps of the training, and the position after the last, from a checkpoint on."""
        return self.job.loader.length(self.job.step_number, self.job.position)

    def begin_step(self) -> None:
        """Raise PlanError if the optimizer can't update what it was given since the last step."""
        if self.job.assembly.later_parameters is not None:
            self.job.assembly.check_later_parameters()

    def end_step(self, batch: Batch) -> None:
        """Go to the next step."""
        job = self.job
        if job.scheduler is not None:
            step_all(job.scheduler)
        job.step_number += 1
        job.position = batch.positions.stop
        job.loader.note(batch)

    def take_state(self) -> None:
        """Do nothing: the optimizer's state is here."""
