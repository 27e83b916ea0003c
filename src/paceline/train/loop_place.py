"""The place of a loop's job in its data, in checkpoints, and the return of a resumed loop to that place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.parallel.optimizer_parts import groups_of, settings_of
from paceline.train.base_job import check_has_trained

if TYPE_CHECKING:
    from paceline.train.loop_job import LoopJob


class LoopPlace:
    """The place of a job in the passes over its loader.

    Attributes:
        return_to: a function that puts back random states and settings of the checkpoint that was loaded, once the loop
            comes to its place; None once it has.
    """

    def __init__(self, job: LoopJob) -> None:
        self.job = job
        self.return_to: Callable[[], None] | None = None
        self._returned_to: Callable[[], None] | None = None
        self._opened_at_step = 0  # when the loop began its newest pass

    def facts(self) -> dict[str, Any]:
        """Return the place as a checkpoint has it; nothing where there is no loader."""
        job, cut = self.job, self.job.cut
        if cut is None:
            return {}
        # Gradients are not saved: batches without an update are to be taken again, those of this pass at least.
        number, batch = job.taken_batches.place((cut.number, cut.batch), cut.passes is not None)
        groups = {"batches_a_step": job.batches_a_step} if job.batches_a_step > 1 else {}
        return {"loop": {"pass": number, "batch": batch, **groups}}

    def check(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Raise CheckpointError where a checkpoint is at a batch that the loader does not have."""
        place, cut = manifest.get("loop"), self.job.cut
        if place is not None and cut is not None and manifest.get("batch_size") == self.job.workload.batch_size:
            cut.check_place(folder, place["batch"])

    def restore(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Go to the place that a checkpoint has; the loop comes to it later."""
        job, cut, place = self.job, self.job.cut, manifest["loop"]
        assert cut is not None
        saved, current = manifest.get("batch_size"), job.workload.batch_size
        batch = cut.batch_after(place.get("batch", 0), saved, current)
        cut.go_to(place["pass"], place.get("batch", 0) if batch is None else batch)
        job.taken_batches.clear()
        if saved != current and batch is not None:
            job.notice(
                f"{folder.name} was saved with batches of {saved}, the loader's have {current}: pass {cut.number} "
                f"goes on after {batch} of these, with the samples that come next"
            )
        elif cut.batch and saved != current:
            job.notice(
                f"{folder.name} was saved with batches of {saved}, the loader's have {current}: pass {cut.number} "
                f"goes on after {cut.batch} of them, so samples of it are left out or taken twice"
            )
        # Copies: a scheduler's state may be its own lists.
        scheduler = None if job.scheduler is None else copy.deepcopy(job.scheduler.state_dict())
        settings = [copy.deepcopy(settings_of(group)) for group in groups_of(job.optimizer)]

        def return_to() -> None:
            # What the loop has drawn since, or a scheduler done in passes that were made before, is not to count.
            job.steps.restore_own_state(folder, manifest)
            if scheduler is not None:
                job.scheduler.load_state_dict(scheduler)
            for group, values in zip(groups_of(job.optimizer), settings, strict=True):
                group.update(values)

        self.return_to = return_to

    def come_back(self, may_look: bool = True) -> None:
        """Be as the checkpoint was, at the place to which the job has gone back.

        Args:
            may_look: True if the loop may have only looked at the batch that it gets there, and come back once more.
        """
        assert self.return_to is not None
        self.return_to()
        if may_look:
            self._returned_to = self.return_to
        self.return_to = None

    def begin_pass(self) -> None:
        """Record the step at which the loop begins a pass."""
        self._opened_at_step = self.job.step_number
        self._returned_to = None

    def forget_look(self) -> None:
        """Go back to the beginning of a pass of which the loop has only looked at batches: `next(iter(loader))`."""
        job, cut = self.job, self.job.cut
        if cut is None or not cut.is_open or job.is_updated or job.step_number != self._opened_at_step:
            return
        cut.go_to(*cut.opened_at)
        job.take(None)
        job.taken_batches.clear()
        self.return_to = self._returned_to

    def foreseen(self) -> int | None:
        """Return the number of steps, if each takes as many batches as the last; None where it is not known."""
        job = self.job
        batches = None if job.cut is None else job.cut.batches_left()
        taken_batches = job.taken_batches
        # A step may have taken none: the loop counts passes, and makes its batches itself.
        if batches is None or not taken_batches.updated:
            return None
        return job.step_number + (batches + len(taken_batches.waiting)) // len(taken_batches.updated)

    def check_has_updated(self) -> None:
        """Raise UsageError if the loop has gone over all of the data without an update, and begins again."""
        job, cut = self.job, self.job.cut
        if cut is None or not cut.has_ended or cut.opened_at[1]:  # of a resumed pass a rest was left
            return
        if job.last is None and not job.is_updated:
            check_has_trained(job, "its loop has gone over the data once")
