"""Read hosts and their slots as users write them for Horovod, DeepSpeed and Open MPI: in arguments and in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.mesh import MOST_RANKS
from paceline.nouns.names import is_name
from paceline.nouns.reading import parse_whole, read_text, shown

_LONGEST_SHOWN = 255  # characters of the user's text in an error
_SLOT_WORDS = ("slots", "max_slots", "max-slots")  # Open MPI's bound on oversubscribing is read, not used


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and its number of slots: the ranks that it takes."""

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read the hosts of `h1:4,h2:4`; `h1` without a number has one slot, and an IPv6 address stands in brackets.

    Raises:
        UsageError: a host has no name, its slots are no number, or it is named twice.
    """
    hosts = [_of_word(word.strip(), text) for word in text.split(",")]
    return _checked(hosts, f"-H {text[:_LONGEST_SHOWN]}")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read the hosts of a file, one in a line: `h1:4` (Horovod), `h1 slots=4` (DeepSpeed, Open MPI), or `h1`.

    `#` begins a comment. Open MPI counts a host that stands in several lines without slots once a line.

    Raises:
        UsageError: the file can't be read, has no host, or a line can't be understood.
    """
    try:
        lines = read_text(path).splitlines()
    except ReadError as error:
        raise UsageError(f"can't read the hosts of {path}", error.found, "name a file with a host a line") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        fields = line.split("#")[0].split()
        if fields:
            hosts.append(_of_line(fields, f"{path}, line {number}"))
    # Open MPI's rule: a host once a line without slots has as many as it has lines. With slots a second line would be
    # a contradiction.
    with_slots = {host.name for host, has_slots in hosts if has_slots}
    merged: dict[str, int] = {}
    for host, _ in hosts:
        if host.name in merged and host.name in with_slots:
            raise _twice(host.name, str(path))
        merged[host.name] = merged.get(host.name, 0) + host.slots
    if not merged:
        raise UsageError(
            f"can't read the hosts of {path}", "it names none", "write a host a line, such as `h1 slots=4`"
        )
    return tuple(Host(name, slots) for name, slots in merged.items())


def _of_word(word: str, text: str) -> Host:
    name = word
    slots = "1"
    if word.startswith("["):
        name, _, port_part = word[1:].partition("]")
        slots = port_part.removeprefix(":") if port_part else "1"
    elif word.count(":") == 1:  # more: an IPv6 address without brackets, which is a name as a whole
        name, slots = word.split(":")
    return Host(_name(name, text), _slots(slots, word, text))


def _of_line(fields: Sequence[str], place: str) -> tuple[Host, bool]:
    host = _of_word(fields[0], place)
    has_slots = ":" in fields[0]
    for word in fields[1:]:
        key, _, value = word.partition("=")
        if key not in _SLOT_WORDS:
            raise UsageError(f"a host in {place}", f"it says {shown(word)}", "write `h1 slots=4` or `h1:4`")
        if key == "slots":
            host = Host(host.name, _slots(value, word, place))
            has_slots = True
    return host, has_slots


def _name(name: str, text: str) -> str:
    if not is_name("host", name):
        raise UsageError(
            f"can't read the hosts {shown(text)}", f"{shown(name)} is no host's name", "write such as h1:4,h2:4"
        )
    return name


def _slots(value: str, word: str, text: str) -> int:
    slots = parse_whole(value, 1, MOST_RANKS)
    if slots is None:
        reason = f"{shown(word)} has no number of slots from 1 to {MOST_RANKS}"
        raise UsageError(f"can't read the hosts {shown(text)}", reason, "write such as h1:4,h2:4")
    return slots


def _checked(hosts: Iterable[Host], text: str) -> tuple[Host, ...]:
    seen: set[str] = set()
    checked_hosts = tuple(hosts)
    for host in checked_hosts:
        if host.name in seen:
            raise _twice(host.name, text)
        seen.add(host.name)
    return checked_hosts


def _twice(name: str, text: str) -> UsageError:
    return UsageError(
        f"can't read the hosts of {text}", f"{name} is named twice", "name each host once, with all its slots"
    )
