"""Run a rank's process: the user's file, then the end of its jobs. Failures go to the run directory."""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from paceline.checkpoint.owner import RunTakenError, keep_lock
from paceline.comm import api
from paceline.launch.process_exit import die_with_parent, exit_process
from paceline.launch.torchrun_variables import ALONE, AS_TORCHRUN, WITH_VARIABLES
from paceline.nouns import module_names
from paceline.nouns.errors import MEETS_NOT, DataError, PacelineError, PeerLostError, UsageError, WorkloadError
from paceline.nouns.own_errors import own_line
from paceline.nouns.reading import write_whole
from paceline.nouns.user_program import HOROVOD, UserProgram
from paceline.rendezvous.launcher_env import PROCESS
from paceline.run.failures import SUPERVISED, UNWRITTEN
from paceline.run.rank.watchdog import begin_watching
from paceline.train import open_jobs as jobs
from paceline.train.base_job import Stopped
from paceline.train.compiler_import import defer_compiler_import
from paceline.train.first_step import end_alone, leave_out_unended
from paceline.train.job import train_workload
from paceline.train.prepare import check_owner

# The advice for torchrun's variables, and the beginnings of torch's messages about a missing process group.
_OF_TORCHRUN = {
    **{name: f"write PACELINE_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")},
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "leave it out; the ranks find each other without it"),
}
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_OF_PROCESS_GROUP = (
    "Default process group has not been initialized",
    "Error initializing torch.distributed using env://",
)


def run_rank(script: str, arguments: list[str], stopped_code: int = 0) -> int:
    """Run `script` as `__main__`, and return the exit code. A file that only declares `workload` gets the plain loop.

    Args:
        script, arguments: the path of the user's file, and its arguments.
        stopped_code: the exit code of a job that was asked to stop, and has been saved before its end.
    """
    keep_lock(os.environ)
    as_torchrun = os.environ.pop(AS_TORCHRUN, "")  # processes that the file starts are other programs
    if as_torchrun:
        return _run_plain(script, arguments, as_torchrun)
    run_dir = os.environ.get("PACELINE_RUN_DIR")
    try:
        watchdog = begin_watching(os.environ, Path(run_dir)) if run_dir else None
    except PacelineError as error:  # outside of `_run_to_end`, which reports all other errors
        return failed(error)
    try:
        return _run_to_end(script, arguments, stopped_code)
    finally:
        if watchdog is not None:
            watchdog.stop()


def _run_plain(script: str, arguments: list[str], as_torchrun: str) -> int:
    """Run a script that distributes its training without Paceline, as torchrun does, and return the exit code.

    Args:
        script, arguments: the path of the user's file, and its arguments.
        as_torchrun: the value of AS_TORCHRUN.
    """
    program = UserProgram.of_this_process(script)
    program.enter([*_rank_option(arguments, as_torchrun), *arguments])
    os.environ[PROCESS] = str(os.getpid())
    try:
        program.run()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        return failed(error, is_plain=True)
    return 0


def _rank_option(arguments: list[str], as_torchrun: str) -> list[str]:
    """Return the option for the local rank, as torch.distributed.launch hands it over, unless the user has given it."""
    if as_torchrun in (WITH_VARIABLES, ALONE) or any(word.startswith(as_torchrun) for word in arguments):
        return []
    return [f"{as_torchrun}={os.environ['LOCAL_RANK']}"]


def _run_to_end(script: str, arguments: list[str], stopped_code: int) -> int:
    program = UserProgram.of_this_process(script)
    program.enter(arguments)
    if HOROVOD in os.environ:
        importlib.import_module(module_names.HOROVOD_ALIAS).install()
    defer_compiler_import()  # before the file makes an optimizer
    os.environ[PROCESS] = str(os.getpid())  # processes that the file starts have it, and are others
    try:
        was_stopped = _run_file(program)
        jobs.close_open_jobs()  # writes the last checkpoint, so a rank that can't has failed
    except BaseException as error:
        return failed(error)
    if was_stopped:
        return stopped_code
    api.shutdown()
    return 0


