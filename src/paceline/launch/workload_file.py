"""Read a workload file without running it, to report its errors before any process starts."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.plain_script import PlainScript, find_plain_script
from paceline.launch.source_files import sources
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, ReadError, UsageError, WorkloadError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.mesh import AXES, SHORT
from paceline.nouns.names import check_name
from paceline.nouns.plan import OPTIONS, Plan
from paceline.nouns.reading import read_text, reason_of
from paceline.nouns.user_program import UserProgram
from paceline.nouns.workload import check_part_names, too_small_batch

# Packages that start no threads and touch no GPU when imported, so that they may be loaded before a fork. A thread does
# not exist in the forked child, and a lock that it held stays locked there; a CUDA context can't be used there at all.
_FORK_SAFE = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "torchmetrics", "paceline")

_PREPARE = "job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)"
_OPTIONS_OF_PREPARE = ("seed", "shard_frozen", "whole", "by_part", "sinks")
_LIGHTNING = "Lightning's Trainer"
# Modules whose use trains by `paceline.prepare`, on batches of each rank's own; the names in them, and what trains.
_TRAINERS = {
    module_names.ACCELERATE: (("Accelerator",), "Accelerate's Accelerator"),
    module_names.TRANSFORMERS: (("Trainer", "TrainerMixin"), "transformers' Trainer"),
    module_names.TRL: (("SFTTrainer", "DPOTrainer"), "TRL's trainer"),
    module_names.LIGHTNING: (("Strategy",), _LIGHTNING),
}
_OF_CHECKPOINTS = frozenset({"checkpoint_every", "keep", "copy_to"})  # settings of a job that saves by itself


@dataclass(frozen=True, slots=True)
class WorkloadFile:
    """A workload file's path and imports, as its source has them."""

    path: Path
    imports: tuple[str, ...]  # modules that may be loaded before a fork
    is_loop: bool = False  # it trains by `paceline.prepare`, or by a Trainer that calls it
    names_paceline: bool = True  # it, or a file that it imports, imports Paceline
    plain: PlainScript | None = None  # what it does to distribute its training without Paceline
    trainer: str = ""  # what trains it on batches of each rank's own, such as "Lightning's Trainer"

    def check_batches(self, command: str) -> None:
        """Raise UsageError if the file trains on batches of each rank's own.

        Args:
            command: the command that takes steps of the file in one process, such as "verify".
        """
        if self.trainer:
            raise UsageError(
                f"`paceline {command}` takes steps of a file's loop, in which a batch is that of all ranks",
                f"{self.path} trains by {self.trainer}, in which each rank has batches of its own",
                "put the model, its optimizer and its loader into a loop with paceline.prepare (docs/loops.md), and "
                f"give `paceline {command}` that file",
            )

    def check_flags(self, flags: Mapping[str, str]) -> None:
        """Raise UsageError if a flag of `paceline run` is about what the file's trainer does itself.

        Args:
            flags: the flags that were given, by the names of their settings.
        """
        if self.trainer and "resume" in flags:
            raise UsageError(
                f"{flags['resume']} does not apply to {self.path}",
                f"it trains by {self.trainer}, and the command can't tell that loop where it was",
                f"leave {flags['resume']} out; write trainer.train(resume_from_checkpoint=True), "
                'accelerator.load_state(FOLDER), or for Lightning trainer.fit(module, ckpt_path="last")',
            )
        if self.trainer == _LIGHTNING:
            for name in sorted(_OF_CHECKPOINTS & set(flags)):
                raise UsageError(
                    f"{flags[name]} does not apply to {self.path}",
                    f"it trains by {self.trainer}, which writes its own checkpoints",
                    f"leave {flags[name]} out, and write ModelCheckpoint(every_n_train_steps=...) among the callbacks",
                )


