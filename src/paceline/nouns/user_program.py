"""The user's program: a file, or a module by its name, run in this process as Python would run it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# For a process that runs the user's file: the name of the module that the file is, by `paceline run -m`.
MODULE = "PACELINE_MODULE"
# The same: set where it may import Horovod's names, by `paceline horovodrun`.
HOROVOD = "PACELINE_HOROVODRUN"


@dataclass(frozen=True, slots=True)
class UserProgram:
    """The user's program: a file to run.

    Args:
        script: the path of the file.
        module: the name of the module where it is run as `python -m NAME`; "": it is run as `python FILE`.
    """

    script: str
    module: str = ""

    @classmethod
    def of_this_process(cls, script: str) -> UserProgram:
        """Return the program whose file is `script`; a process that this one starts is told no module."""
        return cls(script, os.environ.pop(MODULE, ""))

    @property
    def root(self) -> Path:
        """Return the folder in which its imports begin: the file's, or the one in which the module's name begins."""
        path = Path(self.script)
        if not self.module:
            return path.parent
        depth = self.module.count(".")
        if path.name == "__main__.py" and not self.module.endswith("__main__"):
            depth += 1  # the module is a package
        return path.absolute().parents[depth]

    def enter(self, arguments: Sequence[str]) -> None:
        """Set `sys.argv` and `sys.path` as Python sets them for it."""
        sys.argv = [self.script, *arguments]
        sys.path.insert(0, str(self.root))
        if self.module and (folder := os.getcwd()) != sys.path[0]:
            sys.path.insert(0, folder)  # `python -m` begins its search there, also for a module from elsewhere

    def run(self, name: str = "__main__") -> dict[str, Any]:
        """Run it, and return its names.

        Args:
            name: the value of `__name__` in the program.
        """
        if self.module:
            return runpy.run_module(self.module, run_name=name, alter_sys=name == "__main__")
        return runpy.run_path(self.script, run_name=name)