def _run_file(program: UserProgram) -> bool:
    """Run a program, and the plain loop where it made no job. Return True if the job was asked to stop."""
    try:
        names = program.run()
        if not jobs.was_any_made():
            train_workload(_workload(program.script, names))
    except Stopped:
        return True
    except SystemExit as exit_:
        if exit_.code not in (None, 0):  # sys.exit() and sys.exit(0) are an end like any other
            raise
    return False


def _workload(script: str, names: dict[str, Any]) -> Any:
    from paceline.nouns.workload import Workload

    workload = names.get("workload")
    if isinstance(workload, Workload):
        return workload
    if api.is_initialized() or HOROVOD in os.environ:
        return None  # it used only the MPI-style functions, or Horovod's names
    found = [name for name, value in names.items() if isinstance(value, Workload)]
    other_name = f"; its Workload is named {found[0]}" if found else ""
    raise WorkloadError(
        f"{script} should train something",
        f"it made no job and has no variable `workload`{other_name}",
        "declare workload = paceline.Workload(...), or call paceline.distribute with it in a loop of your own, which "
        "stands outside of functions that nobody calls",
    )


def failed(error: BaseException, run_dir: Path | None = None, is_plain: bool = False) -> int:
    """Write a failure to `failures/RANK.json`, where the supervisor looks, and return the exit code.

    Args:
        error: the exception that ended the rank.
        run_dir: the run directory to write to; None: the one that this rank's variables name.
        is_plain: True for a script that distributes its training without Paceline: our advice is none for it.
    """
    end_alone(error)
    leave_out_unended()
    if not is_plain:
        error = _explained(error)
    job = jobs.newest()
    if job is not None:
        job.times_file.flush()  # the steps before the failure
    rank = int(os.environ.get("PACELINE_RANK", "0"))
    failure = _failure(error, rank)
    folder = Path(run_dir or os.environ["PACELINE_RUN_DIR"], "failures")
    try:
        check_owner(os.environ)  # a failure of this job is none of another's
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{rank}.json", json.dumps(failure))
    except (OSError, RunTakenError) as reason:
        # A full disk must not swallow the cause: it goes where the rank's output goes, where a supervisor reads it.
        text = str(failure["traceback"])
        if isinstance(error, PacelineError):
            text = f"{error}\n"
        reason_text = reason.found if isinstance(reason, RunTakenError) else reason.strerror
        text += f"paceline: this could not be written to {folder} ({reason_text})"
        if SUPERVISED in os.environ:
            text = f"{UNWRITTEN}{json.dumps(failure)}"
        print(text, file=sys.stderr, flush=True)
    jobs.save_after_failure(error)  # now that the cause is on the disk: another rank may end before this one
    return int(failure["exit_code"])


def _failure(error: BaseException, rank: int) -> dict[str, Any]:
    """Return the record of an error in the form that `run/failures.py` reads."""
    failure: dict[str, Any] = {
        "rank": rank,
        "step": None,
        "at": time.time_ns() / 1e9,
        "type": type(error).__name__,
        "message": str(error),
        "is_peer_loss": isinstance(error, PeerLostError),
        "is_paceline": isinstance(error, PacelineError),
        "where": None,
        "traceback": _shown(error),
        "exit_code": 1,
        "parts": None,
        "saved_to": getattr(error, "saved_to", None),
    }
    if isinstance(error, PacelineError):
        # The error knows best: it may be about an earlier step, or about another rank.
        failure["step"] = error.step
        failure["exit_code"] = error.exit_code
        failure["parts"] = [error.asked, error.found, error.fix]
        if error.rank is not None:
            failure["rank"] = error.rank
    else:
        failure["step"] = jobs.current_step()
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_user_code(frame.filename):
            failure["where"] = f"{frame.filename}:{frame.lineno}"  # of several the innermost, which comes last
    if isinstance(error, SystemExit):
        # It has said what it had to say, as for a wrong argument; a traceback would hide that.
        failure["traceback"] = ""
        at = f" at {failure['where']}" if failure["where"] else ""
        failure["message"] = f"rank {rank} ended by sys.exit({error.code!r}){at}"
        failure["exit_code"] = MEETS_NOT if error.code == MEETS_NOT else 1  # others may mean something to a launcher
    return failure


