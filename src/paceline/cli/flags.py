"""Which flags apply to what a command was asked to do. One that does not is refused, wherever it stands."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.launch.sbatch_options import TAKEN
from paceline.nouns.errors import UsageError
from paceline.nouns.reading import read_text
from paceline.run.job_settings import ELASTIC, JOB, PLACES, RUN_PLACES, TABLES

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_request import KubernetesOptions

# Places without --max-restarts: what a job there is, why not, and what to do.
_NO_RESTARTS = {
    "ssh": (
        "on a fixed list of hosts over ssh",
        "a lost host would not be there for a restart",
        "leave --max-restarts out, and write --min-hosts N: such a job goes on by itself on the hosts that there are",
    ),
    ELASTIC: (
        "on hosts that come and go",
        "it goes on by itself after a lost process or host, however often",
        "leave --max-restarts out; a host on which ranks died three times is left out",
    ),
}
_WITH_PLAN = ("run", "submit", "plan", "profile", "verify", "explain")
_OPTIONS_OF_PLAN = ("transport", "compression", "bucket_bytes")
# Flags of torchrun, accelerate, mpirun, srun and sbatch: what to write in their place.
_RANKS = "write -n N for N ranks, or -j NODESxRANKS for several hosts"
_NODES = "write -j NODESxRANKS, such as -j 2x8"
_NO_ADDRESS = "leave it out; the ranks find each other without it"
_OF_OTHERS = {
    **dict.fromkeys(("nproc_per_node", "num_processes", "num_proc", "np", "ntasks", "ntasks_per_node"), _RANKS),
    **dict.fromkeys(("nnodes", "nodes", "num_machines"), _NODES),
    **dict.fromkeys(("master_addr", "master_port", "rdzv_endpoint", "rdzv_backend", "rdzv_id"), _NO_ADDRESS),
    **dict.fromkeys(("standalone", "node_rank", "machine_rank"), _NO_ADDRESS),
}
# The same of sbatch: those that no job may have, and those that only an #SBATCH line has.
_SBATCH = {
    **{f"--{name}": option.fix for name, option in TAKEN.items()},
    **{f"-{option.letter}": option.fix for option in TAKEN.values()},
}
_SBATCH_VALUES = ("gres", "gpus", "mem", "mem_per_cpu", "mem_per_gpu", "constraint", "reservation")
_SBATCH_LINES = {f"--{name.replace('_', '-')}": "=VALUE" for name in (*_SBATCH_VALUES, "nodelist", "exclude")}
_SBATCH_LINES["--exclusive"] = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """When some flags apply.

    Args:
        flags: names of their values.
        applies: True if they do, for a command's arguments; for Kubernetes, for its options.
        found: why they don't, for the error's second line.
        fix: what to add, for its third.
    """

    flags: tuple[str, ...]
    applies: Callable[[Any], bool]
    found: str
    fix: str


def _leaves_host(arguments: argparse.Namespace) -> bool:
    """True if a server's command has an address other than a unix socket; what a run's is, only its folder says."""
    for name in ("listen", "coordinator", "job"):
        address = getattr(arguments, name, None)
        if address is not None and not address.startswith("unix:"):
            return True
    return False


_NO_RESULT = Rule(("json",), lambda a: not a.dry_run, "a dry run has no result", "leave --dry-run out")
# Of every command, the flags that do not always apply.
RULES: dict[str, tuple[Rule, ...]] = {
    "run": (_NO_RESULT,),
    "submit": (_NO_RESULT,),
    "plan": (
        Rule(
            ("device",),
            lambda a: a.explain_memory or a.explain_oom,
            "nothing else depends on the device",
            "add --explain-memory",
        ),
        Rule(
            ("expandable_segments",),
            lambda a: a.explain_memory or a.explain_oom,
            "nothing else depends on how memory is allocated",
            "add --explain-memory",
        ),
        Rule(("schedule_picture",), lambda a: not a.json, "JSON has no picture", "leave --json out"),
    ),
    "doctor": (Rule(("python",), lambda a: bool(a.hosts or a.hostfile), "no other host is named", "add -H H1:N,H2:N"),),
    "server": (Rule(("credentials",), _leaves_host, "no address of it leaves this host", "write HOST:PORT addresses"),),
}


# Of the settings of a job on Kubernetes, from flags or the cluster file, those that need another.
_KUBERNETES_RULES = (
    Rule(("pod_group_api",), lambda o: o.gang == "native", "only --gang native has it", "add --gang native"),
    Rule(
        ("placeholder_timeout",),
        lambda o: o.gang in ("yunikorn", "coscheduling"),
        "only --gang yunikorn and coscheduling have it",
        "add --gang yunikorn",
    ),
    Rule(("accelerator",), lambda o: o.gpus > 0, "a node has none of them", "add --gpus N"),
)


def written_flags(parser: argparse.ArgumentParser, command_line: Sequence[str]) -> dict[str, str]:
    """Return the flags that a command line has, also with a default's value: by the name of the value, as written.

    Args:
        parser: of one command; it is changed, so hand over one that nobody else needs.
        command_line: what `parser` has read before without an error.
    """
    actions = list(actions_of(parser))
    flags = {action.dest: action.option_strings[0] for action in actions if action.option_strings}
    # argparse does not say whether a value was written or is the default.
    for action in actions:
        action.default = argparse.SUPPRESS  # so that a flag which is not written leaves no value
    written, _ = parser.parse_known_args(list(command_line))
    return {name: flags[name] for name in vars(written) if name in flags}


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of the parsers of its own commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions_of(below)


def check_rules(verb: str, arguments: argparse.Namespace) -> None:
    """Raise UsageError where a flag was given that does not apply."""
    for rule in RULES.get(verb, ()):
        for name in rule.flags:
            if name in arguments.flags and not rule.applies(arguments):
                flag = arguments.flags[name]
                raise UsageError(f"the flag {flag}", rule.found, f"{rule.fix}, or leave {flag} out")


def check_kubernetes_options(options: KubernetesOptions, names: Mapping[str, str]) -> None:
    """Raise UsageError where a setting was given that does not apply.

    Args:
        options: of the job.
        names: of the settings that were given, as a flag or in the cluster file: how errors call them.
    """
    for rule in _KUBERNETES_RULES:
        for name in rule.flags:
            if name in names and not rule.applies(options):
                raise UsageError(f"{names[name]} does not apply", rule.found, f"{rule.fix}, or leave it out")


def check_place(written: Mapping[str, str], place: str, launcher: str = "") -> None:
    """Raise UsageError where a flag of `paceline run` was given that is about ranks started in another way.

    Args:
        written: the flags that were given, by the names of their values.
        place: what starts the ranks, one of RUN_PLACES.
        launcher: who started this process, where it is a node or a rank.
    """
    for name, flag in written.items():
        if name not in JOB or place in JOB[name].places:
            continue
        if launcher:
            raise UsageError(
                f"{flag} under {launcher}",
                f"{launcher} starts and ends the ranks there; a run directory is kept where --job names one",
                f"leave {flag} out, or start the job with `paceline run -n N` in its place",
            )
        if name == "max_restarts":
            raise UsageError(f"{flag} does not apply to a job {_NO_RESTARTS[place][0]}", *_NO_RESTARTS[place][1:])
        described = {"local": "on this host", ELASTIC: "on hosts that come and go"}
        asked = f"{flag} does not apply to a job {described.get(place, f'--on {place}')}"
        flags = _flags_of(JOB[name].places)
        raise UsageError(asked, f"it belongs to {' or '.join(flags)}", f"write {flags[0]}, or leave {flag} out")


def _flags_of(places: frozenset[str]) -> list[str]:
    """Return the flags for a job in each of some places; hosts that come and go are reached over ssh."""
    if places == {ELASTIC}:
        return ["--on ssh with --min-hosts N"]
    return [f"--on {place}" for place in PLACES if place in places]


def moved(flag: str, command: str) -> str:
    """Return the fix for a flag of an earlier version, of another command or of another launcher; "": of none.

    Args:
        flag: the flag as it was written.
        command: that does not have it.
    """
    name = flag.removeprefix("--").replace("-", "_")
    verb = command.split()[1]
    if name in _OPTIONS_OF_PLAN and verb in _WITH_PLAN:
        return f"write it in the plan, such as --plan replicate=2,{name}=..."
    if verb not in ("run", "submit"):
        return ""
    if command == "paceline submit slurm" and name == "max_restarts":
        return "leave it out; Slurm starts the job again, up to three times, after a rank that a signal ended"
    if command == "paceline submit slurm" and flag in _SBATCH_LINES:
        return f"write --sbatch-option={flag}{_SBATCH_LINES[flag]}"
    if command != "paceline submit slurm" and name in TABLES["slurm"]:
        return "write `paceline submit slurm`, which has it"
    if key := _key_of_former_flag(name):
        return f"write {key} in a file, and name that with --cluster; see docs/hosts.md"
    if command != "paceline submit kubernetes" and name in (*TABLES["kubernetes"], "check"):
        return "write `paceline submit kubernetes`, which has it"
    if verb == "submit" and name in JOB and JOB[name].places & RUN_PLACES:
        return "leave it out; `paceline run` has it"
    if name not in _OF_OTHERS and command == "paceline submit slurm":
        return _SBATCH.get(flag, "")
    return _OF_OTHERS.get(name, "")


def _key_of_former_flag(name: str) -> str:
    """Return the key of the cluster file that a flag of an earlier version became, and its table; "": none."""
    for table, settings in TABLES.items():
        for key, setting in settings.items():
            if setting.former_flag == name:
                return f"{key} under [{table}]"
    return ""


def misplaced(parser: argparse.ArgumentParser, after_file: Sequence[str]) -> list[str]:
    """Return those of the words after FILE that are flags of the command; --help is not, for a file has its own."""
    flags: set[str] = set()
    for action in parser._actions:
        flags.update(action.option_strings)
    flags -= {"-h", "--help"}
    # argparse.REMAINDER takes all words after FILE, also those that were meant for the command.
    return [word for word in after_file if _flag_of(word) in flags]


def check_after_file(file: str, words: Sequence[str], command: str, arguments: Sequence[str]) -> None:
    """Raise UsageError where a flag of the command stands after FILE, whose argument it would be.

    A flag that the file's source has as a string is the file's.

    Args:
        file: the workload file.
        words: the command's flags that stand after it.
        command: the name of the command.
        arguments: all that stands after it.
    """
    strings = _strings(Path(file)) if words else set()
    line = shlex.join([file, "--", *arguments])
    for word in words:
        if _flag_of(word) not in strings:
            raise UsageError(
                f"{word} should stand before {file}",
                f"that is the file's own argument, and this is a flag of `{command}`",
                f"write it before {file}, or write `{line}` if the file has such a flag",
            )


def _flag_of(word: str) -> str:
    """Return the flag in a word such as --plan=shard=2 or -n2."""
    joined = re.fullmatch(r"(-[nj])\d[\dx]*", word)  # -n2, -j2x8
    return joined[1] if joined else word.partition("=")[0]


def _strings(file: Path) -> set[str]:
    """Return every string in the file's source; none where it can't be read: another check says so."""
    try:
        tree = ast.parse(read_text(file))
    except (ValueError, SyntaxError, RecursionError):  # a ReadError is a ValueError
        return set()
    return set(_constants(tree))


def _constants(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
