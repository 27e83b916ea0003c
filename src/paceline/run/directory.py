"""The run directory: everything that others may read of a job.

runs/JOB/plan.json  job.json  events.jsonl  failures/RANK.json  stalls/RANK.json  ended/RANK  checkpoints/step-N/
         result.json  times/RANK.jsonl  output.log  asked/ID/RANK.json  owner.json  owner.lock
         horovod/committed.safetensors

A job takes the folder before it writes anything there (checkpoint/owner.py). plan.json and job.json are written before
the ranks start, and result.json after they have ended; the rest is written by the ranks and the processes above them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.copies import check_place, fetch_run, folder_of
from paceline.checkpoint.manifest import CHECKPOINTS, find_good, list_checkpoints, publish_left, try_writing
from paceline.checkpoint.owner import Ownership, take, unwritable
from paceline.nouns.errors import MEETS_NOT, CheckpointError, ReadError, UsageError, how_to_write
from paceline.nouns.names import check_name, job_name_of
from paceline.nouns.plan import Plan
from paceline.nouns.reading import read_json, shown, write_whole

# Of the run directory, in job.json; runs of Paceline before version 1 have none there. docs/formats.md has what is
# promised. It changes when an older Paceline could not go on with the run.
VERSION = 1
_NONE = "resume another run with --job, or train anew: start under another --job, without --resume"
SERVERS = "servers.json"  # the file with the address of the parameter servers' coordinator
COMMITTED = "horovod/committed.safetensors"  # the file with the last commit of Horovod's elastic state


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """The run directory that the user asks for.

    Args:
        runs: the folder that has the run directories.
        job: the run's name; None: the name is made of the file's name and the time.
        resume: True to go on with an existing run.
        resume_or_start: True to go on with the run `job` if there is one, and else to start it.
        naming: the flag or argument that names a run directory, for errors.

    Raises:
        UsageError: the name or the path can't be used.
    """

    runs: Path
    job: str | None = None
    resume: bool = False
    resume_or_start: bool = False
    naming: str = "--job"

    def __post_init__(self) -> None:
        check_name("path", str(self.runs))
        if self.job is None:
            return
        check_name("run", self.job)
        if not self.folder.is_dir():  # an earlier Paceline may have made it under another name
            check_name("job", self.job)

    @property
    def must_go_on(self) -> bool:
        """Return True if an existing run goes on."""
        return self.resume or self.resume_or_start

    @property
    def folder(self) -> Path:
        """Return the run directory of a job that has a name."""
        assert self.job is not None, "a job without a name has no folder yet"
        return self.runs / self.job

    def planned_folder(self, script: Path) -> Path:
        """Return the run directory that a job of this file would have."""
        return self.runs / (new_name(script) if self.job is None else self.job)


def choose_run(
    choice: RunChoice, script: Path, report: Callable[[str], None], copy_to: str = "", launch: str = ""
) -> tuple[Ownership, Path | None]:
    """Make or find the run directory and take it, and return it with the checkpoint to go on from.

    Args:
        choice: the run directory that the user asks for.
        script: the path of the workload file.
        report: a function that is called with each message to the user.
        copy_to: the URL to which checkpoints are copied; a run goes on from the newest there, if that is newer.
        launch: a text that the job's ranks have in common, where another launcher started them; else "".

    Raises:
        UsageError: there is no such run, a new one can't be made, or a living job has it.
        CheckpointError: the run has checkpoints, but none is whole; or `copy_to` can't be reached.
    """
    if copy_to:
        check_copies(choice, copy_to)
    if not choice.must_go_on:
        return new_run(choice, script, report, launch), None
    if choice.job is None and not choice.resume:
        raise UsageError("--resume-or-start needs a job's name", "no job is named", "write --job NAME")
    if choice.job is None or not (choice.resume_or_start or copy_to):  # else it may be made, or be fetched
        folder = find_run(choice.runs, choice.job, script)
    else:
        folder = choice.folder
    check_version(folder)
    owned = take_folder(choice, folder, report, launch)
    try:
        if copy_to:
            fetch_copies(choice, script, report, copy_to)
        resume = _go_on(choice, folder, script, report)
    except BaseException:
        owned.release(has_begun=False)
        raise
    return owned, resume


def take_folder(choice: RunChoice, folder: Path, report: Callable[[str], None], launch: str = "") -> Ownership:
    """Take the run directory `folder` for a job: see `checkpoint/owner.py`.

    Raises:
        UsageError: a living job has it, or it can't be written.
    """
    owned = take(folder, report, f"another {choice.naming} than {folder.name}", launch)
    owned.start_beating()
    return owned


def _go_on(choice: RunChoice, folder: Path, script: Path, report: Callable[[str], None]) -> Path | None:
    """Return the checkpoint from which the run in `folder` goes on; None: it starts at step 0, maybe as a new run."""
    # job.json is written when a job starts: without it there is nothing to go on with.
    if choice.resume_or_start and not (folder / "job.json").exists():
        _check_is_new(folder)
        check_writable(folder)
        return None
    find_run(choice.runs, folder.name if choice.job is None else choice.job, script)
    check_version(folder)  # it may have been fetched
    check_writable(folder)
    resume = find_resume_point(folder, report)
    place = f" at {resume.name}" if resume else ""
    report(f"{folder.name} goes on{place}")
    return resume


def check_copies(choice: RunChoice, copy_to: str) -> None:
    """Raise UsageError or CheckpointError where checkpoints can't be copied to a URL, or are those of an older job."""
    folder = folder_of(copy_to)
    runs = choice.runs.resolve()
    if folder is not None and (folder == runs or runs in folder.parents):
        raise UsageError(
            f"--copy-to takes the URL of a folder outside of the runs in {runs}",
            f"it is {copy_to!r:.80}, among the runs themselves",
            "write a folder elsewhere, best on another disk",
        )
    try:
        check_place(copy_to, None if choice.must_go_on else choice.job)
    except CheckpointError as error:
        error.exit_code = MEETS_NOT  # nothing has started
        raise


