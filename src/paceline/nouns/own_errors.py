"""Tell an error of Paceline itself from one of the user's code, by the traceback: a fault of ours is no user's.

The innermost frame decides, apart from those of torch and other libraries. Where it is in Paceline, and not in
the user's function that it called, the error is ours.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from paceline.nouns.errors import PacelineError

_PACKAGE = f"{Path(__file__).parents[1]}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"
_COPY = f"{_STDLIB}copy.py"  # may fail for a model that can't be copied
# Files of Paceline that the user's code calls in place of torch's functions; they pass on errors of these.
_STAND_INS = (
    "verify/ranks/randomness.py", "verify/ranks/keep_float64.py", "verify/ranks/placed_draws.py",
    "verify/ranks/draw_trace.py", "verify/ranks/dropout_pieces.py", "train/control_flow_trace.py",
    "train/precision.py", "train/same_draws.py", "train/bystanders.py",
    "deferred_init/record.py", "graph/refused_calls.py", "nouns/patching.py",
)  # fmt: skip
# Files of torch through which our code runs the user's: backward passes, updates, collated samples, modules.
_RUNS_THE_USERS = (
    "torch/_tensor.py", "torch/autograd/", "torch/optim/", "torch/utils/data/", "torch/nn/modules/",
    "torch/utils/checkpoint.py",
)  # fmt: skip
_USED_BY_US = ("torch", "numpy", "safetensors", "torchao")
# Methods of ours through which torch runs an operation of the user's code.
_HANDLERS = ("__torch_dispatch__", "__torch_function__")
_LINE = re.compile(r'^\s*File "(.+)", line (\d+)(?:, in (\S+))?', re.MULTILINE)
_HEAD = "Traceback (most recent call last):"

Frame = tuple[str, int, str]  # file, line and function


def own_line(error: BaseException) -> str:
    """Return FILE:LINE of the line of Paceline that failed; "" where the error is of the user's code."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return _own_line(frames)


def own_line_of_text(text: str) -> str:
    """Return the same for the output of a process, which ends with a traceback."""
    last = text.rpartition(_HEAD)[2]
    return _own_line([(file, int(line), function) for file, line, function in _LINE.findall(last)])


def own_error(line: str, found: str) -> PacelineError:
    """Return the error for a bug of Paceline.

    Args:
        line: the place in Paceline's code, as FILE:LINE.
        found: the message of the error that was raised there.
    """
    return PacelineError(
        f"Paceline failed at {line}: this is a bug of Paceline, and not of your code",
        found,
        "report it with the traceback; another plan may do meanwhile",
    )


def note_own_error(error: BaseException) -> bool:
    """Return True if an error is ours; it then says so under its traceback."""
    line = own_line(error)
    if line:
        note = f"paceline: this failed in Paceline's own code at {line}; it is a bug of Paceline"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    return bool(line)


def _own_line(frames: Sequence[Frame]) -> str:
    called = ""  # the file that the frame in hand has called
    for file, line, function in reversed(frames):
        if file.startswith(_PACKAGE):
            if file.removeprefix(_PACKAGE) in _STAND_INS or function in _HANDLERS:
                called = ""
                continue
            return "" if _is_the_users(called) else f"{file}:{line}"
        if not _is_library(file):
            return ""
        called = file
    return ""


def _is_library(file: str) -> bool:
    return file.startswith(("<", _STDLIB)) or "/site-packages/" in file


def _is_the_users(called: str) -> bool:
    """Return True if a library's file runs code, or has a model, of the user's choice."""
    package = called.rpartition("/site-packages/")[2]
    if package == called:  # none, or the standard library's
        return called == _COPY
    return package.startswith(_RUNS_THE_USERS) or not package.startswith(
        tuple(f"{package_name}/" for package_name in _USED_BY_US)
    )
