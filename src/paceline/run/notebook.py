"""Run a function on several ranks of this host, from a notebook, a REPL or any Python file: `paceline.launch`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.owner import Ownership
from paceline.launch.plan_choice import PlanRequest, choose_plan
from paceline.nouns import arguments as arguments_of
from paceline.nouns.errors import RankFailedError, UsageError
from paceline.nouns.parts import shown
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.directory import RunChoice
from paceline.run.failures import format_failure, format_failure_briefly
from paceline.run.job_settings import GRACE_S
from paceline.run.plain_values import RETURNED, read_value
from paceline.run.private import PrivateFolder
from paceline.run.request import find_launcher
from paceline.run.sent_function import LIBRARY, name_of, pack
from paceline.run.supervise.progress import CellScreen, Progress, Screen, label_of, notebook_shell
from paceline.run.supervise.supervised_job import run_job
from paceline.run.supervise.supervisor import Ending, JobRequest, private_folder

_CALL = "launch"
_CELL = re.compile(r'File "([^"]+)"')  # a file in a traceback


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int | None = None,
    plan: str = "",
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> Any:
    """Call a function on several ranks of this host, and return the value that rank 0's call returned.

    For notebooks, where there is no file that `paceline run` could start; it works in a file and a REPL too. Each rank
    is a new process. The function, with what it refers to, is sent there by cloudpickle (`pip install
    'paceline[notebook]'`), so it may be defined in a cell. In it, `distribute`, `prepare` and the collectives do what
    they do under `paceline run -n RANKS`. Progress and the ranks' output are shown while it runs. An interrupt ends all
    ranks. Nothing is left behind.

    What the function changes outside of itself is changed only in the ranks: return what you need.

    Args:
        function: the function that is called on every rank.
        arguments: the arguments of the function; each rank has a copy of them.
        ranks: the number of ranks; None: as many as `plan` covers, or one.
        plan: the parallelism, as `--plan` has it, such as "shard=2".
        run_dir: a folder for the job's events and checkpoints, as `paceline run` keeps one. None: none of them is kept,
            and nothing is saved but what the function saves.
        resume: True to go on from the newest checkpoint in `run_dir`.

    Returns:
        What rank 0's call returned: None, numbers, texts, bytes, lists, tuples, dicts, tensors or arrays. Tensors come
        back on the CPU.

    Raises:
        RankFailedError: a rank failed. It has that rank's error and traceback; the other ranks were ended.
        UsageError: the function can't be sent or returned something else, this process is a rank itself, `run_dir`
            has a job and `resume` is False, a living job has `run_dir`, or its name is none that a job has.
        MeshError: the plan does not fit the number of ranks.
        PlanError: the plan contradicts itself.
        CheckpointError: `run_dir` has checkpoints, and none is whole.
        KeyboardInterrupt: it was interrupted.

    Examples:
        >>> def train(rate):
        ...     job = paceline.distribute(workload)
        ...     for group in job.optimizer.param_groups:
        ...         group["lr"] = rate
        ...     for batch in job.batches():
        ...         mean = job.step(batch)
        ...     return {"loss": mean, "ranks": job.size, "weights": job.whole_model().state_dict()}
        >>> result = paceline.launch(train, 0.1, ranks=2)
        [0] paceline: first step checked: equal to one process
        >>> result["ranks"], result["weights"]["weight"].shape
        (2, torch.Size([1, 4]))
    """
    _check(function)
    ranks = None if ranks is None else arguments_of.whole_number(_CALL, "ranks", ranks, 1)
    plan = arguments_of.text(_CALL, "plan", plan, "shard=2")
    run_dir = None if run_dir is None else arguments_of.path(_CALL, "run_dir", run_dir)
    resume = arguments_of.flag(_CALL, "resume", resume)
    shell = notebook_shell()
    screen = CellScreen() if shell is not None else Screen(sys.stdout, sys.stderr)
    chosen = choose_plan(PlanRequest(ranks=ranks, text=plan), screen.say)
    if chosen.server:
        raise UsageError(
            "paceline.launch can't start parameter servers",
            f"the plan has server={chosen.server}",
            "leave server out, or write a file and start it with `paceline run`",
        )
    sent = pack(function, arguments, run_dir is not None)
    with _private() as private, contextlib.ExitStack() as stack:
        script = _source_of(function)
        owned, checkpoint = _run_folder(run_dir, resume, script, screen)
        if owned is not None:
            stack.enter_context(owned)
        folder = private.path / "run" if owned is None else owned.folder
        (folder / "failures").mkdir(parents=True, exist_ok=True)
        descriptor = sent.write()
        request = JobRequest(
            script,
            (),
            chosen.world_size,
            folder,
            checkpoint,
            [LIBRARY],
            GRACE_S if run_dir is not None else 0.0,
            private=private,
            function=descriptor,
            owned=owned,
        )
        try:
            ending, progress = _run(chosen, request, screen)
        finally:
            os.close(descriptor)
        if ending.status == "done":
            return read_value(folder / RETURNED)
        error = _error_of(ending, progress, name_of(function), shell)
        raise error


def _run(plan: Plan, request: JobRequest, screen: Screen) -> tuple[Ending, Progress]:
    (request.run_dir / RETURNED).unlink(missing_ok=True)  # an earlier start in this folder may have left it
    ending, progress, _ = run_job(plan, request, screen)
    return ending, progress


@contextlib.contextmanager
def _private() -> Iterator[PrivateFolder]:
    """Make the job's private folder, and remove it when the job has ended."""
    private = private_folder()
    try:
        yield private
    finally:
        private.remove()


