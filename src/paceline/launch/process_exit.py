"""End a process that has imported torch without finalizing the interpreter.

A thread of torch's may still free the last collective's tensors while the interpreter is finalized. It then asks for
the GIL, and Python ends it by unwinding its stack; libstdc++ takes that for an uncaught exception and aborts the
process ("terminate called without an active exception"). Measured with Gloo on a busy machine: one rank in twelve.
`multiprocessing` ends its forked children in the same order as this module, and for the same kind of reason.

It is also faster: to finalize an interpreter takes a fifth of the time in which it has imported torch (measured).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def exit_process(code: int, before: Callable[[], object] | None = None) -> NoReturn:
    """End this process with `code`.

    Args:
        code: the exit code. With 0 the threads that are no daemons run to their end first, as they do in any Python
            program; after a failure nothing waits for them.
        before: called last, after the functions registered with `atexit`.
    """
    try:
        # The order of Py_FinalizeEx: threads, atexit, flushed streams. `os._exit` then leaves out the finalization.
        if code == 0:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or taken away
                stream.flush()
        if before is not None:
            before()
    finally:  # also when an atexit function raises: nothing may return into the fork server's code
        os._exit(code)
