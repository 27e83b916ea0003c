"""Ask a child process what a workload's model is made of: the asking side has no torch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

from paceline.nouns import module_names
from paceline.nouns.errors import ReadError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import parse_json

_ANSWER = ({"error": {"asked": str, "found": str, "fix": str}}, {"model": dict})


def describe_workload(plan: Plan, words: list[str]) -> dict[str, Any]:
    """What `profile/describe.py` says of the file and arguments in `words` under a plan.

    Raises:
        WorkloadError: the file can't be loaded, or its model can't be split so.
    """
    command = [sys.executable, "-m", module_names.DESCRIBE, "--plan", plan.line(), *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = done.stdout.strip().splitlines()
    answer = None
    if done.returncode == 0 and lines:
        with contextlib.suppress(ReadError):  # the person's code wrote something at its end
            answer = parse_json(lines[-1], "the answer", _ANSWER)
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise WorkloadError(f"can't load {words[0]}", f"its process failed: {last}", "run it alone with python first")
    if "error" in answer:
        raise WorkloadError(**answer["error"])
    return dict(answer["model"])
