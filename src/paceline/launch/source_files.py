"""Find the source files of the user's program without running them: a module by its name, and a file's imports."""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from paceline.nouns.errors import ReadError, UsageError, did_you_mean
from paceline.nouns.reading import read_text

_MOST_FILES = 200  # the largest number of files of a program; deeper imports are not looked at
_PACKAGE = Path(__file__).resolve().parents[1]


def find_module(name: str) -> Path:
    """Return the file that `python -m NAME` runs, without importing the packages around it.

    Raises:
        UsageError: there is no such module, or it is no Python source.
    """
    asked = f"can't run the module {name!r}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(asked, "that is no module's name", "write -m package.module, or FILE without -m")
    folders: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    found = ""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders) if folders is not None else None
        if spec is None and not found:  # editable installs have finders of their own
            spec = importlib.util.find_spec(part)
        if spec is None:
            reason = f"{found} has no {part}" if found else f"no {part} is in this folder, in PYTHONPATH or installed"
            names = [module.name for module in pkgutil.iter_modules(folders if found else [os.getcwd()])]
            fix = did_you_mean(part, names, "start the command in the folder that has the package")
            raise UsageError(asked, reason, fix)
        folders = spec.submodule_search_locations
        found = f"{found}.{part}" if found else part
    if folders is not None:
        spec = PathFinder.find_spec("__main__", folders)
        if spec is None:
            raise UsageError(asked, "it is a package, and has no __main__", f"name one of its modules: {name}.NAME")
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UsageError(asked, "it is no Python source", "name a module that is a .py file")
    return Path(spec.origin)


def sources(path: Path, tree: ast.Module, root: Path) -> Iterator[ast.Module]:
    """Yield a file's source, then those that it imports, nearest first; not those of installed packages or Paceline.

    Args:
        path: the path of the file.
        tree: the syntax tree of its source.
        root: the folder in which its imports begin; those of PYTHONPATH come after it.
    """
    roots = [root, *(Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder)]
    seen = {path.resolve()}
    waiting = [(path, tree)]
    while waiting:
        path, tree = waiting.pop(0)
        yield tree
        for imported in _imported(path, tree, roots):
            file = imported.resolve()
            if file in seen or len(seen) >= _MOST_FILES or _PACKAGE in file.parents:
                continue
            seen.add(file)
            try:
                waiting.append((imported, ast.parse(read_text(imported))))
            except (SyntaxError, ReadError, ValueError, RecursionError, MemoryError):
                continue  # it says so when it is run


def _imported(path: Path, tree: ast.Module, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of the modules that a file imports, wherever in it, and of the packages around them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(alias.name.split("."), roots)
        elif isinstance(node, ast.ImportFrom):
            starts = roots
            if node.level:
                starts = [path.parents[node.level - 1]] if len(path.parents) >= node.level else []
            parts = node.module.split(".") if node.module else []
            yield from _files(parts, starts)
            for alias in node.names:
                yield from _files([*parts, alias.name], starts)


def _files(parts: Sequence[str], roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that an import of a.b.c runs, in the first of some folders that has a."""
    for root in roots:
        if not parts:  # from . import c
            continue
        first = root / parts[0]
        if not first.is_dir() and not first.with_suffix(".py").is_file():
            continue
        folder = root
        for part in parts:
            package = folder / part / "__init__.py"
            module = folder / f"{part}.py"
            if package.is_file():
                yield package
            elif module.is_file():
                yield module
            folder = folder / part
        return
