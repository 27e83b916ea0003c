"""Say which options of sbatch a job can't have as lines of the user's, and read those that it may have.

Of an option that stands twice in a script, sbatch takes the last, and an SBATCH_ variable wins over both. So what
Paceline writes may stand in no line of the user's, and in no variable with another value.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole, shown

_NO_OPTION = "it is no option, or has a backslash or a line end"
_WRITTEN = "Paceline writes it itself"
_SEES_ONE = "each rank would see one GPU alone, and where a node has several ranks, they train on the CPU then"


@dataclass(frozen=True, slots=True)
class Taken:
    """An option of sbatch that no line of the user's may have.

    Args:
        found: why not.
        fix: what to write in its place.
        letter: its short form.
        variable: of sbatch's, which means the same.
        same: the variable's value that changes nothing.
        is_default: the variable may stand where Paceline does not write the option: it is this user's default.
    """

    found: str
    fix: str
    letter: str = ""
    variable: str = ""
    same: str = ""
    is_default: bool = False


def _setting(flag: str, letter: str, variable: str) -> Taken:
    return Taken(f"{flag} is for it", f"write {flag}", letter, variable, is_default=True)


_TASKS = Taken("-j says how many ranks a node has", "write -j NODESxRANKS", "n")
TAKEN: dict[str, Taken] = {
    "array": Taken(
        "it makes several jobs of one, which would share a run directory",
        "send each job by a command of its own, with another --job",
        "a",
        "SBATCH_ARRAY_INX",
    ),
    "nodes": Taken("-j says how many nodes there are", "write -j NODESxRANKS, such as -j 2x8", "N"),
    **dict.fromkeys(("ntasks", "tasks"), _TASKS),
    **dict.fromkeys(("ntasks-per-node", "tasks-per-node", "ntasks-per-core", "ntasks-per-socket"), _TASKS),
    "job-name": Taken(_WRITTEN, "write --job NAME", "J", "SBATCH_JOB_NAME"),
    "output": Taken(_WRITTEN, "leave it out; the log is in the run directory", "o", "SBATCH_OUTPUT"),
    "open-mode": Taken(_WRITTEN, "leave it out; a job that goes on adds to its log", "", "SBATCH_OPEN_MODE", "append"),
    "requeue": Taken(_WRITTEN, "leave it out"),
    "no-requeue": Taken(
        "the job goes back to the queue by itself after it was stopped", "leave it out", "", "SBATCH_NO_REQUEUE"
    ),
    "signal": Taken(_WRITTEN, "write --signal S", "", "SBATCH_SIGNAL"),
    "partition": _setting("--partition", "p", "SBATCH_PARTITION"),
    "account": _setting("--account", "A", "SBATCH_ACCOUNT"),
    "qos": _setting("--qos", "q", "SBATCH_QOS"),
    "time": _setting("--time", "t", "SBATCH_TIMELIMIT"),
    "gpus-per-node": _setting("--gpus-per-node", "", "SBATCH_GPUS_PER_NODE"),
    "cpus-per-task": _setting("--cpus-per-task", "c", ""),
    "gpus-per-task": Taken(_SEES_ONE, "write --gpus-per-node", "", "SBATCH_GPUS_PER_TASK"),
    "ntasks-per-gpu": Taken(_SEES_ONE, "write --gpus-per-node"),
    "tres-per-task": Taken(_SEES_ONE, "write --gpus-per-node and --cpus-per-task"),
    **dict.fromkeys(
        ("export", "export-file"),
        Taken(
            "the ranks get the variables of this shell, and those that -x adds",
            "write -x NAME or -x NAME=VALUE",
            "",
            "SBATCH_EXPORT",
            "ALL",
        ),
    ),
    "wait": Taken("the command returns when the job is sent", "leave it out", "W", "SBATCH_WAIT"),
    "test-only": Taken("sbatch would send nothing", "write --dry-run"),
    "wrap": Taken(_WRITTEN, "name the file after the flags"),
}
# Short options without a value: others may follow them in a word.
_SHORT = re.compile(r"-[HkOQsvV]*([A-Za-z])(.*)")
_GPUS = {"G": "gpus"}


def check_lines(lines: Sequence[str]) -> None:
    """Raise UsageError for a line of the user's that is no option, or is one that Paceline decides."""
    for line in lines:
        if not re.fullmatch(r"--?[a-zA-Z][^\n\r\\]*", line):
            raise UsageError(f"the line {shown(line)} for sbatch", _NO_OPTION, "write such as --exclusive")
        for name, _ in options_of(line):
            taken = TAKEN.get(name)
            if taken is not None:
                raise UsageError(f"--sbatch-option {shown(line)}", taken.found, taken.fix)


def check_variables(written: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Raise UsageError where a variable of sbatch's contradicts the script, over which it would win.

    Args:
        written: the script's options, by name.
        environment: that sbatch is given.
    """
    for name, taken in TAKEN.items():
        value = environment.get(taken.variable) if taken.variable else None
        if value is None or value == written.get(name, taken.same):
            continue
        if name in written or not taken.is_default:
            found = f"it is set to {shown(value)}, and for sbatch it wins over the script: {taken.found}"
            raise UsageError(f"{taken.variable} should not be set here", found, f"unset {taken.variable}")


def options_of(line: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each option in a line, as sbatch reads it.

    Raises:
        UsageError: a quote has no end, or a part of the line is a remark.
    """
    try:
        words = shlex.split(line)
        if shlex.split(line, comments=True) != words:
            raise ValueError("a # outside of quotes begins a remark")
    except ValueError as error:
        raise UsageError(f"the line {shown(line)} for sbatch", str(error).lower(), "mend it") from None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield _whole(name), value if equals else following
        elif short := _SHORT.fullmatch(word):
            names = {taken.letter: name for name, taken in reversed(TAKEN.items()) if taken.letter}
            yield {**names, **_GPUS}.get(short[1], short[1]), short[2] or following


def _whole(name: str) -> str:
    """Return the name that sbatch takes a name for: the beginning of one is enough for it."""
    if name in TAKEN or name in ("gpus", "gres"):
        return name
    return next((known for known in (*TAKEN, "gpus", "gres") if name and known.startswith(name)), name)


def gpus_of_node(lines: Sequence[str], nodes: int) -> int | None:
    """Return the GPUs of a node that lines of the user's ask for; None: none does, or in words that are not known.

    Args:
        lines: of the user's.
        nodes: of the job.
    """
    for name, value in itertools.chain.from_iterable(map(options_of, lines)):
        parts = value.split(",")
        if name == "gres":
            parts = [part for part in parts if part.split(":")[0].removeprefix("gres/") == "gpu"]
        elif name != "gpus":
            continue
        counts = [_count(part) for part in parts]
        if not counts or None in counts:
            continue
        gpus = sum(filter(None, counts))
        return gpus if name == "gres" else _of_fewest(gpus, nodes)
    return None


def _of_fewest(gpus: int, nodes: int) -> int:
    """Return the GPUs of the node with the fewest; 1 where there are fewer GPUs than nodes, 0 where there are none."""
    return max(gpus // nodes, min(gpus, 1))


def _count(part: str) -> int | None:
    """Return the number in `4`, `a100:4`, `gpu`, `gpu:4` or `gpu:a100:4(S:0)`; None where it is none."""
    last = part.partition("(")[0].split(":")[-1]
    return parse_whole(last) if last[:1].isdigit() else 1