def _check(function: object) -> None:
    """Raise UsageError where the function can't be launched from here."""
    if not callable(function):
        raise UsageError(
            "paceline.launch should be handed a function",
            f"it is {shown(function)}",
            "write paceline.launch(train, ARGUMENTS, ranks=2), without brackets after the function's name",
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "paceline.launch should be called in the main thread",
            f"this is the thread {threading.current_thread().name}",
            "call it in the main thread, which alone can be interrupted",
        )
    if "PACELINE_RANK" in os.environ:
        raise UsageError(
            "paceline.launch should be called in a process that is no rank",
            f"this is rank {os.environ['PACELINE_RANK']} of a job",
            "call the function itself: it runs on every rank already",
        )
    launcher = find_launcher(None, os.environ)
    if launcher is not None:
        raise UsageError(
            "paceline.launch should be called in a process that no launcher started",
            f"{launcher.source} started it as a part of a job",
            "call the function itself, or start this program with python alone",
        )


def _run_folder(
    run_dir: str | Path | None, resume: bool, script: Path, screen: Screen
) -> tuple[Ownership | None, Path | None]:
    """Take the run directory, and return it with the checkpoint to go on from; None: there is no such thing."""
    if run_dir is None:
        if resume:
            raise UsageError("resume=True needs a run directory", "run_dir is None", "name it with run_dir")
        return None, None
    folder = Path(os.path.abspath(run_dir))  # `..` is not the name of a folder
    has_run = (folder / "plan.json").exists()
    if resume and not has_run:
        raise UsageError(f"can't resume the job in {folder}", "there is none", "leave resume=True out to start one")
    if has_run and not resume:
        raise UsageError(
            f"can't start a job in {folder}", "there is one", "write resume=True to go on with it, or another run_dir"
        )
    choice = RunChoice(runs=folder.parent, job=folder.name, resume=resume, naming="run_dir")
    return directory.choose_run(choice, script, lambda text: screen.say(f"paceline: {text}"))


def _source_of(function: Callable[..., Any]) -> Path:
    """Return the path of the function's code; a notebook's cell has a name of a file, too."""
    code = getattr(function, "__code__", None)
    return Path(getattr(code, "co_filename", name_of(function)))


def _error_of(ending: Ending, progress: Progress, name: str, shell: Any) -> BaseException:
    """Return the exception that says how a job ended that is not done."""
    if ending.status == "stopped":
        number = ending.exit_code - 128
        if ending.exit_code == 0 or number == signal.SIGTERM:
            return SystemExit(ending.exit_code)  # asked to end by SIGTERM, and saved if there is where
        saved = f"saved as {progress.checkpoint}; resume=True goes on" if progress.has_stopped else ""
        return KeyboardInterrupt(saved) if saved else KeyboardInterrupt()
    cause = ending.cause
    if cause is None:
        return RankFailedError(f"{name} should run to its end", "its ranks had to be killed", "look at their output")
    text = _with_cells(format_failure(cause, ending.peer_count), shell)
    if cause.get("parts"):
        asked, found, fix = cause["parts"]
    elif cause["traceback"]:
        asked = f"{name} should run to its end on every rank"
        found = f"{cause['type']}: {cause['message']}" if cause["message"] else cause["type"]
        fix = "look at the rank's traceback"
    else:
        asked, found, fix = f"{name} should run to its end on every rank", cause["message"], "look at its output"
    trace = ""
    if cause["traceback"] and not cause["is_paceline"]:
        briefly, _, _ = format_failure_briefly(cause, "failed first").partition(":")
        trace = f"{_with_cells(cause['traceback'].rstrip(), shell)}\n\n{briefly}"
    error = RankFailedError(asked, found, fix)
    error.at(rank=cause["rank"], step=cause["step"])
    error.shown = trace or text
    if trace:
        error.add_note(trace)
    return error


def _with_cells(text: str, shell: Any) -> str:
    """Return a traceback in which a notebook's cells have the names that users know: `Cell In[3]`."""

    def label(match: re.Match[str]) -> str:
        return label_of(shell, match[1]) or match[0]

    return _CELL.sub(label, text) if shell is not None else text
