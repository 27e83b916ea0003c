"""Find the examples, and copy one to where the user trains with it. No torch.

They are the files of `examples/` in the repository. A built package has them in `paceline/example_files`, where
`tool.hatch` in pyproject.toml puts them; in a clone they are read where they are. An example is a file of `examples/`,
`examples/loops/`, `examples/lightning/` or `examples/horovod/`, a folder with a workload.py, or a notebook. The
docstring of that file, or the first cell of the notebook, describes it in its first line, and may show the commands to
run it, indented.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import UsageError, did_you_mean, how_to_write

_PACKAGE = Path(__file__).parents[1]
_CLONE = _PACKAGE.parents[1]
_IN_PACKAGE = "example_files"
_MAIN = "workload.py"  # the main file of an example with several files
_NOTEBOOK = ".ipynb"
_FOR_NOTEBOOKS = ("cloudpickle",)  # `paceline.launch` needs it; the program that opens a notebook is the user's choice
_LEFT_OUT = {"__pycache__", "runs"}
# Packages that are installed with Paceline; an example's other imports are its needs.
_WITH_PACELINE = {"paceline", "torch", "numpy", "safetensors", "msgspec", "psutil", "yaml", "horovod"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example.

    Args:
        name: the name for `paceline examples copy`.
        summary: the description of the example, in a line.
        needs: the packages that it imports and that Paceline does not need itself.
        files: the paths of its files, by their names in the copy.
        commands: the commands that run it, from the folder of the copy.
    """

    name: str
    summary: str
    needs: tuple[str, ...]
    files: Mapping[str, Path]
    commands: tuple[str, ...]

    @property
    def is_folder(self) -> bool:
        """Return True if it has several files."""
        return len(self.files) > 1

    @property
    def missing(self) -> list[str]:
        """Return the packages that it needs and that this Python does not have."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def examples_folder() -> Path:
    """Return the folder that has the examples.

    Raises:
        UsageError: this installation has none.
    """
    in_clone = _CLONE / "examples"
    if (_PACKAGE / _IN_PACKAGE).is_dir():
        return _PACKAGE / _IN_PACKAGE
    if (_CLONE / "pyproject.toml").is_file() and in_clone.is_dir():
        return in_clone
    raise UsageError(
        "Paceline's examples should be installed with it",
        f"neither {_PACKAGE / _IN_PACKAGE} nor {in_clone} is there",
        "install Paceline anew, from a wheel or a clone",
    )


def find_examples() -> dict[str, Example]:
    """Return every example by its name, in alphabetical order."""
    folder = examples_folder()
    files = (
        *folder.glob("*.py"),
        *(folder / "loops").glob("*.py"),
        *(folder / "lightning").glob("*.py"),
        *(folder / "horovod").glob("*.py"),
    )
    found = [_of_file(path) for path in files]
    found += [_of_folder(path.parent) for path in folder.glob(f"*/{_MAIN}")]
    found += [_of_file(path) for path in folder.glob(f"*/*{_NOTEBOOK}")]
    return {example.name: example for example in sorted(found, key=lambda example: example.name)}


def choose_example(name: str) -> Example:
    """Return the example of this name.

    Raises:
        UsageError: there is none.
    """
    examples = find_examples()
    bare = name.removesuffix("/").removesuffix(".py").split("/")[-1]  # as a page names its file, or its path in a clone
    if bare not in examples:
        fix = did_you_mean(bare, examples, "see `paceline examples`")
        raise UsageError(f"can't copy the example {name!r}", f"the examples are {', '.join(examples)}", fix)
    return examples[bare]


def copy_example(example: Example, folder: Path, force: bool) -> list[Path]:
    """Write the example's files, and return them.

    Args:
        example: the example to copy.
        folder: the folder that gets the files; it is made.
        force: True to write over files that are there.

    Raises:
        UsageError: a file is there, or can't be written. Nothing is written if one is there.
    """
    if folder.exists() and not folder.is_dir():
        asked = f"can't copy the example {example.name!r} to {folder}"
        raise UsageError(asked, "that is a file, not a folder", "name another place as DIR")
    targets = {folder / name: source for name, source in example.files.items()}
    existing = [str(target) for target in targets if target.exists() or target.is_symlink()]
    if existing and not force:
        raise UsageError(
            f"can't copy the example {example.name!r} to {folder}",
            f"{', '.join(existing)} would be written over",
            "name another folder, or add --force",
        )
    for target, source in targets.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        except OSError as error:
            raise UsageError(f"can't write {target}", f"{error.strerror}", how_to_write(error, "as DIR")) from None
    return list(targets)


def next_commands(example: Example, folder: Path) -> list[str]:
    """Return the commands to type after the copy, in the folder where it was asked for."""
    commands = [f"cd {shlex.quote(str(folder))}"] if folder.resolve() != Path.cwd() else []
    if missing := example.missing:
        commands.append(f"pip install {' '.join(missing)}")
    return [*commands, *example.commands]


def _of_file(path: Path) -> Example:
    return Example(
        name=path.stem,
        summary=_summary(path),
        needs=_needs([path]),
        files={path.name: path},
        commands=_commands(path),
    )


def _of_folder(folder: Path) -> Example:
    files = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not _LEFT_OUT & {*inside.parts}:
            files[inside.as_posix()] = path
    main = folder / _MAIN
    return Example(
        name=folder.name,
        summary=_summary(main),
        needs=_needs(_imported(main)),
        files=files,
        commands=_commands(main),
    )


def _imported(main: Path) -> list[Path]:
    """Return a file and those beside it that it imports, directly or not."""
    found = [main]
    for path in found:
        for name in _imports(path):
            beside = path.with_name(f"{name}.py")
            if beside.exists() and beside not in found:
                found.append(beside)  # its imports are looked at in turn
    return found


def _docstring(path: Path) -> str:
    if path.suffix == _NOTEBOOK:
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        return "".join(first["source"]).lstrip("# ")
    return ast.get_docstring(_parsed(path)) or ""


@functools.cache
def _parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree; each file is asked about several times."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _summary(path: Path) -> str:
    return _docstring(path).partition("\n")[0]


def _commands(path: Path) -> tuple[str, ...]:
    """Return the commands that a file's docstring shows: lines that are indented and begin with a program of these."""
    lines = _docstring(path).splitlines()
    shown = tuple(line.strip() for line in lines if line.startswith(("    paceline ", "    python ", "    jupyter ")))
    return shown or (f"paceline run -n 2 {path.name}",)


def _needs(paths: list[Path]) -> tuple[str, ...]:
    """Return the packages that files import at once, without Python's, Paceline's and the files themselves."""
    known = {*sys.stdlib_module_names, *_WITH_PACELINE, *(path.stem for path in paths)}
    found: set[str] = set()
    for path in paths:
        if path.suffix == _NOTEBOOK:
            return _FOR_NOTEBOOKS
        found |= _imports(path)
    return tuple(sorted(found - known))


def _imports(path: Path) -> set[str]:
    """Return the modules and packages that a file imports at once, by their first names; also where it tries to."""
    found: set[str] = set()
    body = _parsed(path).body
    for node in itertools.chain(body, *(statement.body for statement in body if isinstance(statement, ast.Try))):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found
