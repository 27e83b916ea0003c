"""Start processes as forks of one that has imported torch: the import takes most of a short process's time.

The template forks a process, whose first parent ends at once: the kernel makes it a child of the nearest ancestor that
adopts orphans, which is the process that has the `Template` (prctl(2), PR_SET_CHILD_SUBREAPER). So it is waited for,
and ends with its parent, as one that was started directly.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from paceline.launch.process_exit import adopt_orphans
from paceline.nouns import module_names

LENGTH = struct.Struct("<q")
MOST_DESCRIPTORS = 64


class Process(Protocol):
    """The methods of a process that was started."""

    def wait(self) -> int:
        """Wait for the process to end, and return its exit code; below 0 the signal that ended it."""

    def kill(self) -> None:
        """End the process, if it has not ended."""


# Starts `command` with the arguments of `subprocess.Popen`: env, stdout, pass_fds, and others.
Start = Callable[..., Process]


class Forked:
    """A process that was forked from the template."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for the process to end, and return its exit code."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """End the process, if it has not been waited for."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Template:
    """The process that has imported torch, as a context; Linux only.

    Args:
        preload: the modules that the process imports beside torch.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        adopt_orphans(True)
        self.control, template_end = socket.socketpair()
        command = [sys.executable, "-P", "-m", module_names.TEMPLATE, str(template_end.fileno()), *preload]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[template_end.fileno()],
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
        )
        template_end.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.control.close()  # the end that the template waits for
        self.process.kill()  # it may be importing
        self.process.wait()
        adopt_orphans(False)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int,
        pass_fds: Sequence[int] = (),
        stderr: int = 2,
        **popen_options: object,
    ) -> Forked:
        """Start `python -m MODULE ARGUMENTS`, in a session of its own and without standard input.

        Args:
            command: the command line; its interpreter is left out.
            env: the whole environment of the process.
            stdout: the descriptor of its standard output.
            pass_fds: the descriptors that it has under the same numbers.
            stderr: the descriptor of its standard error.
            popen_options: the further arguments of `subprocess.Popen`, which hold here in any case.
        """
        targets = [1, 2, *pass_fds]
        at = command.index("-m") + 1
        message = {"module": command[at], "arguments": list(command[at + 1 :]), "env": dict(env), "targets": targets}
        text = json.dumps({**message, "parent": os.getpid()}).encode()
        socket.send_fds(self.control, [LENGTH.pack(len(text))], [stdout, stderr, *pass_fds])
        self.control.sendall(text)
        answer = self.control.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(answer) < LENGTH.size:
            raise ChildProcessError(f"the process that imports torch ended with {self.process.wait()}")
        return Forked(*LENGTH.unpack(answer))
