"""Ask a child process what a workload's model is made of: the asking side has no torch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from paceline.nouns import module_names
from paceline.nouns.errors import ReadError, WorkloadError, last_error_of
from paceline.nouns.plan import Plan
from paceline.nouns.reading import parse_json

_ANSWER = ({"error": {"asked": str, "found": str, "fix": str}}, {"model": dict})


def describe_workload(plan: Plan, command_line: list[str], waits: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return what `profile/describe.py` says of a file and its arguments under a plan.

    Args:
        plan: under which the model may be split.
        command_line: the user's file and its arguments.
        waits: called about once a second meanwhile.

    Raises:
        WorkloadError: the file can't be loaded, or its model can't be split so.
    """
    command = [sys.executable, "-P", "-m", module_names.DESCRIBE, "--plan", plan.line(), *command_line]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    stdout, stderr = process.communicate(timeout=1.0)
                    break
                waits()
        except BaseException:  # Ctrl-C too: no child outlives the command
            process.kill()
            raise
    lines = stdout.strip().splitlines()
    answer = None
    if process.returncode == 0 and lines:
        with contextlib.suppress(ReadError):  # the user's code wrote something at its end
            answer = parse_json(lines[-1], "the answer", _ANSWER)
    if answer is None:
        reason = f"its process failed: {last_error_of(stderr, 'it printed nothing')}"
        raise WorkloadError(f"can't load {command_line[0]}", reason, "run it alone with python first")
    if "error" in answer:
        raise WorkloadError(**answer["error"])
    return dict(answer["model"])
