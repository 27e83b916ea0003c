"""Check names and paths by one table where they enter: they stand in scripts later."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import shown

# Characters that end a line of a script, that a terminal takes for a command, and bytes that are no UTF-8.
_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_HAS_CONTROL = "it has a line end or another control character"
LABEL_LENGTH = 63  # Kubernetes' limit
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: it names a Service
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # RFC 1123: of most objects of Kubernetes


@dataclass(frozen=True, slots=True)
class Kind:
    """The rules for one kind of names or paths.

    Args:
        asked: the first line of the error, where the caller has none; {} is the text.
        form: the pattern of the whole text.
        found: the error's second line for a text of another form.
        fix: the advice to the user.
        most: the largest number of characters.
    """

    asked: str
    form: re.Pattern[str]
    found: str
    fix: str
    most: int = 2**16  # a system's own limit on paths is lower, and tells its own error


KINDS: dict[str, Kind] = {
    "job": Kind(
        "the job's name {}",
        re.compile(r"\w[\w.+=,@-]*"),
        "a name has letters, digits and _ . - + = , @ alone, and begins with a letter, a digit or _",
        "write such as --job bert-1",
        most=255,  # the limit of a folder's name
    ),
    # A run that an earlier Paceline made has any name that a folder may have.
    "run": Kind(
        "the job's name {}",
        re.compile(rf"(?!-|\.\.?$)[^/{_CONTROL}]+"),
        "it is not the name of a folder in the folder of the runs",
        "write such as --job bert-1, and another folder of runs with --runs",
        most=255,
    ),
    "text": Kind("the text {}", re.compile(f"[^{_CONTROL}]*"), _HAS_CONTROL, "write it without"),
    "path": Kind("the path {}", re.compile(f"[^{_CONTROL}]+"), _HAS_CONTROL, "use a path without"),
    # It stands where a command has its flags.
    "file": Kind(
        "the workload file {}",
        re.compile(f"(?!-)[^{_CONTROL}]*"),
        "it begins with a hyphen or has a control character",
        "write ./ before it, or rename it",
    ),
    "program": Kind(
        "the program {}",
        re.compile(f"(?!-)[^{_CONTROL}]+"),
        "it is empty, begins with a hyphen or has a control character",
        "write its name or its path",
    ),
    "host": Kind(
        "the host {}",
        re.compile(r"(?!-)[A-Za-z0-9_.:%@-]+"),  # `-oProxyCommand=...` would be an option of ssh
        "it is no host's name",
        "write such as h1, user@h1 or an address",
        most=255,  # with a user before it; a name of the Domain Name System has up to 253
    ),
    "interface": Kind(
        "the network interface {}",
        re.compile(r"(?!-)[A-Za-z0-9_.:@-]+"),
        "it is no interface's name",
        "write such as --interface eth1",
        most=64,  # Linux has 15, macOS fewer; torch takes one name
    ),
    "variable": Kind(
        "the variable {}",
        re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
        "that is no variable's name",
        "write letters, digits and _ alone, and no digit first",
    ),
    "slurm": Kind(
        "the argument {} for sbatch",
        re.compile(rf"[^\s#\"'\\{_CONTROL}]+"),
        "it has spaces, quotes, a backslash or a #",
        "write it without them",
    ),
    "label": Kind(
        "the name {}",
        LABEL,
        "Kubernetes wants small letters, digits and hyphens, a letter first and no hyphen last",
        "write such as bert-1",
        most=LABEL_LENGTH,
    ),
    "object": Kind(
        "the name {}",
        _OBJECT,
        "Kubernetes wants small letters, digits, hyphens and points",
        "write the name of an object that there is",
        most=253,
    ),
}


def is_name(kind: str, text: str) -> bool:
    """Return True if a text follows the rules of a kind in KINDS."""
    return KINDS[kind].form.fullmatch(text) is not None and len(text) <= KINDS[kind].most


def check_name(kind: str, text: str, asked: str = "", fix: str = "", settings: tuple[str, ...] = ()) -> None:
    """Raise UsageError unless a text follows the rules of a kind in KINDS.

    Args:
        kind: the kind of the text.
        text: the text as the user wrote it.
        asked, fix: the error's first and last line; "": those of the kind.
        settings: names of the settings that the text is the value of.
    """
    if is_name(kind, text):
        return
    row = KINDS[kind]
    found = row.found
    if len(text) > row.most:
        found = f"it has {len(text)} characters, and {row.most} are allowed"
    raise UsageError(asked or row.asked.format(shown(text)), found, fix or row.fix, settings)


def job_name_of(text: str) -> str:
    """Return a job's name made of a text with any characters, such as the name of a file."""
    return re.sub(r"[^\w.-]+", "-", text).lstrip("-.") or "job"
