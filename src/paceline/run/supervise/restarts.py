"""Start a job again after a rank has died: from its newest checkpoint, at most as often as was asked for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.nouns.errors import MEETS_NOT, PacelineError, UsageError
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.failures import format_failure
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.supervisor import THE_COMMAND, Ending, HostAssignment, JobRequest, Supervisor

VARIABLE = "PACELINE_RESTART"  # the ranks' variable with the number of the restart, which the event `start` has, too


def no_assignments(restart: int) -> Sequence[HostAssignment]:
    """Return the hosts of a job whose ranks are all on this host."""
    return ()


@dataclass(frozen=True, slots=True)
class Restarts:
    """The number of restarts of a job, and a function that prepares the hosts of each.

    Args:
        most: the largest number of restarts, however far each of them comes; 0: none.
        assignments: a function that returns the hosts of a restart, by its number from 1, ready to start ranks.
    """

    most: int = 0
    assignments: Callable[[int], Sequence[HostAssignment]] = no_assignments


@dataclass(slots=True)
class Tries:
    """A job's tries: the first, and its restarts.

    Each has a supervisor of its own. A signal between two of them ends the job, too: the handlers of the first
    supervisor stay until `restore_signals`, and all of them append to one list of signals.

    Args:
        plan: the plan of the job.
        restarts: the number of restarts, and their hosts.
        screen: the screen that shows messages and output to the user.
    """

    plan: Plan
    restarts: Restarts
    screen: Screen
    asked_to_stop: list[int] = field(default_factory=list)
    handlers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    first: dict[str, Any] | None = None  # the record of the first step of all tries
    reached: int = -1  # the last step of the newest try that took one

    def run(self, request: JobRequest) -> tuple[Ending, Progress]:
        """Run the job until it is done, was asked to stop, or has no restart left."""
        restart = 0
        while True:
            ending, progress = self._try(request)
            progress.restarts = restart
            self.first = self.first or progress.first
            progress.first = self.first
            # Whoever asked for a stop does not want another try.
            is_last = restart == self.restarts.most or request.is_taken
            if ending.status != "failed" or self.asked_to_stop or is_last:
                return ending, progress
            why_not = self._why_not(ending, progress, restart, request.is_plain)
            if why_not:
                self.screen.say(f"paceline: no restart: {why_not}")
                return ending, progress
            restart += 1
            next_request = self._prepared(request, ending, progress, restart)
            if next_request is None:
                return ending, progress
            if self.asked_to_stop:
                stopped = Ending("stopped", 128 + self.asked_to_stop[0], stop_sent_to=THE_COMMAND)
                return stopped, progress
            request = next_request

    def _try(self, request: JobRequest) -> tuple[Ending, Progress]:
        supervisor = Supervisor(request, self.screen, asked_to_stop=self.asked_to_stop)
        self.handlers.callback(supervisor.restore_signals)
        return supervisor.run()

    def restore_signals(self) -> None:
        """Set the signal handlers that were there before `run`."""
        self.handlers.close()

    def _why_not(self, ending: Ending, progress: Progress, restart: int, is_plain: bool) -> str:
        """Return the reason why the job is not started again; "" where it is. Steps of a plain script are not known."""
        cause = ending.cause
        if cause is None:
            return "its ranks were killed on purpose"
        if cause["is_paceline"] and ending.exit_code == MEETS_NOT:
            return "what the job asks for would be refused again"
        # A file's own error before the first step would come again. A process that a signal ended may do better.
        is_before_first_step = restart == 0 and progress.last is None and not is_plain
        if is_before_first_step and not _died_silently(ending):
            return "the job failed before its first step, and would do so again"
        return ""

    def _prepared(self, request: JobRequest, ending: Ending, progress: Progress, restart: int) -> JobRequest | None:
        """Print that the job starts again, and from where, and return its request; None: it can't be started."""
        assert ending.cause is not None
        self.screen.say(f"paceline: {format_failure(ending.cause, ending.peer_count)}")
        run_dir = request.run_dir
        remarks: list[str] = []
        try:
            if request.owned is not None:
                request.owned.renew()
            resume = directory.find_resume_point(run_dir, remarks.append)
            directory.write_start(run_dir, self.plan, request.script, request.arguments)
            assignments = self.restarts.assignments(restart)
        except PacelineError as error:
            self.screen.say(f"paceline: no restart: {error}")
            return None
        if resume is not None:
            for remark in remarks:
                self.screen.say(f"paceline: {remark}")
        origin = f"from {resume.name}" if resume else "from the beginning: the job has no checkpoint"
        if request.is_plain or request.resumes_itself:
            origin = "from the beginning of the script"
        if (run_dir / directory.COMMITTED).exists():
            origin = "from its last commit"
        self.screen.say(f"paceline: restart {restart} of {self.restarts.most}, {origin}{self._standstill(progress)}")
        environment = {**request.environment, VARIABLE: str(restart)}
        return dataclasses.replace(request, resume=resume, assignments=assignments, environment=environment)

    def _standstill(self, progress: Progress) -> str:
        """Return a remark where a restart took no step that the tries before it had not taken; else ""."""
        last = progress.last["step"] if progress.last else -1
        before = self.reached
        self.reached = max(before, last)
        if before < 0 or last > before:
            return ""
        return f"; the last try came no further than step {before}"


def check_restarts(most: int) -> None:
    """Raise UsageError unless a job can be started again so often."""
    if most < 0:
        raise UsageError(f"--max-restarts {most}", "it is no number of restarts", "write 0 or more")


def _died_silently(ending: Ending) -> bool:
    """Return True if a process ended without an error of its own, as by a signal."""
    cause = ending.cause
    assert cause is not None
    return ending.is_host_failure or (cause["type"] == "ProcessDied" and not cause["is_paceline"])
