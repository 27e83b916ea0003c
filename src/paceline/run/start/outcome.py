"""Describe the outcome of a request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import list_checkpoints
from paceline.checkpoint.owner import RunTakenError
from paceline.run.failures import format_failure
from paceline.run.read.runs import read_plan
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervisor import THE_COMMAND, Ending


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    Args:
        run_dir: the run directory of the job.
        ending: the way in which the job ended.
        progress: the steps and checkpoints that it reached.
        result: the result as JSON has it; None: another node writes it.
        is_plain: True for a script that distributes its training without Paceline, and saves by itself.
    """

    run_dir: Path
    ending: Ending
    progress: Progress
    result: dict[str, Any] | None = None
    is_plain: bool = False

    def text(self) -> str:
        """Return the message to the user."""
        if self.ending.status == "failed" and self.ending.cause is not None:
            failure = format_failure(self.ending.cause, self.ending.peer_count)
            return f"{failure}{self._restarts()}{self._newest_checkpoint()}"
        if self.ending.status == "stopped" and self.is_plain:
            return f"stopped; {self.run_dir}"
        if self.ending.status == "stopped":
            reason = ""
            if self.ending.stop_sent_to not in ("", THE_COMMAND):
                reason = f", since {self.ending.stop_sent_to} was sent SIGTERM"
            return f"stopped{reason}; {self._saved_part()}"
        if self.ending.status == "failed":
            return "the ranks had to be killed: they did not end by themselves"
        return f"done{self._before()}; {self.run_dir}"

    def _before(self) -> str:
        """Return the words about the earlier steps of a job that has taken no step in this start."""
        if self.progress.last is not None or not self.progress.started:
            return ""
        before = max(self.progress.loaded, default=0)
        more = f" before: no step was left after step {before} (to train on, raise the file's epochs or steps)"
        return more if before else ", 0 steps were taken"

    def _restarts(self) -> str:
        number = self.progress.restarts
        return f"\n  (after {number} restart{'s' * (number > 1)})" if number else ""

    def _newest_checkpoint(self) -> str:
        newest = list_checkpoints(self.run_dir / "checkpoints")[:1]
        cause = self.ending.cause or {}
        # The failure says where the last step is, and how to go on from it; of a folder that was lost another job's is.
        if not newest or cause.get("saved_to") or cause.get("type") == RunTakenError.__name__:
            return ""
        not_copied, go_on = self._copy_part()
        return f"\n  Last checkpoint: {newest[0]}{not_copied}; {go_on}"

    def _saved_part(self) -> str:
        """Return the words about the checkpoint of a stopped job, and the command that goes on."""
        progress = self.progress
        not_copied, go_on = self._copy_part()
        last = progress.last["step"] if progress.last else None
        if progress.checkpoint and progress.saved_step == (progress.stopped_step if progress.has_stopped else last):
            return f"saved as {progress.checkpoint}{not_copied}; {go_on}"
        earlier = list_checkpoints(self.run_dir / "checkpoints")
        if earlier:
            return f"its last steps are not saved, the newest checkpoint is {earlier[0]}{not_copied}; {go_on}"
        return f"nothing was saved; --resume --job {self.run_dir.name} starts it again at step 0"

    def _copy_part(self) -> tuple[str, str]:
        """Return the words that the newest checkpoint is not copied, or "", and the command that goes on."""
        go_on = f"go on with --resume --job {self.run_dir.name}"
        copy_to = read_plan(self.run_dir).get("copy_to")
        saved = self.progress.checkpoint
        if not copy_to or saved is None or Path(saved).name in self.progress.copies:
            return "", go_on
        return f", which is not copied to {copy_to}", f"{go_on} --copy-to {copy_to}, which copies it"


@dataclass(slots=True)
class Outcome:
    """The outcome of a request, filled in as soon as it is known.

    Attributes:
        dry_run: the commands that would be started, as text.
        end: the end of the job. From then on a signal does not change the exit code.
    """

    dry_run: str | None = None
    end: JobEnd | None = None

    @property
    def exit_code(self) -> int | None:
        """Return the command's exit code; None: the request has no outcome yet."""
        if self.end is not None:
            return self.end.ending.exit_code
        return None if self.dry_run is None else 0