def read_workload_file(text: str, ranks: int, plan: Plan | None = None, module: str = "") -> WorkloadFile:
    """Check a workload file's source.

    Any Python file may be one: an imported module may train, too. Whether it did is known at its end.

    Args:
        text: the path as the user wrote it.
        ranks: the number of ranks that the batch is split over.
        plan: the plan under which it is to train, where that is known.
        module: the name by which the file is run as a module; "": it is run as a file.

    Raises:
        UsageError: there is no such file, or it is not Python.
        WorkloadError: a `Workload(...)` in it lacks a part, or has one that does not exist, or its batch is
            smaller than the ranks.
        PlanError: it has a loop of its own, which the plan can't train.
    """
    check_name("file", text)
    path = Path(text)
    if str(path).startswith("-"):  # pathlib drops the `./` before it
        path = path.absolute()
    if not path.is_file():
        raise _no_file(path)
    try:
        tree = ast.parse(read_text(path), str(path))
    except (SyntaxError, ReadError, ValueError, RecursionError, MemoryError) as error:
        reason = f": {reason_of(error)}"
        if isinstance(error, SyntaxError):
            reason = f", line {error.lineno}: {error.msg}"
        fix = "mend that line" if path.suffix in ("", ".py") else "name the Python file that trains"
        raise UsageError(f"the workload file {path} should be Python", f"it is not{reason}", fix) from None
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Dict):
        raise _json(path)  # which Python can read, too
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "Workload":
            _check_call(node, path, ranks)
    _check_prepare(tree, path)
    program = list(sources(path, tree, UserProgram(str(path), module).root))
    safe = tuple(name for name in _imports(tree) if name.split(".")[0] in _FORK_SAFE)
    is_loop, trainer = _loop_of(program)
    if is_loop and plan is not None:
        check_plan_of_loop(plan)
    # An installed package may train. A workload that is declared at the top level is a name of the file.
    is_loop = "workload" not in _top_names(tree) if is_loop is None else is_loop
    names_paceline = any(_names_paceline(source) for source in program)
    plain = None if names_paceline else find_plain_script(program)
    return WorkloadFile(path, safe, is_loop, names_paceline, plain, trainer)


def _loop_of(program: Sequence[ast.Module]) -> tuple[bool | None, str]:
    """Return whether a program trains by a loop of its own, and what does it, if that is no `paceline.prepare`.

    Args:
        program: the user's file, then those that it imports, nearest first. The first that shows it decides; None: none
            does.
    """
    for source in program:
        if _declares(source):
            return False, ""
        if _calls(source, module_names.PACKAGE, "prepare"):
            return True, ""
        for module, (names, trainer) in _TRAINERS.items():
            if any(_uses(source, module, name) for name in names):
                return True, trainer
    return None, ""


def _top_names(tree: ast.Module) -> set[str]:
    """Return the names that a source imports or assigns at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names


def _declares(tree: ast.Module) -> bool:
    """Return True if a source makes a `Workload`, or hands one to `paceline.distribute`."""
    makes = any(isinstance(node, ast.Call) and _name(node.func) == "Workload" for node in ast.walk(tree))
    return makes or _calls(tree, module_names.PACKAGE, "distribute")


def _calls(tree: ast.Module, module: str, function: str) -> bool:
    """Return True if a source calls a function of a module, by any name under which it has imported either."""
    is_call = _call_of(tree, module, function)
    return any(is_call(node) for node in ast.walk(tree))


def _uses(tree: ast.Module, module: str, name: str) -> bool:
    """Return True if a source imports a name of a module, to call it or to derive a class from it."""
    modules, names = _names_of(tree, module, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node.value) in modules:
            return True
    return bool(names)


def _call_of(tree: ast.Module, module: str, function: str) -> Callable[[ast.AST], bool]:
    """Return a predicate that is True for a call of a function of a module, by any name that a source has for it."""
    modules, functions = _names_of(tree, module, function)

    def is_call(node: ast.AST) -> bool:
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute):
            return called.attr == function and ast.unparse(called.value) in modules
        return isinstance(called, ast.Name) and called.id in functions

    return is_call


def _names_of(tree: ast.Module, module: str, function: str) -> tuple[set[str], set[str]]:
    """Return the names under which the file has imported a module, and a function of it."""
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


def _names_paceline(tree: ast.Module) -> bool:
    """Return True if a source imports Paceline, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module or ""):
            return True
    return False


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (module_names.PACKAGE, "horovod")  # which paceline.horovod stands for


