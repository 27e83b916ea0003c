"""Send a function to this process's own children: the only place where something is pickled, and why that is safe.

A function of a notebook's cell is in no file that a rank could import, so its code and what it refers to go along, by
cloudpickle. They go from a process to children that it starts itself, by anonymous memory that the children inherit:
it has no name, and neither a disk nor a socket is involved. Who could write to it could as well change the command
line of the children, or the memory of this process. What comes back is plain data: see `plain_values.py`.
"""

from __future__ import annotations

import importlib
import io
import json
import linecache
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_json

_FORM = {"path": [str], "sources": {str: [str]}, "is_kept": bool}
LIBRARY = "cloudpickle"
# All that makes a code object: what its `replace` takes.
_OF_CODE = (
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags"),
    *("co_firstlineno", "co_code", "co_consts", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_filename", "co_name", "co_qualname", "co_linetable", "co_exceptiontable"),
)


@dataclass(frozen=True, slots=True)
class SentFunction:
    """A function that is sent to the ranks.

    Attributes:
        path: the value of `sys.path` in the process that sends it.
        sources: the lines of code that is in no file, by the name that stands in a traceback.
        is_kept: True where the job has a run directory that stays, with checkpoints.
        pickled: the function and its arguments, pickled.
    """

    path: list[str]
    sources: dict[str, list[str]]
    is_kept: bool
    pickled: bytes

    def write(self) -> int:
        """Write the function to anonymous memory, and return the descriptor."""
        header = {"path": self.path, "sources": self.sources, "is_kept": self.is_kept}
        descriptor = _anonymous()
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + self.pickled)
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> SentFunction:
        """Read the function that the parent process wrote; other ranks read the same."""
        content = bytearray()
        # Not `read`: all who inherit the descriptor share its position.
        while chunk := os.pread(descriptor, 2**24, len(content)):
            content += chunk
        header, _, pickled = bytes(content).partition(b"\n")
        return cls(**parse_json(header, "what was sent to a rank", _FORM), pickled=pickled)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function and its arguments; their imports are looked up in the `sys.path` of the sender.

        Raises:
            UsageError: they need something that is not there.
        """
        sys.path[:] = self.path
        for name, lines in self.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        try:
            function, arguments = importlib.import_module(LIBRARY).loads(self.pickled)
        except Exception as error:
            raise UsageError(
                "a rank should be able to load the function and its arguments",
                f"{type(error).__name__}: {error}",
                "make in the function what can't be sent, and see that what it imports is found in sys.path",
            ) from error
        return function, arguments


def pack(function: Callable[..., Any], arguments: Sequence[Any], is_kept: bool) -> SentFunction:
    """Return a function and its arguments in the form that is sent to a rank.

    Raises:
        UsageError: cloudpickle is not installed, or something can't be pickled.
    """
    try:
        library = importlib.import_module(LIBRARY)
    except ModuleNotFoundError:
        raise UsageError(
            "paceline.launch needs cloudpickle, to send the function to its ranks",
            "it is not installed",
            "pip install 'paceline[notebook]'",
        ) from None
    try:
        pickled = _pickled(library, (function, tuple(arguments)))
    except Exception as error:
        raise UsageError(
            f"can't send {name_of(function)} and what it refers to to the ranks",
            f"{type(error).__name__}: {error}",
            "make in the function what can't be pickled, such as an open file or a connection",
        ) from error
    return SentFunction(list(sys.path), _unsaved_sources(), is_kept, pickled)


def _pickled(library: Any, value: Any) -> bytes:
    """Return `value` pickled by cloudpickle, with the names of files in code, which tracebacks show.

    cloudpickle 3.1.3 writes "<dynamic-code>" in their place.
    """

    class Pickler(library.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, types.CodeType):
                return _make_code, ({name: getattr(value, name) for name in _OF_CODE},)
            return super().reducer_override(value)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _make_code(values: dict[str, Any]) -> types.CodeType:
    """Return the code object with these values; a rank calls it when it loads a function."""
    return _make_code.__code__.replace(**values)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function as users know it."""
    return getattr(function, "__name__", None) or type(function).__name__


def _unsaved_sources() -> dict[str, list[str]]:
    """Return the lines of code that is in no file, such as of a notebook's cells."""
    sources = {}
    for name, entry in list(linecache.cache.items()):
        # A module's entry may have only a function that would read it; those have files.
        if len(entry) == 4 and not os.path.exists(name):
            sources[name] = list(entry[2])
    return sources


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("paceline-function")
    with tempfile.TemporaryFile() as file:  # it has no name either
        return os.dup(file.fileno())
