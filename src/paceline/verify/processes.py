"""Start the processes of a verification, the reference's and a set of ranks for each mesh, and wait for their end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.local import can_fork, rank_environment
from paceline.launch.process_template import Start, Template
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, WorkloadError, last_error_of
from paceline.nouns.own_errors import own_error, own_line_of_text
from paceline.run.failures import in_one_line
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.supervisor import Ending, JobRequest, Supervisor
from paceline.verify.judge.order_of_collectives import NOTICE_S, HangWatch

_RANK = Path(__file__).parent / "ranks" / "rank_main.py"
_PRELOAD = (module_names.VERIFY_RANK, module_names.GRAPH_MODEL, module_names.FSDP_ADAPTER)
_REFUSALS = ("WorkloadError", "PlanError", "MeshError", "LossError", "DataError")


@dataclass(slots=True)
class WorldResult:
    """The end of a set of ranks."""

    ending: Ending
    hang: HangWatch

    @property
    def is_done(self) -> bool:
        """True if every rank did all it was asked."""
        return self.ending.status == "done"

    def check(self) -> None:
        """Raise the error by which the job itself refused, if that is how it ended; or that it was killed."""
        if self.hang.has_hung:
            return
        cause = self.ending.cause
        if cause is not None and cause["type"] in _REFUSALS and cause.get("parts"):
            raise WorkloadError(*cause["parts"])
        self.check_was_not_killed()

    def check_was_not_killed(self) -> None:
        """Raise WorkloadError when a rank was ended from outside, which says nothing about the plan."""
        if self.hang.has_hung:
            return
        if self.ending.status == "stopped":
            raise WorkloadError("the ranks should take their steps", "they were stopped", "start the command again")
        if any(f"was ended by {name}" in self.first_failure() for name in ("SIGKILL", "SIGTERM")):
            fix = "see `dmesg` whether memory ran out; verify a smaller batch or a shallower model"
            raise WorkloadError("the ranks should take their steps", self.first_failure(), fix)

    def own_failure(self) -> PacelineError | None:
        """Return the error of ours by which a rank ended, if that is how the job ended; write its traceback."""
        cause = self.ending.cause
        if cause is None or cause["is_paceline"]:
            return None
        line = own_line_of_text(cause["traceback"])
        if not line:
            return None
        sys.stderr.write(cause["traceback"])
        return own_error(line, self.first_failure())

    def first_failure(self) -> str:
        """Describe the first failure in one line."""
        cause = self.ending.cause
        if cause is None:
            return "it was stopped"
        step = "" if cause["step"] is None else f" (step {cause['step']})"
        return f"{in_one_line(cause)}{'' if cause['is_paceline'] else step}"


@contextmanager
def one_import(preload: Sequence[str]) -> Iterator[Start]:
    """Import torch once, for all processes that are started by what is yielded, where a process can be forked."""
    if not can_fork():
        yield subprocess.Popen
        return
    with Template([*_PRELOAD, *preload]) as template:
        yield template.start


@dataclass(frozen=True, slots=True)
class Processes:
    """Starts the processes of one verification, which all have its folder and the user's program.

    Attributes:
        start: the function that starts a process.
        folder: the folder into which the processes write.
        program: the user's program, as the settings have it.
        preload: modules that ranks import before they run it.
    """

    start: Start
    folder: Path
    program: dict[str, Any]
    preload: Sequence[str] = ()

    def _write_settings(self, name: str, settings: dict[str, Any]) -> Path:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"folder": str(self.folder), **self.program, **settings}))
        return path

    @contextmanager
    def child(self, module: str, name: str, task: str, **settings: Any) -> Iterator[Callable[[], None]]:
        """Start a process with torch that is no rank, with the environment of the only process on this host.

        Args:
            module: the module that it runs.
            name: the name of the file with its settings.
            task: the task of the process, in the words of an error.
            settings: the entries of its settings.

        Yields:
            A function that waits for its end. It raises WorkloadError where the child refuses, or fails; PacelineError
            where that is an error of Paceline's.
        """
        path = self._write_settings(name, settings)
        output = path.with_suffix(".txt")
        with output.open("w") as file:
            command = [sys.executable, "-m", module, str(path)]
            number = file.fileno()
            process = self.start(command, env=rank_environment(1), stdout=number, stderr=number, pass_fds=())
        try:
            yield lambda: self._check_end(process.wait(), output.read_text(errors="replace"), task)
        finally:  # after Ctrl-C too: no child outlives the command
            process.kill()
            process.wait()

    def _check_end(self, status: int, written: str, task: str) -> None:
        refused = self.folder / "refused.json"
        if refused.exists():
            answer = json.loads(refused.read_text())
            if not answer["is_own"]:
                raise WorkloadError(**answer["parts"])
            sys.stderr.write(written)  # with the traceback
            raise PacelineError(**answer["parts"])
        if not status:
            return
        if line := own_line_of_text(written):
            sys.stderr.write(written)
            raise own_error(line, last_error_of(written, ""))
        found = last_error_of(written, f"it ended with {status}")
        if status == -signal.SIGKILL:  # after which nothing is written
            found = "it was killed, as the kernel does for want of memory"
        fix = "see that the file trains alone: python FILE; verify a smaller model"
        raise WorkloadError(f"{task} should end", found, fix)

    def run_world(self, name: str, ranks: int, waits: Callable[[], None], **settings: Any) -> WorldResult:
        """Start ranks and wait for their end, or until they hang; `waits` is called meanwhile."""
        path = self._write_settings(name, settings)
        run_dir = self.folder / f"{name}-run"
        (run_dir / "failures").mkdir(parents=True)
        hang = HangWatch(run_dir, ranks)

        def is_hung() -> bool:
            waits()
            return hang()

        with (run_dir / "output.txt").open("w") as output:
            preload = (*_PRELOAD, *self.preload)
            request = JobRequest(
                _RANK, [str(path)], ranks, run_dir, preload=preload, start=self.start, stall_notice_s=NOTICE_S
            )
            supervisor = Supervisor(request, Screen(output, output), is_hung=is_hung)
            try:
                ending, _ = supervisor.run()
            finally:
                supervisor.restore_signals()
        return WorldResult(ending, hang)