def fetch_copies(choice: RunChoice, script: Path, report: Callable[[str], None], copy_to: str) -> None:
    """Read the newest copy of a run that goes on, where that is newer than its checkpoints on the disk.

    Raises:
        CheckpointError: it can't be read.
    """
    if not choice.must_go_on:
        return
    if choice.job is None and not choice.resume:
        return
    folder = find_run(choice.runs, None, script) if choice.job is None else choice.folder
    try:
        fetch_run(f"{copy_to}/{folder.name}", folder, report)
    except CheckpointError as error:
        error.exit_code = MEETS_NOT
        raise


def new_run(choice: RunChoice, script: Path, report: Callable[[str], None], launch: str = "") -> Ownership:
    """Make a new run directory and take it; it is named after the file and the time unless `choice.job` says how.

    Raises:
        UsageError: the job exists, or the folder can't be made.
    """
    name = new_name(script) if choice.job is None else choice.job
    folder = choice.runs / name
    number = 1
    while choice.job is None and not _is_made(folder):
        number += 1
        folder = choice.runs / f"{name}-{number}"
    _check_is_new(folder)  # before anything is written there
    owned = take_folder(choice, folder, report, launch)
    try:
        _check_is_new(folder)  # it may have become a run, and ended, since
        check_writable(folder)
    except BaseException:
        owned.release(has_begun=False)
        raise
    return owned


