"""Let a rank's script import Paceline's modules by Horovod's names: `import horovod.torch as hvd`.

`paceline horovodrun` asks for it by a variable. Each name gives the module that `paceline.horovod` has, and no copy.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from paceline.nouns import module_names

ALIAS = "horovod"
OUTPUT = "PACELINE_HOROVOD_OUTPUT"  # the folder of --output-filename
_PLACES = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_tees: list[subprocess.Popen[bytes]] = []


class _ExistingModule(Loader):
    """Load a module by another name: import Paceline's, and leave its own spec as it was."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return Paceline's module."""
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's own spec again: Python has replaced it by the alias's."""
        assert self.spec is not None
        module.__spec__ = self.spec
        module.__loader__ = self.spec.loader
        module.__package__ = self.spec.parent


class _HorovodFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != ALIAS:
            return None
        name = module_names.HOROVOD + fullname.removeprefix(ALIAS)
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _ExistingModule(name), is_package=is_package)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


def install() -> None:
    """Prepare this rank's process for a script of Horovod's: names, variables, output files, warnings."""
    if not any(isinstance(finder, _HorovodFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HorovodFinder())
    for name in _PLACES:
        os.environ[f"HOROVOD_{name}"] = os.environ.get(f"PACELINE_{name}", "0")
    os.environ["HOROVOD_SIZE"] = os.environ.get("PACELINE_WORLD_SIZE", "1")
    os.environ["HOROVOD_HOSTNAME"] = socket.gethostname()
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    is_first = os.environ["HOROVOD_RANK"] == "0"
    installed = PathFinder.find_spec(ALIAS)
    if is_first and installed is not None:
        found = installed.origin or "a folder of this name"
        print(
            f"paceline horovodrun: `import horovod` is {module_names.HOROVOD}; the one installed, {found}, is not used"
        )
    if folder := os.environ.get(OUTPUT):
        _copy_output(Path(folder, f"rank.{os.environ['HOROVOD_RANK']}"))
    for text in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        _filter_warnings(text)


def _copy_output(folder: Path) -> None:
    """Write what this process prints to two files too; `tee` takes what C libraries print as well."""
    folder.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # A session of its own: when the rank has ended its group is killed, and the last lines are still on their way.
        command = ["tee", "-a", str(folder / name)]
        tee = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=descriptor, start_new_session=True)
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), descriptor)
        tee.stdin.close()
        _tees.append(tee)  # kept: each ends when this process does


def _filter_warnings(text: str) -> None:
    """Add a filter as `python -W` writes it: action:message:category:module:line."""
    action, message, category, module, line = (*text.split(":"), "", "", "", "")[:5]
    kind = getattr(builtins, category or "Warning")
    warnings.filterwarnings(action, re.escape(message), kind, re.escape(module), int(line or 0))  # type: ignore[arg-type]
