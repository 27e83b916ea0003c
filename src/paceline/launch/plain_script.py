"""Recognize a script that distributes its training itself, without Paceline, by its source; it is not run for that.

Such a script is started as torchrun starts it: see `launch/torchrun_variables.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.nouns.errors import UsageError

_PAGE = "see docs/migrate.md"
_MODEL = "paceline.prepare in its place keeps checkpoints for --resume, and takes other plans, such as --plan shard=2"
_LOOP = "a loop with paceline.prepare also runs under other plans, such as --plan shard=2, and with --resume"


@dataclass(frozen=True, slots=True)
class _Library:
    """What a script calls that distributes its training.

    Args:
        package: the package that has the functions.
        names: the last names of the functions and classes.
        found: the part of a sentence that says what the script does.
        advice: the sentence about what Paceline could do.
        starts_processes: True where the library starts the processes of its training itself, from one.
    """

    package: str
    names: tuple[str, ...]
    found: str
    advice: str
    starts_processes: bool = False


# The first that a program calls is named to the user: those that stand on others come before them.
_LIBRARIES = (
    _Library("ray.train", ("TorchTrainer",), "trains with Ray Train", _LOOP, starts_processes=True),
    _Library("deepspeed", ("initialize", "init_distributed"), "trains with DeepSpeed", _LOOP),
    _Library("trl", ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer"), "trains with TRL", _LOOP),
    _Library("transformers", ("Trainer", "Seq2SeqTrainer"), "trains with transformers' Trainer", _LOOP),
    _Library("accelerate", ("Accelerator",), "trains with Accelerate", _LOOP),
    _Library("lightning", ("Trainer", "Fabric"), "trains with Lightning", _LOOP),
    _Library("pytorch_lightning", ("Trainer",), "trains with Lightning", _LOOP),
    _Library("lightning_fabric", ("Fabric",), "trains with Lightning", _LOOP),
    _Library("torch", ("fully_shard", "FullyShardedDataParallel"), "shards its model by FSDP", _MODEL),
    _Library("torch", ("DistributedDataParallel",), "wraps its model in DistributedDataParallel", _MODEL),
    _Library("torch", ("init_device_mesh", "DeviceMesh"), "makes a DeviceMesh", _LOOP),
    _Library("torch", ("init_process_group",), "makes a process group of torch.distributed", _LOOP),
)
_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.spawn.spawn")
# By these a script that can start its processes itself finds out that they have been started.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
_RANK_OPTIONS = ("--local-rank", "--local_rank")  # torch.distributed.launch hands the first to each rank


@dataclass(frozen=True, slots=True)
class PlainScript:
    """What the source says of a script that distributes its training without Paceline.

    Args:
        found: the part of a sentence that says what it does.
        advice: the sentence about what Paceline could do.
        spawner: the function by which the script starts its processes itself; "": it does not.
        rank_option: the option by which it takes its local rank, as torch.distributed.launch hands it over; "": none.
        runs_alone: True where it is no rank of a process group when it is started as one process.
    """

    found: str
    advice: str
    spawner: str = ""
    rank_option: str = ""
    runs_alone: bool = False

    def needs_variables(self, ranks: int) -> bool:
        """Return True if so many ranks of the script need torchrun's variables."""
        return not self.spawner and not (self.runs_alone and ranks == 1)

    def check_ranks(self, path: str, ranks: int) -> None:
        """Raise UsageError where a script that starts its own processes would be started more than once."""
        if self.spawner and ranks > 1:
            raise UsageError(
                f"{path} on {ranks} ranks",
                f"it starts its processes itself, by {self.spawner}, and each rank would start all of them",
                "leave -n out, or read RANK and WORLD_SIZE in place of that call, as under torchrun",
            )

    def note(self, path: str) -> str:
        """Return the line for the user."""
        started = "runs once, as by python" if self.spawner else "is started as by torchrun"
        return f"note: {path} {self.found}, and {started}; {self.advice}: {_PAGE}"


def find_plain_script(program: Sequence[ast.Module]) -> PlainScript | None:
    """Return the facts about a program that distributes its training without Paceline; None: it calls nothing known.

    Args:
        program: the syntax trees of the user's file and of those that it imports.
    """
    called: list[str] = []
    for source in program:
        called += _called_names(source)
    library = _library_of(called)
    if library is None:
        return None
    is_rank = any(_reads_rank(source) for source in program)
    spawner = next((name for name in called if name in _SPAWNS), "") if not is_rank else ""
    if library.starts_processes:
        spawner = next(name for name in called if _is_of(library, name))
    option = next((option for source in program for option in _rank_options(source)), "")
    return PlainScript(library.found, library.advice, spawner, option, "Lightning" in library.found)


def _library_of(called: Sequence[str]) -> _Library | None:
    """Return the first library of the table of which one of some functions is."""
    for library in _LIBRARIES:
        if any(_is_of(library, name) for name in called):
            return library
    return None


def _is_of(library: _Library, name: str) -> bool:
    return name.startswith(f"{library.package}.") and name.rpartition(".")[2] in library.names


def _called_names(tree: ast.Module) -> Iterator[str]:
    """Yield the full names of the functions that a source calls, by what it has imported."""
    imported = _imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _full_name(node.func, imported)
            if name:
                yield name


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name that a source has by an import."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _full_name(node: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the full name of what an expression such as `dist.barrier` names; "" where no import has its beginning."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in imported:
        return ""
    return ".".join([imported[node.id], *reversed(parts)])


def _reads_rank(tree: ast.Module) -> bool:
    """Return True if a source reads the variable of its rank, which torchrun sets."""
    written = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            written.add(id(node.slice))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in _RANK_VARIABLES and id(node) not in written:
            return True
    return False


def _rank_options(tree: ast.Module) -> Iterator[str]:
    """Yield the options for the local rank that a source declares by `add_argument`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        for argument in node.args:
            if isinstance(argument, ast.Constant) and argument.value in _RANK_OPTIONS:
                yield str(argument.value)
