"""Copy the run's checkpoints to an object store while training goes on, and read checkpoints from there.

Rank 0 copies, from the disk, in a thread of its own: a slow store delays no step and no checkpoint. Where the next
checkpoint is written before one is copied, the newer one takes its turn. The last one of a job is waited for, but not
for a store that does not answer.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.copies import CopyFolder, SilentStoreError, check_url, find_copy
from paceline.checkpoint.manifest import CHECKPOINTS, MANIFEST, list_checkpoints, step_name, step_of
from paceline.nouns.errors import CheckpointError
from paceline.train.last_checkpoint import first_failure, new_folder, temporary_folders

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob
    from paceline.train.checkpoints import Checkpoints

_ATTEMPTS = 2  # of the last checkpoint
_RETRY_AFTER_S = 2.0
_REPORT_S = 3.0  # of waiting for a copy, until the user is told


class CheckpointCopier:
    """Copies a run's checkpoints, one at a time, the newest first.

    Args:
        url: the plan's `copy_to`; the run's copies are in the folder of its name there.
        run_dir: the run directory.
        keep: the number of checkpoints that stay there.
        report: a function that is told of each copy that ended, by an event.
    """

    def __init__(self, url: str, run_dir: Path, keep: int, report: Callable[[dict[str, Any]], None]) -> None:
        self.url = f"{url}/{run_dir.name}"
        self.run_dir = run_dir
        self.keep = keep
        self.report = report
        self.copied: Path | None = None  # the last one
        self.failure: CheckpointError | None = None  # of the last try
        self.is_ending = False
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self, folder: Path) -> None:
        """Copy the checkpoint `folder` soon; one that still waits is skipped."""
        with self._lock:
            self._waiting = folder
            if self._thread is None:
                # daemon: a job that is ended does not wait for its copies; one that was begun has no manifest.
                self._thread = threading.Thread(target=self._work, name="checkpoint-copies", daemon=True)
                self._thread.start()

    def begin_with_newest(self) -> None:
        """Copy what an earlier process of this run could not."""
        newest = list_checkpoints(self.run_dir / CHECKPOINTS)[:1]
        if newest:
            self.begin(newest[0])

    def finish(self, notice: Callable[[str], None]) -> CheckpointError | None:
        """Wait until the newest checkpoint is copied; return the error if it could not be.

        Args:
            notice: a function that is told what is waited for, where that takes long.
        """
        self.failure = None
        self.is_ending = True
        self._join(notice)
        newest = list_checkpoints(self.run_dir / CHECKPOINTS)[:1]
        if not newest or newest[0] == self.copied:
            return None
        for attempt in range(_ATTEMPTS):
            if isinstance(self.failure, SilentStoreError):
                break  # another try would wait as long again
            if attempt:
                time.sleep(_RETRY_AFTER_S)
            self.begin(newest[0])
            self._join(notice)
            if self.failure is None:
                return None
        return self.failure

    def _join(self, notice: Callable[[str], None]) -> None:
        report_s: float | None = _REPORT_S
        while (thread := self._thread) is not None:
            thread.join(report_s)
            if thread.is_alive():
                report_s = None
                notice(
                    f"the job's end waits for a copy to {self.url}; a store that does not answer is given up, and "
                    f"all checkpoints are in {self.run_dir}"
                )

    def _work(self) -> None:
        while True:
            with self._lock:
                folder = self._waiting
                if self.is_ending and isinstance(self.failure, SilentStoreError):
                    folder = None
                self._waiting = None
                if folder is None:
                    self._thread = None
                    return
            self._copy(folder)

    def _copy(self, folder: Path) -> None:
        began_s = time.monotonic()
        try:
            name = step_name(folder)
            step = step_of(name) or 0
            copies = CopyFolder(self.url)
            copies.put_run_files(self.run_dir)  # first: who reads the checkpoint needs them
            (copies / CHECKPOINTS / name).put_checkpoint(folder)
            # After the new one is there: a copy that fails removes nothing.
            (copies / CHECKPOINTS).remove_others(step, self.keep)
        except Exception as error:  # whatever ends this thread, the job must hear of it
            if not (folder / MANIFEST).exists():
                return  # removed meanwhile, since there are newer ones
            self.failure = _as_failure(error, folder, self.url)
            self.report({"event": "copy_failed", "path": str(folder), "url": self.url, "found": self.failure.found})
        else:
            self.failure = None
            self.copied = folder
            seconds = round(time.monotonic() - began_s, 3)
            url = f"{self.url}/{CHECKPOINTS}/{name}"
            self.report({"event": "copied", "path": str(folder), "url": url, "step": step, "seconds": seconds})


def _as_failure(error: Exception, folder: Path, url: str) -> CheckpointError:
    found, fix = str(error) or type(error).__name__, ""
    if isinstance(error, CheckpointError):
        found, fix = f"{error.asked}: {error.found}", error.fix
    kind = SilentStoreError if isinstance(error, SilentStoreError) else CheckpointError
    return kind(f"the checkpoint {folder} should be copied to {url}", found, fix or "see that it is whole")


def save_copy(checkpoints: Checkpoints, url: str) -> None:
    """Save a job to an object store. Collective.

    Raises:
        CheckpointError: there is something else, or it can't be written.
    """
    job = checkpoints.job
    check_url(url, "job.save")
    began_s = time.monotonic()
    failure = None
    if job.rank == 0:
        failure = _failure_of(lambda: _check_may_write(CopyFolder(url)))
    _raise_together(job, failure, url)
    if not job.steps.is_saving:
        return
    with _staging(job, url) as folder:
        checkpoint = folder / "checkpoint"
        failure = checkpoints.write_staged(checkpoint)
        if failure is None and job.rank == 0:
            failure = _failure_of(lambda: CopyFolder(url).put_checkpoint(checkpoint))
        _raise_together(job, failure, url)
    seconds = round(time.monotonic() - began_s, 3)
    job.events.write({"event": "saved", "path": url, "step": job.step_number, "seconds": seconds})


@contextmanager
def fetched(job: BaseJob, url: str, weights_only: bool) -> Iterator[Path]:
    """Have the checkpoint at a URL on the disk, in a folder that all ranks see, inside the `with`. Collective.

    Args:
        job: the job whose ranks read it.
        url: the URL of a checkpoint or a folder of them; with `weights_only` also of safetensors.
        weights_only: True if only parameters and buffers are needed.

    Raises:
        CheckpointError: there is none that is whole, or the store can't be reached.
    """
    check_url(url, "job.load")
    with _staging(job, url) as folder:
        failure = None
        if job.rank == 0:
            failure = _failure_of(lambda: _fetch(url, folder, weights_only, job.notice))
        _raise_together(job, failure, url)
        yield next(path for path in folder.iterdir() if not path.name.startswith("."))


def _fetch(url: str, folder: Path, weights_only: bool, notice: Callable[[str], None]) -> None:
    copies = CopyFolder(url)
    if weights_only and not copies.has(MANIFEST) and (copies.is_file() or copies.has("model.safetensors")):
        copies.fetch_weights(folder)
    else:
        find_copy(url, notice, folder)


def _check_may_write(copies: CopyFolder) -> None:
    if not copies.has(MANIFEST) and not copies.is_empty():
        raise CheckpointError(
            f"job.save needs a folder that is new or has a checkpoint, not {copies.url}",
            "it has something else in it",
            "name another folder",
        )


@contextmanager
def _staging(job: BaseJob, url: str) -> Iterator[Path]:
    """Make a folder that all ranks see, and remove it in the end. Collective."""
    name = "copy" if job.run_dir is None else job.run_dir.name
    folder = None
    for parent in temporary_folders(job.run_dir):
        folder = new_folder(job.world, parent, f"paceline-{name}-")
        if folder is not None:
            break
    if folder is None:
        raise CheckpointError(
            f"a checkpoint of {url} needs a folder that all ranks see, for a while",
            "neither the run directory nor the folder for temporary files is one",
            "name a place that all hosts share with --runs, or set TMPDIR to one",
        )
    try:
        yield folder
        # Not after an error, which may be of only one rank: the others would be in another collective.
        job.world.barrier()  # no rank reads any more
    finally:
        if job.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _failure_of(call: Callable[[], object]) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


def _raise_together(job: BaseJob, failure: CheckpointError | None, url: str) -> None:
    """Raise the failure of a rank on every rank. Collective."""
    common = None
    if failure is not None:
        common = CheckpointError(failure.asked, f"{failure.asked}: {failure.found}", failure.fix)
    common = first_failure(common, Path(url), job.world)
    if common is not None:
        raise failure or CheckpointError(f"can't use {url}", common.found, common.fix)
