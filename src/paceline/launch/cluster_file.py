"""Read the cluster file: settings of the programs that start a job's ranks, with a table for each program.

    [ssh]
    options = ["-p2222"]

    [slurm]
    partition = "gpu"

A flag of the same name wins over the file, and the file over the default. One file may hold the tables of all
launchers of a cluster: all are checked, and a job uses the one of its own launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.command import HIDDEN, is_secret
from paceline.launch.kubernetes.job import GANGS, KINDS, POD_GROUP_APIS
from paceline.launch.ray import STRATEGIES
from paceline.nouns.errors import PlanError, ReadError, UsageError, did_you_mean
from paceline.nouns.names import check_name
from paceline.nouns.reading import fault_of, read_toml, shown

MOST_BYTES = 2**16
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable: the cluster that this host is in
_NAME = re.compile(r"([A-Za-z0-9_-]+)[=:\s]")  # of what follows, in a word such as --export=API_KEY=...
_USER = re.compile(r"(?<=//)[^/@\s]+(?=@)|^[^/@\s]+:[^/@\s]+(?=@)")  # in an address or an image


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a table.

    Args:
        kind: str, int, float, or tuple: a list of texts.
        default: the value where neither a flag nor the file has one.
        choices: the texts that it may be; none: any text.
        named: how errors call it where they say neither KEY=VALUE nor 'VALUE': an expression; {value} is its value.
    """

    kind: type
    default: Any
    choices: tuple[str, ...] = ()
    named: str = ""


def _texts(*names: str) -> dict[str, Setting]:
    return {name: Setting(str, "") for name in names}


def _lists(*names: str) -> dict[str, Setting]:
    return {name: Setting(tuple, ()) for name in names}


