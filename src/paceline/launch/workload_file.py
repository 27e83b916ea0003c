"""Reads a workload file without running it, to say before any process starts what is wrong with it."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import PacelineError, UsageError, WorkloadError
from paceline.nouns.workload import check_part_names, too_small_batch

# Packages that start no threads and touch no GPU when imported, so that they may be loaded before a fork.
_FORK_SAFE = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "torchmetrics", "paceline")


@dataclass(frozen=True, slots=True)
class WorkloadFile:
    """What the source says, without running it."""

    path: Path
    imports: tuple[str, ...]  # modules that may be loaded before a fork


def read_workload_file(text: str, ranks: int) -> WorkloadFile:
    """Check a workload file's source.

    Args:
        text: the path as the person wrote it.
        ranks: how many ranks will run it.

    Raises:
        UsageError: there is no such file, or it is not Python.
        WorkloadError: a `Workload(...)` in it lacks a part, or has one that does not exist, or its batch is
            smaller than the ranks; or it has no workload at all.
    """
    path = Path(text)
    if not path.is_file():
        raise _no_file(path)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        line = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        raise UsageError(f"the workload file {path} should be Python", f"it is not{line}", "mend that line") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if _name(call.func) == "Workload":
            _check_call(call, path, ranks)
    if not any(node.id == "paceline" for node in ast.walk(tree) if isinstance(node, ast.Name)) and not any(
        name.startswith("paceline") for name in _imports(tree)
    ):
        raise WorkloadError(
            f"the workload file {path} should train with Paceline",
            "it does not import paceline",
            "declare workload = paceline.Workload(...) and call paceline.distribute(workload)",
        )
    safe = tuple(name for name in _imports(tree) if name.split(".")[0] in _FORK_SAFE)
    return WorkloadFile(path, safe)


def _no_file(path: Path) -> PacelineError:
    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    found = "that is a folder" if path.is_dir() else "there is no such file"
    fix = f"did you mean {path.parent / near[0]}? Name the file" if near else "name the Python file that declares it"
    return UsageError(f"the workload file {path}", found, fix)


def _check_call(call: ast.Call, path: Path, ranks: int) -> None:
    keywords = [keyword.arg for keyword in call.keywords]
    if None in keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
        return  # parts handed on as **parts are known only when it runs
    try:
        if not call.args:
            check_part_names([name for name in keywords if name], has_data=not _has_none(call, "data"))
        for keyword in call.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "batch_size" and type(value) is int and 0 < value < ranks:
                raise too_small_batch(value, ranks)
    except WorkloadError as error:
        raise WorkloadError(f"{path}, line {call.lineno}: {error.asked}", error.found, error.fix) from None


def _has_none(call: ast.Call, name: str) -> bool:
    """Whether the call hands in None by that name."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return any(isinstance(value, ast.Constant) and value.value is None for value in values)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _imports(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names
