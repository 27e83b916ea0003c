"""Which flags apply to what a command was asked to do. One that does not is refused, wherever it stands."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import UsageError

OWN_ARGUMENTS = "arguments of the file; after `--` where this command has a flag of the same name"
# What starts a job's ranks. The last five: hosts that come and go; manifests that are checked; a launcher that
# started this process as one of its nodes, or as a rank, whose job has a name and a run directory or has none.
PLACES = ("local", "ssh", "mpi", "slurm", "kubernetes", "ray")
ELASTIC = "elastic"
CHECK = "check"
NODE = "node"
NAMED_RANK = "named rank"
RANK = "rank"
_JOBS = frozenset({*PLACES, ELASTIC, NODE, NAMED_RANK, RANK})
_SUPERVISED = frozenset({"local", "ssh", "mpi", "ray", ELASTIC, NODE})  # `paceline run` itself ends the ranks
_WITH_HOSTS = frozenset({"ssh", "mpi", ELASTIC})
_BESIDE_HOST = frozenset({"ssh", "mpi", "ray", "slurm", ELASTIC})
_SLURM = ("partition", "account", "qos", "time", "gpus_per_node", "cpus_per_task", "signal", "sbatch_option")
_KUBERNETES = (
    *("image", "kind", "gang", "cpu", "memory", "shm", "server_cpu", "server_memory", "queue", "namespace"),
    *("runs_claim", "service_account", "priority_class", "runtime", "scheduler", "gpus", "accelerator"),
    *("max_restarts", "placeholder_timeout", "pod_group_api", "user", "context", "node_selector", "toleration"),
    *("image_pull_secret", "egress"),
)
# Of every flag of `paceline run`, by the name of its value: the places where it changes something.
RUN_FLAGS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("n", "plan", "transport", "compression", "bucket_bytes", "job"), _JOBS),
    "on": _JOBS | {CHECK},
    **dict.fromkeys(("checkpoint_every", "keep", "resume_or_start"), _JOBS - {RANK}),
    **dict.fromkeys(("runs", "resume"), _JOBS - {RANK, "kubernetes"}),
    **dict.fromkeys(("grace", "stall_notice"), _SUPERVISED),
    "json": _SUPERVISED | {"slurm"},
    **dict.fromkeys(("dry_run", "env", "shape"), _JOBS - {RANK, NAMED_RANK}),
    **dict.fromkeys(("hosts", "hostfile"), _WITH_HOSTS),
    "interface": _BESIDE_HOST | {NODE},
    "python": _BESIDE_HOST,
    **dict.fromkeys(("ssh_option", "ssh_program"), frozenset({"ssh", ELASTIC})),
    **dict.fromkeys(("mpirun", "mpi_option"), frozenset({"mpi"})),
    **dict.fromkeys(("min_hosts", "max_hosts", "host_discovery_script"), frozenset({ELASTIC})),
    **dict.fromkeys(("ray_address", "cpus_per_rank", "gpus_per_rank", "strategy"), frozenset({"ray"})),
    **dict.fromkeys(_SLURM, frozenset({"slurm"})),
    **dict.fromkeys(_KUBERNETES, frozenset({"kubernetes"})),
    "check": frozenset({CHECK}),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """When some flags apply.

    Args:
        flags: names of their values.
        applies: True if they do, for a command's arguments.
        found: why they don't, for the error's second line.
        fix: what to add, for its third.
    """

    flags: tuple[str, ...]
    applies: Callable[[argparse.Namespace], bool]
    found: str
    fix: str


# Of the flags of `paceline bench`, the subjects that they are about.
_BENCH = {
    "rounds": ("step", "jobs", "strategies"),
    "startup_rounds": ("step",),
    "steps": ("jobs",),
    "busy": ("jobs",),
    "device": ("planner",),
    "published": ("planner",),
}


def _leaves_host(arguments: argparse.Namespace) -> bool:
    """True if a server's command has an address other than a unix socket; what a run's is, only its folder says."""
    for name in ("listen", "coordinator", "job"):
        address = getattr(arguments, name, None)
        if address is not None and not address.startswith("unix:"):
            return True
    return False


def _bench_rule(name: str, subjects: tuple[str, ...]) -> Rule:
    reason = f"--{name.replace('_', '-')} is for bench {' and '.join(subjects)}"
    return Rule((name,), lambda a: a.subject in subjects, reason, f"write {subjects[0]}")


# Of every command, the flags that do not always apply.
RULES: dict[str, tuple[Rule, ...]] = {
    "run": (
        Rule(("pod_group_api",), lambda a: a.gang == "native", "only --gang native has it", "add --gang native"),
        Rule(
            ("placeholder_timeout",),
            lambda a: a.gang in ("yunikorn", "coscheduling"),
            "only --gang yunikorn and coscheduling have it",
            "add --gang yunikorn",
        ),
        Rule(("accelerator",), lambda a: a.gpus > 0, "a node has none of them", "add --gpus N"),
        Rule(("json",), lambda a: not a.dry_run, "a dry run has no result", "leave --dry-run out"),
    ),
    "plan": (
        Rule(
            ("device",),
            lambda a: a.explain_memory or a.explain_oom,
            "nothing else depends on the device",
            "add --explain-memory",
        ),
        Rule(("schedule_picture",), lambda a: not a.json, "JSON has no picture", "leave --json out"),
    ),
    "doctor": (Rule(("python",), lambda a: bool(a.hosts or a.hostfile), "no other host is named", "add -H H1:N,H2:N"),),
    "server": (Rule(("credentials",), _leaves_host, "no address of it leaves this host", "write HOST:PORT addresses"),),
    "bench": tuple(_bench_rule(name, subjects) for name, subjects in _BENCH.items()),
}


def given(parser: argparse.ArgumentParser, command_line: Sequence[str]) -> dict[str, str]:
    """Return the flags that a command line has, also with a default's value: by the name of the value, as written.

    Args:
        parser: of one command; it is changed, so hand over one that nobody else needs.
        command_line: what `parser` has read before without an error.
    """
    actions = list(_actions(parser))
    flags = {action.dest: action.option_strings[0] for action in actions if action.option_strings}
    # argparse does not say whether a value was written or is the default.
    for action in actions:
        action.default = argparse.SUPPRESS  # so that a flag which is not written leaves no value
    written, _ = parser.parse_known_args(list(command_line))
    return {name: flags[name] for name in vars(written) if name in flags}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of the parsers of its own commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


def check_rules(verb: str, arguments: argparse.Namespace) -> None:
    """Raise UsageError where a flag was given that does not apply."""
    for rule in RULES.get(verb, ()):
        for name in rule.flags:
            if name in arguments.given and not rule.applies(arguments):
                flag = arguments.given[name]
                raise UsageError(f"the flag {flag}", rule.found, f"{rule.fix}, or leave {flag} out")


def check_place(arguments: argparse.Namespace, place: str, launcher: str = "") -> None:
    """Raise UsageError where a flag of `paceline run` was given that is about ranks started in another way.

    Args:
        arguments: of the command.
        place: what starts the ranks, one of those in RUN_FLAGS.
        launcher: who started this process, where it is a node or a rank.
    """
    for name, flag in arguments.given.items():
        if place in RUN_FLAGS.get(name, {place}):
            continue
        if launcher:
            raise UsageError(
                f"{flag} under {launcher}",
                f"{launcher} starts and ends the ranks there; a run directory is kept where --job names one",
                f"leave {flag} out, or start the job with `paceline run -n N` in its place",
            )
        here = {"local": "on this host", ELASTIC: "on hosts that come and go", CHECK: "with --check"}
        asked = f"{flag} does not apply to a job {here.get(place, f'--on {place}')}"
        if "local" in RUN_FLAGS[name]:
            raise UsageError(asked, "it changes nothing there", f"leave {flag} out")
        wanted = _written(RUN_FLAGS[name])
        raise UsageError(asked, f"it belongs to {' or '.join(wanted)}", f"write {wanted[0]}, or leave {flag} out")
    check_rules("run", arguments)


def _written(places: frozenset[str]) -> list[str]:
    """Return how a job in one of these places is asked for; hosts that come and go are reached over ssh."""
    if places == {ELASTIC}:
        return ["--on ssh with --min-hosts N"]
    if places == {CHECK}:
        return ["--on kubernetes"]
    return [f"--on {place}" for place in PLACES if place in places]


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
        command: its name.
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
        tree = ast.parse(file.read_text())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return set()
    return set(_constants(tree))


def _constants(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
