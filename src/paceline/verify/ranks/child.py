"""The beginning of every process of a verification: its settings, and `sys` as under `python FILE`.

One that is no rank finds the workload, and answers or refuses. It is started as `python -m MODULE SETTINGS.json`, where
MODULE is `dry_run`, `reference` or `replay` beside this file.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.launch.process_exit import die_with_parent
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.own_errors import own_error, own_line
from paceline.nouns.user_program import UserProgram
from paceline.nouns.workload import Workload
from paceline.train.find_workload import find_workload

_PACKAGE = f"{Path(__file__).parents[2]}/"
Main = Callable[[Workload, dict[str, Any], Path], None]


def read_settings(path: Path) -> tuple[dict[str, Any], Path, UserProgram]:
    """Read what is asked for, the folder where answers go and the user's program, whose `sys.argv` and path are set."""
    settings = json.loads(path.read_text())
    # The reference and the dry run are children of the command itself; ranks end with their fork server.
    if "PACELINE_RANK" not in os.environ:
        die_with_parent()
    program = UserProgram(settings["script"], settings.get("module", ""))
    program.enter(settings["arguments"])
    return settings, Path(settings["folder"]), program


def answer(main: Main, path: Path | None = None) -> int:
    """Let `main` answer what the settings ask for; where it can't, write refused.json, which says why.

    Args:
        main: a function that takes the user's workload, the settings, and the folder that it writes into.
        path: the path of the settings; None: the process's first argument.
    """
    settings, folder, program = read_settings(Path(sys.argv[1]) if path is None else path)
    try:
        main(find_workload(program), settings, folder)
    except PacelineError as error:
        _refuse(folder, error)
    except Exception as error:
        _refuse(folder, as_paceline_error(error))
    return 0


def _refuse(folder: Path, error: PacelineError) -> None:
    parts = {"asked": error.asked, "found": error.found, "fix": error.fix}
    is_own = type(error) is PacelineError  # no refusal, but an error of ours: see `nouns/own_errors.py`
    (folder / "refused.json").write_text(json.dumps({"is_own": is_own, "parts": parts}))


def as_paceline_error(error: Exception) -> PacelineError:
    """Explain an error in one process on CPU: one of Paceline's, whose traceback is on stderr, or the user's code's."""
    line = own_line(error)
    if not line:
        return as_workload_error(error)
    traceback.print_exception(error)
    return own_error(line, "".join(traceback.format_exception_only(error)).strip())


def as_workload_error(error: Exception) -> WorkloadError:
    """Explain an error of the user's own code, in one process on CPU."""
    # The most particular signs first: an operation without float64 mentions a dtype too.
    lines = str(error).strip().splitlines() or [""]
    found = f"{type(error).__name__}{_innermost_line(error)}: {lines[0]:.300}"
    if "cuda" in str(error).lower() or "cpu' backend" in str(error).lower():
        fix = "verifying runs on CPU processes: take the plain torch form of that operation where CUDA is not at hand"
        return WorkloadError("the model should run on CPUs too", found, fix)
    if _has_no_float64(str(error)):
        fix = "verifying runs in float64: take a form of that operation which has it, such as the plain torch one"
        return WorkloadError("every operation of the model should run in float64 on CPUs", found, fix)
    if "dtype" in str(error) or "Double" in str(error):
        fix = "verifying runs in float64: make tensors as wide as the model's, x.new_zeros(...) or dtype=x.dtype"
        return WorkloadError("the model should run in float64", found, fix)
    fix = (
        "start it alone (python FILE) with precision='float64'; if it trains so, what differs here: the loss is also "
        "called on a few samples of the first batch, and dropout keeps or drops an element by its value"
    )
    return WorkloadError("can't take a step in one process, on CPU and in float64", found, fix)


def _innermost_line(error: Exception) -> str:
    """Return " at FILE:LINE" of the innermost frame that is neither installed, nor ours, nor generated."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith(("<", _PACKAGE)):
            line = f" at {name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _has_no_float64(text: str) -> bool:
    """True if an operation was given only float64 and can't compute in it: no tensor of another dtype is at fault."""
    lowered = text.lower()
    if "not implemented for 'double'" in lowered:
        return True
    return "double" in lowered and "expected" in lowered and ("bfloat16" in lowered or "bf16" in lowered)
