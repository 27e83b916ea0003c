"""Call a function that `paceline.launch` has sent to this rank: `python -m paceline.run.rank.function FD`."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from paceline.checkpoint.owner import keep_lock
from paceline.comm import api
from paceline.launch.process_exit import die_with_parent, exit_process
from paceline.nouns.errors import PacelineError
from paceline.nouns.reading import read_text
from paceline.run.plain_values import RETURNED, check_value, write_value
from paceline.run.rank.watchdog import begin_watching
from paceline.run.rank.worker import failed
from paceline.run.sent_function import SentFunction, name_of
from paceline.train import open_jobs as jobs
from paceline.train.base_job import Stopped
from paceline.train.compiler_import import defer_compiler_import
from paceline.train.event_log import FOLDER


def run_function(descriptor: int) -> int:
    """Call the function, and return this process's exit code.

    Args:
        descriptor: the file descriptor from which the function is read.
    """
    keep_lock(os.environ)
    run_dir = Path(os.environ["PACELINE_RUN_DIR"])
    try:
        watchdog = begin_watching(os.environ, run_dir)
    except PacelineError as error:
        return failed(error, run_dir)
    try:
        _call(descriptor, run_dir)
    except BaseException as error:
        return failed(_without_our_frames(error), run_dir)
    finally:
        watchdog.stop()
    return 0


def _call(descriptor: int, run_dir: Path) -> None:
    sent = SentFunction.read(descriptor)
    os.close(descriptor)
    if not sent.is_kept:
        # A job without a run directory writes no checkpoint. Its plan and its events have their places all the same.
        os.environ["PACELINE_PLAN"] = read_text(run_dir / "plan.json")
        os.environ[FOLDER] = os.environ.pop("PACELINE_RUN_DIR")
    defer_compiler_import()  # before the function makes an optimizer
    function, arguments = sent.load()
    sys.argv = [name_of(function)]
    try:
        value = function(*arguments)
    except Stopped:
        return
    check_value(value, name_of(function))  # while its job is open: after an error its last step is saved
    jobs.close_open_jobs()  # writes the last checkpoint, so a rank that can't has failed
    if os.environ.get("PACELINE_RANK") == "0":
        write_value(run_dir / RETURNED, value, name_of(function))
    api.shutdown()


def _without_our_frames(error: BaseException) -> BaseException:
    """Return the error with a traceback that begins in the user's function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def main() -> NoReturn:
    """Run a rank where forking is unsafe, and the fork server starts fresh interpreters."""
    from paceline.run.rank.forkserver import tell_finished

    die_with_parent()
    finished = int(os.environ.pop("PACELINE_FINISHED"))
    os.set_inheritable(finished, False)
    exit_process(run_function(int(sys.argv[1])), partial(tell_finished, finished))


if __name__ == "__main__":
    main()