def _is_made(folder: Path) -> bool:
    """Make a folder; False if there is one. Of several processes that try, only one makes it."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritable(folder, error) from None
    return True


def _check_is_new(folder: Path) -> None:
    if (folder / "plan.json").exists():
        raise UsageError(
            f"can't make a new job {folder.name!r} in {folder.parent}",
            "it exists",
            f"write --resume to go on with it, or another --job than {folder.name}",
        )


def check_writable(folder: Path) -> None:
    """Make the folders of the run directory `folder`, and try to write to each.

    Raises:
        UsageError: one can't be written.
    """
    for subfolder in (folder, folder / CHECKPOINTS, folder / "failures"):
        try:
            try_writing(subfolder, "start")
        except OSError as error:
            raise unwritable(subfolder, error) from None


def remove_unbegun(folder: Path) -> None:
    """Remove a run directory that was made for a job which then did not start; never one with a checkpoint."""
    if list_checkpoints(folder / "checkpoints") or (folder / "events.jsonl").exists():
        return
    for name in ("plan.json", "job.json"):
        (folder / name).unlink(missing_ok=True)
    for empty in (folder / "checkpoints", folder / "failures", folder):
        with contextlib.suppress(OSError):
            empty.rmdir()


def new_name(script: Path) -> str:
    """Return a name for a run, of the file and the time."""
    return f"{job_name_of(script.stem)}-{time.strftime('%Y%m%d-%H%M%S')}"


def find_run(runs: Path, job: str | None, script: Path) -> Path:
    """Find the run to resume: `job`, or the newest of this workload file.

    Raises:
        UsageError: there is none.
    """
    if job is not None:
        if (runs / job / "plan.json").exists():
            return runs / job
        found, fix = "there is no such job", "look at the names in that folder"
        if (runs / job).is_dir():
            found, fix = f"{runs / job} has no plan.json", "name the directory of a run, copied as a whole"
        raise UsageError(f"can't resume the job {job!r} in {runs}", found, fix)
    # By the time of job.json, which every start writes anew: the run that was started last, not the one made last.
    newest_first = sorted(runs.glob("*/job.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first:
        try:
            known_job = read_json(path, dict)
        except ReadError:
            continue  # cut off by a crash or a full disk
        if known_job.get("script") == str(script.resolve()):
            return path.parent
    raise UsageError(f"can't resume the last job of {script}", f"{runs} has none", "start it without --resume")


def check_version(folder: Path) -> None:
    """Raise UsageError if a later Paceline made the run directory `folder`. Nothing in it is changed."""
    try:
        version = read_json(folder / "job.json", dict).get("version", 0)
    except ReadError:
        return  # a job that ended before it was written, or whose disk was full: it is written anew
    if type(version) is not int or version > VERSION:
        raise UsageError(
            f"can't resume the job {folder.name!r} in {folder.parent}",
            f"its run directory is of version {shown(version)}, and this Paceline reads versions up to {VERSION}",
            "use the Paceline that made it, or a later one",
        )


def find_resume_point(folder: Path, report: Callable[[str], None]) -> Path | None:
    """Find the checkpoint to go on from; None when the job ended before its first.

    Raises:
        CheckpointError: there are checkpoints, but none is whole.
    """
    checkpoints = folder / "checkpoints"
    if (published := publish_last_left(folder)) is not None:
        report(f"{published.name}, the last step that the job trained before it went back, is its newest checkpoint")
    if not list_checkpoints(checkpoints):
        report("the job has no checkpoint: it starts at step 0")
        return None
    try:
        return find_good(checkpoints, report, fix=_NONE)
    except CheckpointError as error:
        error.exit_code = 2  # nothing has started: the request can't be met
        raise


def publish_last_left(folder: Path) -> Path | None:
    """Make the last step of a job that went back, and ended without another checkpoint, one; None: there is none."""
    with contextlib.suppress(OSError):  # the ranks try it again when they start, and say why it can't be written
        return publish_left(folder / CHECKPOINTS)
    return None


def write_start(folder: Path, plan: Plan, script: Path, arguments: Sequence[str]) -> None:
    """Write the plan and the job's facts, and clear the failures of an earlier attempt.

    Raises:
        UsageError: the folder can't be written, or a later Paceline made it.
    """
    check_version(folder)
    try:
        _write_start(folder, plan, script, arguments)
    except OSError as error:
        raise UsageError(
            f"can't write the job's plan to {folder}", f"it can't be written ({error.strerror})", how_to_write(error)
        ) from None


def _write_start(folder: Path, plan: Plan, script: Path, arguments: Sequence[str]) -> None:
    plan.write(folder / "plan.json")
    # What an earlier attempt left would be read as this one's: its failures, its stalls, its result.
    failures = (folder / "failures").glob("*.json")
    stalls = (folder / "stalls").glob("*.json")  # not those of a job that --stall-timeout ended
    for old in [*failures, *stalls, folder / "result.json"]:
        old.unlink(missing_ok=True)
    job = {"version": VERSION, "script": str(script.resolve()), "arguments": list(arguments), "ranks": plan.world_size}
    write_json(folder / "job.json", job)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, readable, at once: another process may be reading the file."""
    write_whole(path, json.dumps(content, indent=1) + "\n")
