"""Run a job from its plan to its result, which is written to the run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint.owner import Ownership
from paceline.nouns.errors import UsageError, how_to_write
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.read.runs import saved_checkpoints
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.restarts import Restarts, Tries
from paceline.run.supervise.supervisor import Ending, JobRequest

_ONCE = Restarts()


def run_job(
    plan: Plan, request: JobRequest, screen: Screen, restarts: Restarts = _ONCE
) -> tuple[Ending, Progress, dict[str, Any]]:
    """Run the job and write `result.json`. Return its ending, its progress, and the result as JSON has it."""
    if request.owned is not None:
        request.owned.check()
    directory.write_start(request.run_dir, plan, request.script, request.arguments)
    tries = Tries(plan, restarts, screen)
    try:
        ending, progress = tries.run(request)
        return ending, progress, finish(request.run_dir, ending, progress, screen.say, request.owned)
    finally:
        tries.restore_signals()


def finish(
    run_dir: Path, ending: Ending, progress: Progress, say: Callable[[str], None], owned: Ownership | None = None
) -> dict[str, Any]:
    """Write `result.json`, and return its content. If that fails, print the reason: the job ends as it did.

    Where another job has the run directory, nothing is written.
    """
    if owned is not None and owned.is_taken():
        return result_of(run_dir, ending, progress)
    # All ranks have ended, so no one else writes here. A job that failed after `job.load` left its last step aside.
    published = directory.publish_last_left(run_dir)
    result = result_of(run_dir, ending, progress)
    if published is not None:
        result.update(checkpoint=str(published.absolute()), copy=None)
    try:
        directory.write_json(run_dir / "result.json", result)
    except OSError as error:
        asked = f"to write how the job ended to {run_dir / 'result.json'}"
        found = f"it can't be written ({error.strerror})"
        say(f"paceline: {UsageError(asked, found, how_to_write(error))}")
    return result


def result_of(folder: Path, ending: Ending, progress: Progress) -> dict[str, Any]:
    """Return the result of the job as a JSON object. A job that took no step is where its checkpoints are."""
    first = progress.first
    last = progress.last
    checkpoints = saved_checkpoints(folder)
    saved = _last_saved(list(checkpoints), list(progress.loaded))
    checkpoint = progress.checkpoint
    if not checkpoint and saved in checkpoints:
        checkpoint = str(checkpoints[saved].absolute())
    rate = progress.samples_per_s()
    return {
        "job": folder.name,
        "status": ending.status,
        "exit_code": ending.exit_code,
        "stop_sent_to": ending.stop_sent_to or None,
        "run_dir": str(folder),
        "steps": last["step"] if last else saved,
        "position": last["position"] if last else progress.loaded.get(saved, 0),
        "loss_first": first["loss"] if first else None,
        "loss_last": last["loss"] if last else None,
        "samples_per_s": round(rate, 3) if rate else None,
        "evaluation": progress.evaluation,
        "left_out": progress.left_out,
        "restarts": progress.restarts,
        "checkpoint": checkpoint,
        "copy": progress.copies.get(Path(checkpoint).name) if checkpoint else None,
        "failure": ending.cause,
    }


def _last_saved(steps: list[int], loaded: list[int]) -> int:
    """Return the last step of a job that took none.

    Args:
        steps: the steps of the run's checkpoints, the newest first; they may be damaged.
        loaded: the steps that the job loaded, in order; it went on from the first.
    """
    if steps and (not loaded or steps[0] in loaded):
        return steps[0]
    return loaded[0] if loaded else 0
