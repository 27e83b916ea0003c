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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.rank_command import HIDDEN, is_secret
from paceline.nouns.errors import PacelineError, ReadError, UsageError, did_you_mean
from paceline.nouns.names import check_name
from paceline.nouns.reading import fault_of, read_toml, shown
from paceline.run.job_settings import JOB, TABLES, Setting

MOST_BYTES = 2**16
_NAME = re.compile(r"([A-Za-z0-9_-]+)[=:\s]")  # a variable's, in a word such as --export=API_KEY=...
_USER = re.compile(r"(?<=//)[^/@\s]+(?=@)|^[^/@\s]+:[^/@\s]+(?=@)")  # in an address or an image
KIND_NAMES = {str: "a text", int: "a whole number", float: "a number", tuple: "a list of texts"}
_FORMS = {str: str, int: int, float: float, tuple: [str]}
_EXAMPLES = {str: '"..."', int: "1", float: "1", tuple: '["..."]'}


@dataclass(frozen=True, slots=True)
class Source:
    """The place that the value of a setting comes from.

    Args:
        row: its name in the rows of `paceline explain`.
        in_errors: its name in errors; "": errors do not name the default.
        is_flag: a command line has the value.
    """

    row: str
    in_errors: str = ""
    is_flag: bool = False

    @property
    def subject(self) -> str:
        """The name at the beginning of a sentence."""
        return f"the {self.in_errors}" if self.is_flag else self.in_errors


DEFAULT = Source("default")


def source_of_flag(flag: str) -> Source:
    """Return the source of a value that a command line has."""
    return Source(f"flag {flag}", f"flag {flag}", is_flag=True)


def source_without_flag(setting: Setting, environment: Mapping[str, str]) -> Source:
    """Return the source of a value that no flag and no file has: a variable, or the default."""
    name = setting.variable
    return Source(name, f"variable {name}") if name and environment.get(name) else DEFAULT


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of one launcher for one job.

    Args:
        table: the name of the launcher's table in the cluster file.
        values: the value of each key of the table.
        sources: the source of each value, and of those of all other flags.
    """

    table: str
    values: Mapping[str, Any]
    sources: Mapping[str, Source]

    @property
    def subjects(self) -> dict[str, str]:
        """The names of those keys that do not have their default, as the subjects of errors."""
        return {key: self.sources[key].subject for key in self.values if self.sources[key] is not DEFAULT}

    @contextlib.contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Add to an error about settings where their values come from: flags, the cluster file, variables."""
        try:
            yield
        except PacelineError as error:
            sources = [self.sources.get(name, DEFAULT).in_errors for name in error.settings]
            named = ", ".join(filter(None, sources))
            if named:
                error.found += f" ({named})"
            raise


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The tables of a cluster file.

    Args:
        path: of the file; None: there is none, and every setting is a flag's or the default.
        tables: the keys and values of each table that the file has.
    """

    path: Path | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def settings(self, table: str, flags: Mapping[str, tuple[str, Any]]) -> ClusterSettings:
        """Return the settings of one launcher.

        Args:
            table: the name of the launcher's table.
            flags: the flags of a command line as written, with their values, by the names of the settings.
        """
        in_file = self.tables.get(table, {})
        values: dict[str, Any] = {}
        sources = {name: source_of_flag(flag) for name, (flag, _) in flags.items()}
        for key, setting in TABLES[table].items():
            if key in flags:
                flag, value = flags[key]
                for text in value if setting.kind is tuple else [value]:
                    check_name("text", str(text), f"{flag} {shown(text)} can't be used")
            elif key in in_file:
                value = in_file[key]
                sources[key] = Source(f"{self.path}: [{table}]", f"[{table}] {key} in {self.path}")
            else:
                sources[key] = source_without_flag(setting, os.environ)
                value = setting.default if sources[key] is DEFAULT else os.environ[setting.variable]
            values[key] = tuple(value) if setting.kind is tuple else value
        return ClusterSettings(table, values, sources)


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


def _check_table(path: Path, name: str, table: object) -> None:
    listed = ", ".join(TABLES)
    if name not in TABLES:
        part = f"the table [{_cut(name)}]" if isinstance(table, dict) else f"the key {_cut(name)} outside of a table"
        raise UsageError(
            f"the cluster file {path} has {part}",
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
        _check_value(f"[{name}] {key} in {path}", value, TABLES[name][key])


def _advice(table: str, key: str) -> str:
    """Return the fix for a key that a table does not have: the table that has it, a flag, or a key that is near."""
    tables_with_key = [f"[{name}]" for name in TABLES if key in TABLES[name]]
    if tables_with_key:
        return f"write it in {' or '.join(tables_with_key)}"
    name = key.replace("-", "_")
    if name in JOB and table in JOB[name].places:
        flag = f"--{name.replace('_', '-')}"
        flag = flag if flag in JOB[name].flags else JOB[name].flag
        return f"write {flag} in the command, since it is about the job and not the cluster"
    return did_you_mean(name, TABLES[table], "leave it out")


def _check_value(named: str, value: Any, setting: Setting) -> None:
    # A value is not quoted unless it is no choice: it may be a secret.
    if fault_of(value, _FORMS[setting.kind]) is not None:
        fix = f"write {setting.name} = {_EXAMPLES[setting.kind]}"
        raise UsageError(f"{named} should be {KIND_NAMES[setting.kind]}", f"it is {_kind_of(value)}", fix)
    if setting.choices and value not in setting.choices:
        fix = did_you_mean(value, setting.choices, "write one of these")
        raise UsageError(f"{named} is {shown(value)}", f"the choices are {', '.join(setting.choices)}", fix)
    for text in value if setting.kind is tuple else [value]:
        if not isinstance(text, str):
            continue
        if not text and setting.default != "":
            raise UsageError(f"{named} can't be used", "a text is empty", "mend it, or leave it out")
        check_name("text", text, f"{named} can't be used", "mend it, or leave it out")


def _kind_of(value: object) -> str:
    """Return the kind of a value of TOML, without the value."""
    kinds: dict[type, str] = {**KIND_NAMES, bool: "true or false", float: "a number with a point", dict: "a table"}
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


def displayed(value: object) -> str:
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
