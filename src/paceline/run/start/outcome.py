"""What has become of a request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import list_checkpoints
from paceline.run.failures import format_failure
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervisor import THE_COMMAND, Ending


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    Args:
        run_dir: of the job.
        ending: how it ended.
        progress: how far it came.
        result: as JSON has it; None: another node writes it.
    """

    run_dir: Path
    ending: Ending
    progress: Progress
    result: dict[str, Any] | None = None

    def text(self) -> str:
        """Return what people are told."""
        if self.ending.status == "failed" and self.ending.cause is not None:
            failure = format_failure(self.ending.cause, self.ending.others)
            return f"{failure}{self._restarts()}{self._newest_checkpoint()}"
        if self.ending.status == "stopped":
            reason = ""
            if self.ending.stop_sent_to not in ("", THE_COMMAND):
                reason = f", since {self.ending.stop_sent_to} was sent SIGTERM"
            return f"stopped{reason}; {self._saved_part()}"
        if self.ending.status == "failed":
            return "the ranks had to be killed: they did not end by themselves"
        return f"done{self._before()}; {self.run_dir}"

    def _before(self) -> str:
        """Return when the steps of a job were taken that has taken none now."""
        if self.progress.last is not None or not self.progress.started:
            return ""
        before = max(self.progress.loaded, default=0)
        return f" before: no step was left after step {before}" if before else ", 0 steps were taken"

    def _restarts(self) -> str:
        number = self.progress.restarts
        return f"\n  (after {number} restart{'s' * (number > 1)})" if number else ""

    def _newest_checkpoint(self) -> str:
        newest = list_checkpoints(self.run_dir / "checkpoints")[:1]
        cause = self.ending.cause or {}
        if not newest or cause.get("saved_to"):  # the failure says where the last step is, and how to go on from it
            return ""
        return f"\n  Last checkpoint: {newest[0]}; go on with --resume --job {self.run_dir.name}"

    def _saved_part(self) -> str:
        """Return what of a stopped job is on the disk, and how to go on."""
        go_on = f"go on with --resume --job {self.run_dir.name}"
        if self.progress.has_stopped and self.progress.saved_step == self.progress.stopped_step:
            return f"saved as {self.progress.checkpoint}; {go_on}"
        earlier = list_checkpoints(self.run_dir / "checkpoints")
        if earlier:
            return f"its last steps are not saved, the newest checkpoint is {earlier[0]}; {go_on}"
        return f"nothing was saved; --resume --job {self.run_dir.name} starts it again at step 0"


@dataclass(slots=True)
class Outcome:
    """What has become of a request, filled in as soon as it is known.

    Attributes:
        dry_run: what would be started, as text.
        end: of the job. From then on a signal does not change the exit code.
    """

    dry_run: str | None = None
    end: JobEnd | None = None

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None: nothing has become of it yet."""
        if self.end is not None:
            return self.end.ending.exit_code
        return None if self.dry_run is None else 0
