"""Check the arguments of public functions before they are used: one error of three parts for each."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

from paceline.nouns.errors import UsageError
from paceline.nouns.parts import shown


def whole_number(call: str, name: str, value: Any, least: int = 0) -> int:
    """Return a whole number as Python's own; numpy's and torch's are converted.

    Args:
        call: the name of the function, such as `job.save`; a name without a dot is one of `paceline`.
        name: the name of the argument.
        value: the value that the user passed.
        least: the smallest number that is allowed.

    Raises:
        UsageError: the value is no whole number, or smaller.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        meant = value.strip() if isinstance(value, str) else ""
        example = meant if meant.isdecimal() and int(meant) >= least else max(least, 1)
        raise _wrong(call, name, value, f"a whole number of at least {least}", f"write {name}={example}")
    return number


def flag(call: str, name: str, value: object) -> bool:
    """Return a truth value.

    Raises:
        UsageError: the value is neither True nor False; a text such as "no" would count as True.
    """
    if not isinstance(value, bool):
        raise _wrong(call, name, value, "True or False", f"write {name}=True, or leave it out")
    return value


def text(call: str, name: str, value: object, example: str) -> str:
    """Return a text.

    Raises:
        UsageError: the value is no text.
    """
    if not isinstance(value, str):
        raise _wrong(call, name, value, "a text", f"write e.g. {name}={example!r}")
    return value


def path(call: str, name: str, value: Any) -> Path:
    """Return a path.

    Raises:
        UsageError: the value is neither a text nor a path.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise _wrong(call, name, value, "a path: a text or a pathlib.Path", "write e.g. 'runs/a'")
    return Path(value)


def function(call: str, name: str, value: object, example: str) -> None:
    """Raise UsageError unless a value can be called."""
    if not callable(value):
        raise _wrong(call, name, value, "a function", f"write {example}")


def _wrong(call: str, name: str, value: object, expected: str, fix: str) -> UsageError:
    call = call if "." in call else f"paceline.{call}"
    return UsageError(f"{name} of {call} should be {expected}", f"it is {shown(value)}", fix)
