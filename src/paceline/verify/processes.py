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
from paceline.launch.template import Process, Start, Template
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, WorkloadError, last_error_of
from paceline.nouns.own_errors import own_error, own_line_of_text
from paceline.run.failures import in_one_line
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.supervisor import Ending, JobRequest, Supervisor
from paceline.verify.judge.order import HangWatch

WORKLOAD_RANK = Path(__file__).parent / "ranks" / "rank_main.py"
LOOP_RANK = Path(__file__).parent / "ranks" / "loop_main.py"
_PRELOAD = (module_names.VERIFY_RANK, module_names.GRAPH_MODEL, module_names.FSDP_ADAPTER)
_REFUSALS = ("WorkloadError", "PlanError", "MeshError", "LossError", "DataError")


@dataclass(slots=True)
class WorldResult:
    """The end of a set of ranks."""

    ending: Ending
    hang: HangWatch
    folder: Path

    @property
    def is_done(self) -> bool:
        """True if every rank did all it was asked."""
        return self.ending.status == "done"

    def refusal(self) -> WorkloadError | None:
        """Return the error by which the job itself refused, if that is how it ended."""
        cause = self.ending.cause
        if cause is None or cause["type"] not in _REFUSALS or not cause.get("parts"):
            return None
        return WorkloadError(*cause["parts"])

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


def write_settings(folder: Path, name: str, **settings: Any) -> Path:
    """Write the file that tells a child what to do, and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"folder": str(folder), **settings}))
    return path


@dataclass(slots=True)
class Child:
    """A process of a verification that is no rank, and the file that has what it wrote."""

    process: Process
    output: Path

    def end(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait()


@contextmanager
def one_import(preload: Sequence[str]) -> Iterator[Start]:
    """Import torch once, for all processes that are started by what is yielded, where a process can be forked."""
    if not can_fork():
        yield subprocess.Popen
        return
    with Template([*_PRELOAD, *preload]) as template:
        yield template.start


def start_child(start: Start, module: str, settings: Path) -> Child:
    """Start a child process with torch, and with the environment of a rank that is alone on this host."""
    output = settings.with_suffix(".txt")
    with output.open("w") as file:
        command = [sys.executable, "-m", module, str(settings)]
        process = start(command, env=rank_environment(1), stdout=file.fileno(), stderr=file.fileno(), pass_fds=())
    return Child(process, output)


def finish_child(child: Child, folder: Path, what: str) -> None:
    """Wait for a child.

    Raises:
        WorkloadError: it refused, or failed.
        PacelineError: it failed by an error of ours.
    """
    try:
        status = child.process.wait()
    except BaseException:  # Ctrl-C too: no child outlives the command
        child.end()
        raise
    written = child.output.read_text(errors="replace")
    if (folder / "refused.json").exists():
        refused = json.loads((folder / "refused.json").read_text())
        if not refused["is_own"]:
            raise WorkloadError(**refused["parts"])
        sys.stderr.write(written)  # with the traceback
        raise PacelineError(**refused["parts"])
    if status and (line := own_line_of_text(written)):
        sys.stderr.write(written)
        raise own_error(line, last_error_of(written, ""))
    if status:
        found = last_error_of(written, f"it ended with {status}")
        if status == -signal.SIGKILL:  # after which nothing is written
            found = "it was killed, as the kernel does for want of memory"
        fix = "see that the file trains alone: python FILE; verify a smaller model"
        raise WorkloadError(f"{what} should end", found, fix)


def run_world(  # noqa: PLR0913 (each is another fact of the ranks)
    start: Start,
    folder: Path,
    settings: Path,
    ranks: int,
    preload: Sequence[str],
    waits: Callable[[], None],
    script: Path = WORKLOAD_RANK,
) -> WorldResult:
    """Start ranks of a script and wait for their end, or until they hang; `waits` is called meanwhile."""
    run_dir = folder / f"{settings.stem}-run"
    (run_dir / "failures").mkdir(parents=True)
    # Heartbeats of the ranks before stand still: HangWatch would take them for ranks that wait.
    for old in folder.glob("beat-*.json"):
        old.unlink()
    hang = HangWatch(folder, ranks)

    def is_hung() -> bool:
        waits()
        return hang()

    with (run_dir / "output.txt").open("w") as output:
        request = JobRequest(script, [str(settings)], ranks, run_dir, preload=(*_PRELOAD, *preload), start=start)
        supervisor = Supervisor(request, Screen(output, output), is_hung=is_hung)
        try:
            ending, _ = supervisor.run()
        finally:
            supervisor.restore_signals()
    return WorldResult(ending, hang, folder)
