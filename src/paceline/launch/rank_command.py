"""The command that somebody else's launcher starts for each rank, which finds its place in its environment."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.names import check_name
from paceline.nouns.plan import Plan
from paceline.nouns.table import printable
from paceline.rendezvous import launchers

# Of a variable whose name has one of these words, the user is shown that it is set, and not its value.
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_HARMLESS = "TOKENIZER"  # a rank saved before the end (sysexits.h, EX_TEMPFAIL: try again); see launch/slurm.py
STOPPED_CODE = 75  # --stall-timeout ended the job, as timeout(1) does: a scheduler may start it again
STALLED_CODE = 124  # of a job that --stall-timeout ended, as of timeout(1): a scheduler may start it again
HIDDEN = "(set, not shown)"
# Variables that -x can't set: by them a launcher says which rank a process is, or Paceline what its job is. Beginnings
# are those of options of sbatch and srun, and of the nodes of pods.
_RANK_WORDS = " ".join(itertools.chain.from_iterable(launchers.NAMES.values()))
_OF_RANKS = set(_RANK_WORDS.split())
_OF_JOBS = {
    f"PACELINE_{name}" for name in ("RUN_DIR", "PLAN", "RESUME", "SUPERVISED", "STOP_FILE", "RESTART", "AS_TORCHRUN")
}
_OF_LAUNCHERS = ("SBATCH_", "SLURM_", "SRUN_", "PET_")


@dataclass(frozen=True, slots=True)
class RankCommand:
    """The command line of a rank, and the job that it belongs to.

    Args:
        file, arguments: the path of the user's file, and its arguments.
        plan: the plan of the job.
        runs, job: the folder and the name of the job's run directory, RUNS/JOB.
        nodes, ranks_per_node: the number of nodes, and of ranks on each; the plan covers their product.
        environment: the variables for the ranks; values never stand on a command line.
        stall_timeout_s: the seconds without progress until the job is ended; 0: never.
        python: the Python program on each host.
    """

    file: Path
    arguments: Sequence[str]
    plan: Plan
    runs: Path
    job: str
    nodes: int = 1
    ranks_per_node: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    stall_timeout_s: float = 0.0

    @property
    def run_dir(self) -> Path:
        """Return the job's run directory."""
        return self.runs / self.job

    def words(self) -> list[str]:
        """Return the command line as words."""
        return [
            *(self.python, "-m", module_names.COMMAND, "run"),
            *("--runs", str(self.runs.resolve()), "--job", self.job, "--resume-or-start"),
            *("--plan", str((self.run_dir / "plan.json").resolve())),
            *stall_timeout_flag(self.stall_timeout_s),
            *(str(self.file.resolve()), *own_arguments(self.arguments)),
        ]


def stall_timeout_flag(seconds: float) -> list[str]:
    """Return --stall-timeout as words; none for 0, which is the default."""
    return ["--stall-timeout", f"{seconds:.15g}"] if seconds else []


def own_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a file's arguments as `paceline run` takes them: after `--` where one could be taken for its own flag."""
    if any(argument.startswith("-") for argument in arguments):
        return ["--", *arguments]
    return list(arguments)


def environment_of(definitions: Sequence[str]) -> dict[str, str]:
    """Return the variables that -x names, with the values given or those of this process.

    Args:
        definitions: the variables, each as NAME or NAME=VALUE.

    Raises:
        UsageError: a name is none, or it is not set here, or a secret's value is given.
    """
    environment = {}
    for definition in definitions:
        name, equals, value = definition.partition("=")
        check_variable(name, f"can't pass -x {printable(definition)}", "write -x NAME or -x NAME=VALUE")
        if not equals and name not in os.environ:
            fix = f"write -x {name}=VALUE, or set it"
            if is_secret(name):
                fix = f"set it (export {name}=...), then write -x {name}"
            raise UsageError(f"can't pass -x {name}", "it is not set here", fix)
        if equals and is_secret(name):  # `ps` shows every user's command lines
            raise UsageError(
                f"can't pass -x {name}=...",
                "a secret on a command line is read by others",
                f"set it, then write -x {name}",
            )
        environment[name] = value if equals else os.environ[name]
    return environment


def check_variable(name: str, asked: str, fix: str = "") -> None:
    """Raise UsageError for a text that is no variable's name, and for a variable that a launcher or Paceline sets.

    Args:
        name: the name of the variable.
        asked: the first line of the error.
        fix: the last line of the error, where it is no name.
    """
    check_name("variable", name, asked, fix)
    if name in _OF_RANKS | _OF_JOBS or name.startswith(_OF_LAUNCHERS):
        raise UsageError(asked, "what starts the ranks sets it for each of them", f"leave {name} out")


def is_secret(name: str) -> bool:
    """Return True if a variable's name says that its value is a secret."""
    upper_name = name.upper().replace(_HARMLESS, "")
    return any(word in upper_name for word in _SECRETS)


def shown(environment: dict[str, str]) -> dict[str, str]:
    """Return variables with the values that may be printed."""
    values = {}
    for name, value in environment.items():
        values[name] = HIDDEN if is_secret(name) else value
    return values


def export_lines(environment: Mapping[str, str]) -> list[str]:
    """Return a line of a shell for each variable; for a secret a remark."""
    lines = []
    for name, value in environment.items():
        lines.append(f"# {name} {HIDDEN}" if is_secret(name) else f"export {name}={quoted([value])}")
    return lines


def quoted(words: Iterable[str]) -> str:
    """Return words as one line for bash: sbatch, and whoever looks for its options, reads a script line by line."""
    texts = []
    for word in words:
        text = shlex.quote(word)
        if not word.isprintable():
            text = "$'" + "".join(map(_escaped, word)) + "'"
        texts.append(text)
    return " ".join(texts)


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
