"""Supervise ranks that another program starts and ends: mpirun, or a driver of Ray's.

Each rank finds its place in the variables that this program sets. The ranks' output comes back through the program's
output. A stop goes to the ranks through a file in the run directory, since not every program hands on a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.local import RankSettings
from paceline.nouns.errors import UsageError
from paceline.run.failures import failed_launcher
from paceline.run.supervise.host_backend import HostEvents, Lines, Listen

CLEAR_S = 5.0  # the time between asking the program to end, and killing it
STOP = "stop"  # the file, in the run directory
_TAGS = re.compile(r"\[(?:\d+,)?(\d+)\](?:<std(?:out|err)>:)? ?(.*)")  # Open MPI's and MPICH's names of ranks


class CommandBackend:
    """The backend for one program that starts ranks.

    Args:
        command: the command line: the program and its arguments.
        environment: further variables for the program; no secret may stand in a command.
        request: the bytes for its standard input.
        name: the name of the program for users; "": the name of its file.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], request: bytes = b"", name: str = ""
    ) -> None:
        self.command = list(command)
        self.environment = environment
        self.request = request
        self.host = name or Path(command[0]).name
        self.process: subprocess.Popen[bytes] | None = None
        self.last: deque[str] = deque(maxlen=1)
        self.killed_s: float | None = None

    def start(self, settings: RankSettings) -> None:
        """Start the program.

        Raises:
            UsageError: it can't be started.
        """
        self.settings = settings
        self.stop_file = Path(settings.run_dir, STOP)
        self.stop_file.unlink(missing_ok=True)  # an earlier attempt's file would stop the ranks at once
        stop_variable = {"PACELINE_STOP_FILE": str(self.stop_file)}
        environment = {**os.environ, **settings.environment, **self.environment, **stop_variable}
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the supervisor
                # It and its ranks may live on where this process is killed.
                pass_fds=[settings.run_lock] if settings.run_lock >= 0 else [],
            )
        except OSError as error:
            raise UsageError(
                f"can't start {self.command[0]}", str(error.strerror), "install it, or name another"
            ) from None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(self.request)
            self.process.stdin.close()

    def listen(self, register: Listen, events: HostEvents) -> None:
        """Register the program's output."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.events = events
        self.lines = Lines(self.process.stdout.fileno())
        register(self.process.stdout.fileno(), self._read)
        events.on_started(dict.fromkeys(self.settings.host_ranks.ranks, self.process.pid))

    def _read(self) -> bool:
        assert self.process is not None
        for line in self.lines.read():
            match = _TAGS.fullmatch(line)
            rank = int(match[1]) if match else 0
            text = match[2] if match else line
            if any(letter.isalnum() for letter in text):
                self.last.append(text.strip())
            self.events.on_output(rank, text)
        if self.lines.is_over:
            # The program has one exit code for all its ranks: how each of them ended is not known here.
            status = self.process.wait()
            is_killed = self.killed_s is not None
            if status == 0 or is_killed:
                for rank in self.settings.host_ranks.ranks:
                    self.events.on_ended(rank, -signal.SIGKILL if is_killed else 0)
            else:
                self.events.on_lost(self)
        return not self.lines.is_over

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Ask all ranks to save and stop, by the file: mpirun kills them a second after a signal, Hydra at once."""
        self.stop_file.touch()

    def kill(self) -> None:
        """End the program, and with it the ranks: first with SIGTERM, so that it may clear up on other hosts."""
        if self.process is None or self.process.poll() is not None:
            return
        if self.killed_s is not None and time.monotonic() - self.killed_s < CLEAR_S:
            return
        number = signal.SIGTERM if self.killed_s is None else signal.SIGKILL
        self.killed_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def restart(self, rank: int) -> None:
        """Raise UsageError: only a host with parameter servers has processes to start again."""
        raise UsageError(f"can't start rank {rank} again", f"{self.host} started it", "start the job anew")

    def finish(self) -> None:
        """Do nothing: the program ends with its ranks."""

    def heartbeat(self, now_s: float) -> None:
        """Do nothing: the program has its own means."""

    def close(self, patience_s: float = 15.0) -> int:
        """Wait for the program's end, and return its exit code."""
        if self.process is None:
            return 0
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.stop_file.unlink(missing_ok=True)

    def failure(self, status: int, at: float) -> dict[str, Any]:
        """Return the failure for the end of the program."""
        last_line = self.last[0] if self.last else ""
        return failed_launcher(self.host, status, last_line, at)