_PLACE = {"python": Setting(str, sys.executable), "interface": Setting(str, "")}
TABLES: dict[str, dict[str, Setting]] = {
    "ssh": {"program": Setting(str, "ssh", named="hosts by {value}$"), **_lists("options"), **_PLACE},
    "mpi": {"mpirun": Setting(str, "", named="^{value} to start|^what {value} is"), **_lists("options")},
    "ray": {
        "address": Setting(str, "local"),
        "cpus_per_rank": Setting(float, 1, named="needs resources"),
        "gpus_per_rank": Setting(float, 0, named="needs resources"),
        "strategy": Setting(str, "PACK", STRATEGIES),
    },
    "slurm": {
        **_texts("partition", "account", "qos", "time"),
        "gpus_per_node": Setting(int, 0, named="ranks on a node with"),
        "cpus_per_task": Setting(int, 0),
        "signal": Setting(int, 120, named="with --signal {value}$"),
        **_lists("sbatch_option"),
        **_PLACE,
    },
    "kubernetes": {
        "image": Setting(str, ""),
        "kind": Setting(str, "jobset", KINDS),
        "gang": Setting(str, "none", GANGS),
        **_texts("cpu", "memory"),
        "shm": Setting(str, "1Gi", named="/dev/shm of {value}"),
        **_texts("server_cpu", "server_memory", "queue"),
        "namespace": Setting(str, "default"),
        **_texts("runs_claim", "service_account", "priority_class", "runtime", "scheduler"),
        "gpus": Setting(int, 0, named="the job's accelerators|ranks on a node with"),
        "accelerator": Setting(str, "nvidia.com/gpu"),
        "max_restarts": Setting(int, 3, named="the job's max_restarts"),
        "placeholder_timeout": Setting(int, 600, named="the job's placeholder_timeout"),
        "pod_group_api": Setting(str, POD_GROUP_APIS[0], POD_GROUP_APIS),
        "user": Setting(int, 1000, named="the job's user"),
        **_texts("context"),
        **_lists("node_selector", "toleration", "image_pull_secret", "egress"),
    },
}
# Flags about the job, and the tables of launchers that have some of them alone.
_OF_THE_JOB = ("plan", "job", "env", "checkpoint_every", "keep", "copy_to", "stall_timeout")
_OF_SOME_JOBS = {"hosts": ("ssh", "mpi"), "hostfile": ("ssh", "mpi"), "runs": ("ssh", "mpi", "ray", "slurm")}
_KINDS = {str: "a text", int: "a whole number", float: "a number", tuple: "a list of texts"}
_FORMS = {str: str, int: int, float: float, tuple: [str]}
_EXAMPLES = {str: '"..."', int: "1", float: "1", tuple: '["..."]'}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of one launcher for one job.

    Args:
        table: of the cluster file.
        values: by key.
        sources: by key: the flag, file or variable that the value comes from; "default".
        names: by key, of those that are not the default: how errors call them.
        from_file: keys whose value is the file's.
    """

    table: str
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    names: Mapping[str, str]
    from_file: Mapping[str, str]

    @contextlib.contextmanager
    def naming_the_file(self) -> Iterator[None]:
        """Add to an error about a value of the cluster file that it comes from there."""
        try:
            yield
        except (UsageError, PlanError) as error:
            text = f"{error.asked}\n{error.found}"
            named = [self.from_file[key] for key in self.from_file if self._is_named(key, text)]
            if named:
                error.found += f" ({', '.join(named)})"
            raise

    def _is_named(self, key: str, text: str) -> bool:
        """True if an error is about the value of a key."""
        setting = TABLES[self.table][key]
        value = self.values[key]
        signs = [re.escape(f"{key}={value}") + r"\b"]
        if setting.named:
            signs.append(setting.named.replace("{value}", re.escape(str(value))))
        for item in value if setting.kind is tuple else [value]:
            if isinstance(item, str):
                signs.append(re.escape(repr(item)))
                signs.append(rf"^--{key.replace('_', '-')} {re.escape(item)}$")
        return any(re.search(sign, text, re.MULTILINE) for sign in signs)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """What a cluster file has.

    Args:
        path: of the file; None: there is none, and every setting is a flag's or the default.
        tables: its tables.
    """

    path: Path | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def settings(self, table: str, flags: Mapping[str, tuple[str, Any]]) -> ClusterSettings:
        """Return the settings of one launcher.

        Args:
            table: of the launcher.
            flags: by key, those that a command line has: as written, and the value.
        """
        in_file = self.tables.get(table, {})
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        names: dict[str, str] = {}
        from_file: dict[str, str] = {}
        for key, setting in TABLES[table].items():
            if key in flags:
                flag, value = flags[key]
                for text in value if setting.kind is tuple else [value]:
                    check_name("text", str(text), f"{flag} {shown(text)} can't be used")
                sources[key] = f"flag {flag}"
                names[key] = f"the flag {flag}"
            elif key in in_file:
                value = in_file[key]
                sources[key] = f"{self.path}: [{table}]"
                names[key] = from_file[key] = f"[{table}] {key} in {self.path}"
            else:
                value, sources[key] = _default(table, key, setting)
            values[key] = tuple(value) if setting.kind is tuple else value
        return ClusterSettings(table, values, sources, names, from_file)


def _default(table: str, key: str, setting: Setting) -> tuple[Any, str]:
    if (table, key) == ("ray", "address") and os.environ.get(RAY_ADDRESS):
        return os.environ[RAY_ADDRESS], RAY_ADDRESS
    return setting.default, "default"


def read_cluster_file(path: Path | None) -> ClusterFile:
    """Read a cluster file; without one, every setting is a flag's or the default.

    Raises:
        UsageError: it can't be read, is not TOML, or has a table, key or value that no launcher has.
    """
    if path is None:
        return ClusterFile()
    try:
        tables = read_toml(path, MOST_BYTES)
    except ReadError as error:
        fix = "name a text file with tables such as [ssh], and the keys that docs/hosts.md lists"
        raise UsageError(f"can't read the cluster file {path}", error.found, fix) from None
    for name, table in tables.items():
        _check_table(path, name, table)
    return ClusterFile(path, tables)


def _check_table(path: Path, name: str, table: Any) -> None:
    listed = ", ".join(TABLES)
    if name not in TABLES:
        what = f"the table [{_cut(name)}]" if isinstance(table, dict) else f"the key {_cut(name)} outside of a table"
        raise UsageError(
            f"the cluster file {path} has {what}",
            f"its tables are {listed}",
            did_you_mean(name, TABLES, "leave it out, or write it in one of these"),
        )
    if not isinstance(table, dict):
        raise UsageError(f"[{name}] in {path} should be one table", f"it is {_kind_of(table)}", f"write [{name}] once")
    for key, value in table.items():
        if key not in TABLES[name]:
            raise UsageError(
                f"the cluster file {path} has the key {_cut(key)} in [{name}]",
                f"the keys of [{name}] are {', '.join(TABLES[name])}",
                _advice(name, key),
            )
        _check_value(f"[{name}] {key} in {path}", key, value, TABLES[name][key])


def _advice(table: str, key: str) -> str:
    """Return the fix for a key that a table does not have: the table that has it, a flag, or a key that is near."""
    others = [f"[{other}]" for other in TABLES if key in TABLES[other]]
    if others:
        return f"write it in {' or '.join(others)}"
    name = key.replace("-", "_")
    if name in _OF_THE_JOB or table in _OF_SOME_JOBS.get(name, ()):
        return f"write --{name.replace('_', '-')} in the command, since it is about the job and not the cluster"
    return did_you_mean(name, TABLES[table], "leave it out")


def _check_value(where: str, key: str, value: Any, setting: Setting) -> None:
    # A value is not quoted unless it is no choice: it may be a secret.
    if fault_of(value, _FORMS[setting.kind]) is not None:
        fix = f"write {key} = {_EXAMPLES[setting.kind]}"
        raise UsageError(f"{where} should be {_KINDS[setting.kind]}", f"it is {_kind_of(value)}", fix)
    if setting.choices and value not in setting.choices:
        fix = did_you_mean(value, setting.choices, "write one of these")
        raise UsageError(f"{where} is {shown(value)}", f"the choices are {', '.join(setting.choices)}", fix)
    for text in value if setting.kind is tuple else [value]:
        if not isinstance(text, str):
            continue
        if not text and setting.default != "":
            raise UsageError(f"{where} can't be used", "a text is empty", "mend it, or leave it out")
        check_name("text", text, f"{where} can't be used", "mend it, or leave it out")


def _kind_of(value: Any) -> str:
    """Return what a value of TOML is, without the value."""
    kinds: dict[type, str] = {**_KINDS, bool: "true or false", float: "a number with a point", dict: "a table"}
    if isinstance(value, list):
        is_tables = value and all(isinstance(item, dict) for item in value)
        return "a list of tables" if is_tables else "a list with something else in it"
    if type(value) is int and fault_of(value, int):
        return "a number of more than 64 bits"
    if type(value) is float and fault_of(value, float):
        return "infinite, or not a number"
    return kinds.get(type(value), "a date or a time")


def _cut(name: str) -> str:
    return shown(name).strip("'\"")


def displayed(value: Any) -> str:
    """Return a setting's value as it may be printed: what a name in it calls a secret is left out."""
    words = list(value) if isinstance(value, tuple) else [str(value)]
    printable = []
    is_value_of_secret = False
    for word in words:
        if is_value_of_secret:  # such as the second word of `--token VALUE`
            printable.append(HIDDEN)
            is_value_of_secret = False
            continue
        is_value_of_secret = word.startswith("-") and not _NAME.search(word) and is_secret(word)
        printable.append(_without_secret(word))
    return " ".join(printable) or "none"


def _without_secret(word: str) -> str:
    for match in _NAME.finditer(word):
        if is_secret(match[1]):
            return word[: match.end()] + HIDDEN  # to the end: a secret may have any characters
    return _USER.sub(HIDDEN, word)
