"""Read a workload file without running it, to say before any process starts what is wrong with it."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, ReadError, UsageError, WorkloadError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.plan import Plan
from paceline.nouns.reading import read_text, reason_of
from paceline.nouns.workload import check_part_names, too_small_batch

# Packages that start no threads and touch no GPU when imported, so that they may be loaded before a fork. A thread does
# not exist in the forked child, and a lock that it held stays locked there; a CUDA context can't be used there at all.
_FORK_SAFE = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "torchmetrics", "paceline")

# Which call of which module trains a loop of the user's own.
_LOOPS = {
    module_names.PACKAGE: "prepare",
    module_names.TRANSFORMERS: "Trainer",
    module_names.LIGHTNING: "Trainer",
}


@dataclass(frozen=True, slots=True)
class WorkloadFile:
    """A workload file's path and imports, as its source has them."""

    path: Path
    imports: tuple[str, ...]  # modules that may be loaded before a fork
    is_loop: bool = False  # it trains by `paceline.prepare`, or by a Trainer that calls it


def read_workload_file(text: str, ranks: int, plan: Plan | None = None) -> WorkloadFile:
    """Check a workload file's source.

    Args:
        text: the path as the user wrote it.
        ranks: number of ranks that the batch is split over.
        plan: under which it is to train, where that is known.

    Raises:
        UsageError: there is no such file, or it is not Python.
        WorkloadError: a `Workload(...)` in it lacks a part, or has one that does not exist, or its batch is
            smaller than the ranks; or it has no workload at all.
        PlanError: it has a loop of its own, which the plan can't train.
    """
    path = Path(text)
    if not path.is_file():
        raise _no_file(path)
    try:
        tree = ast.parse(read_text(path), str(path))
    except (SyntaxError, ReadError, ValueError, RecursionError, MemoryError) as error:
        reason = f": {reason_of(error)}"
        if isinstance(error, SyntaxError):
            reason = f", line {error.lineno}: {error.msg}"
        raise UsageError(f"the workload file {path} should be Python", f"it is not{reason}", "mend that line") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "Workload":
            _check_call(node, path, ranks)
    if not _uses_paceline(tree):
        raise WorkloadError(
            f"the workload file {path} should train with Paceline",
            "it does not import paceline",
            "declare workload = paceline.Workload(...) and call paceline.distribute(workload)",
        )
    safe = tuple(name for name in _imports(tree) if name.split(".")[0] in _FORK_SAFE)
    is_loop = _has_loop(tree)
    if is_loop and plan is not None:
        check_plan_of_loop(plan)
    return WorkloadFile(path, safe, is_loop)


def _has_loop(tree: ast.Module) -> bool:
    """True if it calls `paceline.prepare` or what calls that, and declares no workload."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(_name(function) == "Workload" for function in calls):
        return False
    for module, function in _LOOPS.items():
        modules, functions = _names_of(tree, module, function)
        for called in calls:
            if isinstance(called, ast.Attribute) and called.attr == function and ast.unparse(called.value) in modules:
                return True
            if isinstance(called, ast.Name) and called.id in functions:
                return True
    return False


def _names_of(tree: ast.Module, module: str, function: str) -> tuple[set[str], set[str]]:
    """Return under which names the file has imported a module, and a function of it."""
    modules = {module}
    functions = set()
    package, _, last = module.rpartition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == module and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == module:
            functions |= {alias.asname or alias.name for alias in node.names if alias.name == function}
        elif isinstance(node, ast.ImportFrom) and package and node.module == package:
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == last}
    return modules, functions


def _uses_paceline(tree: ast.Module) -> bool:
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    if any(name == "paceline" for name in names):
        return True
    return any(name.startswith("paceline") for name in _imports(tree))


def _no_file(path: Path) -> PacelineError:
    siblings = []
    if path.parent.is_dir():
        siblings = [file.name for file in path.parent.glob("*.py")]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    reason = "that is a folder" if path.is_dir() else "there is no such file"
    fix = "name the Python file that declares it"
    if near:
        fix = f"did you mean {path.parent / near[0]}? Name the file"
    return UsageError(f"can't read the workload file {path}", reason, fix)


def _check_call(call: ast.Call, path: Path, ranks: int) -> None:
    keywords = [keyword.arg for keyword in call.keywords]
    if None in keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
        return  # parts handed on as **parts are known only when it runs
    try:
        if not call.args:
            check_part_names([name for name in keywords if name], has_data=not _has_none(call, "data"))
        for keyword in call.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            # Not isinstance: True is an int, too.
            if keyword.arg == "batch_size" and type(value) is int and 0 < value < ranks:
                raise too_small_batch(value, ranks)
    except WorkloadError as error:
        raise WorkloadError(f"{path}, line {call.lineno}: {error.asked}", error.found, error.fix) from None


def _has_none(call: ast.Call, name: str) -> bool:
    """True if the call hands in None by that name."""
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == name and isinstance(value, ast.Constant) and value.value is None:
            return True
    return False


def _name(node: ast.expr) -> str:
    """Return the last name of what is called: `Workload` for `paceline.Workload`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _imports(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:  # a level is a relative import
            names.append(node.module)
    return names
