"""Hold a benchmark's contestants in processes that wait, and give them turns."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.nouns.errors import UsageError


class Turn(NamedTuple):
    """The result of a contestant's turn.

    Attributes:
        seconds: per step, by name: contestants that share a process take their turn together.
        losses: of every step since the turn before; empty where the contestant does not report them.
    """

    seconds: dict[str, float]
    losses: list[float]


class Pool:
    """A process that holds contestants, ready to run.

    Args:
        module: the one that serves them.
        folder: the folder of their data.
        names: the contestants.
        environment: variables of their processes.
    """

    def __init__(self, module: str, folder: Path, names: Sequence[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", module, str(folder), *names]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in names:  # each reports once that it is ready
            self._answer()

    def turn(self, name: str) -> Turn:
        """Let one contestant take some steps, and return its times and losses."""
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return Turn(**self._answer())

    def close(self) -> None:
        """End the contestants: their pipes close with the pool."""
        self.process.terminate()
        self.process.wait()
        time.sleep(0.1)  # for the contestants, which end when they see the end of their pipes

    def _answer(self) -> dict[str, Any]:
        """Return the next line of JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):  # a peer's own remarks
            line = self.process.stdout.readline()
        if not line:
            raise UsageError("every contestant should run", "one of them failed (see above)", "run it alone to see why")
        return dict(json.loads(line))