def _explained(error: BaseException) -> BaseException:
    """Return an error with advice to the user, where that is known; else `error` itself.

    Of a process of a data loader that has died torch raises its own, wherever the main thread stands
    (torch/utils/data/_utils/signal_handling.py).
    """
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "horovod":
        found = f"there is no module {error.name}"
        fix = (
            "start the file by `paceline horovodrun -np 2 python FILE`, which has Horovod's names; see docs/horovod.md"
        )
        return UsageError("the file imports horovod", found, fix).with_traceback(error.__traceback__)
    better_known = _of_another_launcher(error, text)
    if better_known is not None:
        return better_known.at(step=jobs.current_step()).with_traceback(error.__traceback__)
    if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker (pid"):
        return error
    explained = DataError(
        "a data loader's process should live as long as its rank",
        text.splitlines()[0].rstrip(". "),
        "was it the kernel for want of memory (see `dmesg`), or somebody's kill? Go on with --resume",
    ).at(step=jobs.current_step())
    return explained.with_traceback(error.__traceback__)


def _of_another_launcher(error: BaseException, text: str) -> PacelineError | None:
    """Return the error of a file that asks torch.distributed, or the variables of torchrun, for its rank; else None."""
    if isinstance(error, KeyError) and error.args and error.args[0] in _OF_TORCHRUN:
        name = error.args[0]
        return UsageError(f"the file reads the variable {name}", "this launcher does not set it", _OF_TORCHRUN[name])
    if isinstance(error, ValueError) and text.startswith(_OF_PROCESS_GROUP):
        return UsageError(
            "Paceline's ranks have a process group once the file has called paceline.prepare, distribute or init",
            text.splitlines()[0],
            "leave out init_process_group, DistributedDataParallel and DistributedSampler, and ask for the rank after "
            "that call: job.rank, job.size; see docs/migrate.md",
        )
    return None


def _shown(error: BaseException) -> str:
    """Return an error's traceback; without Paceline's frames where the error is of the user's code, or of torch's."""
    trace = traceback.TracebackException.from_exception(error)
    if not own_line(error):
        waiting = [trace]
        for exception in waiting:  # it grows
            frames = [frame for frame in exception.stack if not _is_between(frame.filename)]
            exception.stack[:] = frames or exception.stack
            waiting += [linked for linked in (exception.__cause__, exception.__context__) if linked is not None]
    return "".join(trace.format())


def _is_between(file: str) -> bool:
    """Return True for a file of Paceline, and for Python's own that runs the user's for it."""
    return file.startswith((_PACKAGE, "<frozen runpy>"))


def _is_user_code(file: str) -> bool:
    """Return True for a file that is neither installed, nor Paceline's, nor of Python's own library, as copy.py."""
    if "site-packages" in file or f"{os.sep}paceline{os.sep}" in file or file.startswith("<"):
        return False
    return not file.startswith(sysconfig.get_path("stdlib") + os.sep)


def main() -> NoReturn:
    """Run a rank where forking is unsafe, and the fork server starts fresh interpreters."""
    from paceline.run.rank.forkserver import tell_finished

    die_with_parent()
    finished = int(os.environ.pop("PACELINE_FINISHED"))
    os.set_inheritable(finished, False)
    code = run_rank(sys.argv[1], sys.argv[2:])
    exit_process(code, partial(tell_finished, finished))


if __name__ == "__main__":
    main()
