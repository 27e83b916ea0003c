"""End a process that has imported torch without finalizing the interpreter.

A thread of torch's may still free the last collective's tensors while the interpreter is finalized. It then asks for
the GIL, and Python ends it by unwinding its stack; libstdc++ takes that for an uncaught exception and aborts the
process ("terminate called without an active exception"). Measured with Gloo on a busy machine: one rank in twelve.
`multiprocessing` ends its forked children in the same order as this module, and for the same kind of reason.

It is also faster: to finalize an interpreter takes a fifth of the time in which it has imported torch (measured).

The last functions keep processes from outliving the process that needs them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

FAILED_S = 8.0  # the time for functions at the exit after a failure, such as sinks (5 s); children end with it
TELL_S = 10.0  # the time of waiting at the exit until the user is told about it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def exit_process(code: int, before: Callable[[], object] | None = None) -> NoReturn:
    """End this process with `code`.

    Args:
        code: the exit code. With 0 the threads and child processes that are no daemons run to their end first, as
            they do in any Python program; after a failure nothing waits for threads, and only FAILED_S for others.
        before: a function that is called last, after the functions registered with `atexit`.
    """
    try:
        _limit(code)
        # The order of Py_FinalizeEx: threads, atexit, flushed streams. `os._exit` then leaves out the finalization.
        if code == 0:
            threading._shutdown()  # type: ignore[attr-defined]
        else:
            _flush()  # what follows may be cut off
        atexit._run_exitfuncs()
        _flush()
        if before is not None:
            before()
    finally:  # also when an atexit function raises: nothing may return into the fork server's code
        os._exit(code)


def _limit(code: int) -> None:
    """Begin the time that the exit has after a failure; otherwise the time until the user is told why it waits."""

    def end() -> None:
        with contextlib.suppress(Exception):  # whatever happens, the process must end
            _say(f"{FAILED_S:g} s after the failure this process is ended; its exit waits for {_awaited([])}")
        os._exit(code)

    def report() -> None:
        _say(f"the file has ended; the exit of its process waits for {_awaited(threading.enumerate())}")

    seconds, act = (TELL_S, report) if code == 0 else (FAILED_S, end)
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    if code != 0:  # native code may hold the GIL, which the timer needs and this does not; the exit code is then 1
        faulthandler.dump_traceback_later(2 * FAILED_S, exit=True, file=2)


def _awaited(threads: Sequence[threading.Thread]) -> str:
    """Return the names of `threads` and child processes that keep this process, or the line of an atexit function."""
    main = threading.main_thread()
    names = [f"thread {thread.name}" for thread in threads if thread is not main and not thread.daemon]
    for child in multiprocessing.active_children():
        if not child.daemon:
            names.append(f"child process {child.name} ({child.pid})")
    if names:
        return ", ".join(names)
    frame = sys._current_frames()[main.ident or 0]
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _say(text: str) -> None:
    os.write(2, f"paceline: {text}\n".encode())  # not by the stream: the exit may wait for its lock


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or taken away
            stream.flush()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens (Linux).

    The request is not inherited by a fork: each child asks for itself. See prctl(2).
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill the processes that are left of a group, also after its leader's end: children of a rank that has failed.

    They may hold the rank's output and its connections: whoever waits for their end would wait for these processes.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def adopt_orphans(is_on: bool) -> None:
    """Let descendants whose parent ends become children of this process, or no longer (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