def _json(path: Path) -> PacelineError:
    fix = "name the Python file that trains; a plan.json stands after --plan"
    if path.suffix == ".ipynb":
        fix = "write its code to a .py file (`jupyter nbconvert --to script` does), or call paceline.launch in it"
    return UsageError(f"the workload file {path} should be Python", "it is JSON", fix)


def _no_file(path: Path) -> PacelineError:
    siblings = []
    if path.parent.is_dir():
        siblings = [file.name for file in path.parent.glob("*.py")]
    near_names = difflib.get_close_matches(path.name, siblings, n=1)
    reason = "that is a folder" if path.is_dir() else "there is no such file"
    fix = "name the Python file that declares it"
    first, _, further_words = str(path).partition(" ")
    if path.exists() and not path.is_dir():  # such as a FIFO, which only one rank could read
        reason, fix = "it is not a regular file", "write it to one"
    elif near_names:
        fix = f"did you mean {path.parent / near_names[0]}? Name the file"
    elif (path / "plan.json").is_file():
        reason = "that is the directory of a run"
        fix = f"name the Python file; `paceline run --job {path.name} --resume FILE` goes on with that run"
    elif further_words and Path(first).is_file():
        fix = f"write {path} without quotes: the file is one word, and its arguments are others"
    elif path.name.partition("=")[0] in (*AXES, *SHORT, *OPTIONS):
        fix = f"join it to the plan by a comma: --plan ...,{path}"
    elif re.fullmatch(r"python[\d.]*", path.name):
        fix = f"leave {path} out, and name the Python file: every rank runs it by Python"
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


def _check_prepare(tree: ast.Module, path: Path) -> None:
    """Raise WorkloadError where `paceline.prepare` is called by names, or its results are taken in another order."""
    is_call = _call_of(tree, module_names.PACKAGE, "prepare")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_call(node):
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in _OPTIONS_OF_PREPARE:
                    raise WorkloadError(
                        f"{path}, line {node.lineno}: paceline.prepare takes objects without names",
                        f"it is called with {keyword.arg}=...; its options are {', '.join(_OPTIONS_OF_PREPARE)}",
                        f"write {_PREPARE}; the plan stands in the command: `paceline run -n N --plan PLAN`",
                    )
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or not is_call(node.value):
            continue
        if len(node.targets) != 1 or (node.value.keywords and not node.value.args):  # the call itself comes later
            continue
        target, handed = node.targets[0], [ast.unparse(element) for element in node.value.args]
        names = [ast.unparse(element) for element in target.elts] if isinstance(target, ast.Tuple) else []
        if not names or any(name.startswith("*") for name in (*names, *handed)):
            continue  # how many there are is known only when it runs
        if len(names) != len(handed) + 1 or (names[0] in handed and names[-1] not in handed):
            raise WorkloadError(
                f"{path}, line {node.lineno}: paceline.prepare returns the job, and then what it is handed",
                f"it is handed {', '.join(handed) or 'nothing'}, and the file takes {', '.join(names)}",
                f"write {_PREPARE}",
            )


def _has_none(call: ast.Call, name: str) -> bool:
    """Return True if the call hands in None by that name."""
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == name and isinstance(value, ast.Constant) and value.value is None:
            return True
    return False


def _name(node: ast.expr) -> str:
    """Return the last name of a called expression: `Workload` for `paceline.Workload`."""
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
