"""Check the user's lines for sbatch: refuse the options that Paceline decides, and read the others.

Of an option that stands twice in a script, sbatch takes the last, and an SBATCH_ variable wins over both. So an option
that Paceline writes may stand in no line of the user's, and in no variable with another value.
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
_SETTINGS = ("sbatch_option",)  # that errors about a line are about
_WRITTEN = "Paceline writes it itself"
_SEES_ONE = "each rank would see one GPU alone, and where a node has several ranks, they train on the CPU then"


@dataclass(frozen=True, slots=True)
class ReservedOption:
    """An option of sbatch that no line of the user's may have.

    Args:
        found: the reason why no line may have it.
        fix: the advice to the user.
        letter: the short form of the option.
        variable: the variable of sbatch that means the same.
        same: the value of the variable that changes nothing.
        is_default: True where the variable may be set as the user's default while Paceline does not write the option.
    """

    found: str
    fix: str
    letter: str = ""
    variable: str = ""
    same: str = ""
    is_default: bool = False


def _setting(flag: str, letter: str, variable: str) -> ReservedOption:
    return ReservedOption(f"{flag} is for it", f"write {flag}", letter, variable, is_default=True)


_TASKS = ReservedOption("-j says how many ranks a node has", "write -j NODESxRANKS", "n")
TAKEN: dict[str, ReservedOption] = {
    "array": ReservedOption(
        "it makes several jobs of one, which would share a run directory",
        "send each job by a command of its own, with another --job",
        "a",
        "SBATCH_ARRAY_INX",
    ),
    "nodes": ReservedOption("-j says how many nodes there are", "write -j NODESxRANKS, such as -j 2x8", "N"),
    **dict.fromkeys(("ntasks", "tasks"), _TASKS),
    **dict.fromkeys(("ntasks-per-node", "tasks-per-node", "ntasks-per-core", "ntasks-per-socket"), _TASKS),
    "job-name": ReservedOption(_WRITTEN, "write --job NAME", "J", "SBATCH_JOB_NAME"),
    "output": ReservedOption(_WRITTEN, "leave it out; the log is in the run directory", "o", "SBATCH_OUTPUT"),
    "open-mode": ReservedOption(
        _WRITTEN, "leave it out; a job that goes on adds to its log", "", "SBATCH_OPEN_MODE", "append"
    ),
    "requeue": ReservedOption(_WRITTEN, "leave it out"),
    "no-requeue": ReservedOption(
        "the job goes back to the queue by itself after it was stopped", "leave it out", "", "SBATCH_NO_REQUEUE"
    ),
    "signal": ReservedOption(_WRITTEN, "write --signal S", "", "SBATCH_SIGNAL"),
    "partition": _setting("--partition", "p", "SBATCH_PARTITION"),
    "account": _setting("--account", "A", "SBATCH_ACCOUNT"),
    "qos": _setting("--qos", "q", "SBATCH_QOS"),
    "time": _setting("--time", "t", "SBATCH_TIMELIMIT"),
    "gpus-per-node": _setting("--gpus-per-node", "", "SBATCH_GPUS_PER_NODE"),
    "cpus-per-task": _setting("--cpus-per-task", "c", ""),
    "gpus-per-task": ReservedOption(_SEES_ONE, "write --gpus-per-node", "", "SBATCH_GPUS_PER_TASK"),
    "ntasks-per-gpu": ReservedOption(_SEES_ONE, "write --gpus-per-node"),
    "tres-per-task": ReservedOption(_SEES_ONE, "write --gpus-per-node and --cpus-per-task"),
    **dict.fromkeys(
        ("export", "export-file"),
        ReservedOption(
            "the ranks get the variables of this shell, and those that -x adds",
            "write -x NAME or -x NAME=VALUE",
            "",
            "SBATCH_EXPORT",
            "ALL",
        ),
    ),
    "wait": ReservedOption("the command returns when the job is sent", "leave it out", "W", "SBATCH_WAIT"),
    "test-only": ReservedOption("sbatch would send nothing", "write --dry-run"),
    "wrap": ReservedOption(_WRITTEN, "name the file after the flags"),
}
# Short options without a value: others may follow them in a word.
_SHORT = re.compile(r"-[HkOQsvV]*([A-Za-z])(.*)")
_GPUS = {"G": "gpus"}


def check_lines(lines: Sequence[str]) -> None:
    """Raise UsageError for a line of the user's that is no option, or is one that Paceline decides."""
    for line in lines:
        if not re.fullmatch(r"--?[a-zA-Z][^\n\r\\]*", line):
            raise UsageError(f"the line {shown(line)} for sbatch", _NO_OPTION, "write such as --exclusive", _SETTINGS)
        for name, _ in options_of(line):
            reserved = TAKEN.get(name)
            if reserved is not None:
                raise UsageError(f"--sbatch-option {shown(line)}", reserved.found, reserved.fix, _SETTINGS)


def check_variables(written: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Raise UsageError where a variable of sbatch contradicts the script, over which it would win.

    Args:
        written: the script's options, by name.
        environment: the environment that sbatch gets.
    """
    for name, reserved in TAKEN.items():
        value = environment.get(reserved.variable) if reserved.variable else None
        if value is None or value == written.get(name, reserved.same):
            continue
        if name in written or not reserved.is_default:
            found = f"it is set to {shown(value)}, and for sbatch it wins over the script: {reserved.found}"
            raise UsageError(f"{reserved.variable} should not be set here", found, f"unset {reserved.variable}")


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
        raise UsageError(f"the line {shown(line)} for sbatch", str(error).lower(), "mend it", _SETTINGS) from None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield _full_name(name), value if equals else following
        elif short := _SHORT.fullmatch(word):
            names = {reserved.letter: name for name, reserved in reversed(TAKEN.items()) if reserved.letter}
            yield {**names, **_GPUS}.get(short[1], short[1]), short[2] or following


def _full_name(name: str) -> str:
    """Return the full name of an option; sbatch also takes the beginning of one."""
    if name in TAKEN or name in ("gpus", "gres"):
        return name
    return next((known for known in (*TAKEN, "gpus", "gres") if name and known.startswith(name)), name)


def gpus_of_node(lines: Sequence[str], nodes: int) -> int | None:
    """Return the GPUs of a node that the user's lines ask for; None: no line does, or in words that are not known.

    Args:
        lines: the user's lines for sbatch.
        nodes: the number of nodes of the job.
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
