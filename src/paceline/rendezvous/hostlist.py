"""Slurm's short words for hosts and for tasks per host, read without `scontrol`: containers have none.

a[01-03,7],b-gpu[1-2]-x,c     a01 a02 a03 a7 b-gpu1-x b-gpu2-x c
4(x2),3                       4 4 3
"""

from __future__ import annotations

import itertools
import math
import re

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole, shown

# In all of a list. More is no cluster, but a slip such as a[1-99999999]; it must not fill the memory.
MOST_HOSTS = 1_000_000
_MOST_CHARACTERS = 2**24
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_Part = str | list[tuple[int, int, int]]  # of a word: letters, or ranges of numbers


def hosts_of(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """The hosts of a node list, in its order; numbers keep the zeros that the lower end of a range has.

    Args:
        text: such as `a[01-03,7],b`.
        name: the variable that holds it, for the error.

    Raises:
        UsageError: it is no node list, or has over a million hosts.
    """
    words = [_parts_of(word, text, name) for word in _words(text, name)]
    # All are counted before the first is made.
    sizes = [[_size(part) for part in parts] for parts in words]
    hosts = [math.prod(count for count, _ in parts) for parts in sizes]
    lengths = [sum(length for _, length in parts) for parts in sizes]
    characters = sum(count * length for count, length in zip(hosts, lengths, strict=True))
    if sum(hosts) > MOST_HOSTS or characters > _MOST_CHARACTERS:
        raise _not_a_list(text, name)
    names: list[str] = []
    for parts in words:
        names += map("".join, itertools.product(*map(_written, parts)))
    return names


def tasks_per_host(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """How many tasks each host of a step has, in the order of the node list.

    Args:
        text: such as `4(x2),3`.
        name: the variable that holds it, for the error.

    Raises:
        UsageError: it has not this form.
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word.strip())
        tasks = parse_whole(match[1], 1) if match else None
        repeats = parse_whole(match[2] or "1", 1, MOST_HOSTS - len(counts)) if match else None
        if tasks is None or repeats is None:
            raise UsageError(
                f"{name} from Slurm should be tasks per host, such as 4(x2),3",
                f"it is {shown(text)}",
                f"unset {name}, and give the ranks of a host as LOCAL_WORLD_SIZE",
            )
        counts += [tasks] * repeats
    return counts


def _words(text: str, name: str) -> list[str]:
    """The list cut at the commas that stand outside of brackets."""
    words, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            words.append(text[start:at])
            start = at + 1
    words.append(text[start:])
    if depth or not all(words):
        raise _not_a_list(text, name)
    return words


def _parts_of(word: str, text: str, name: str) -> list[_Part]:
    """A word in its parts, each of several ranges of which every host has one number, or of letters."""
    parts: list[_Part] = []
    end = 0
    for match in _PART.finditer(word):
        if match.start() != end:
            break
        end = match.end()
        parts.append(_ranges(match[1], text, name) if match[2] is None else match[2])
    if end != len(word):
        raise _not_a_list(text, name)
    return parts


def _ranges(inside: str, text: str, name: str) -> list[tuple[int, int, int]]:
    """The ranges of `01-03,7`, each as (first, last, least digits)."""
    ranges = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        low = parse_whole(match[1]) if match else None
        high = parse_whole(match[2] or match[1]) if match else None
        if match is None or low is None or high is None or low > high:
            raise _not_a_list(text, name)
        ranges.append((low, high, len(match[1])))
    return ranges


def _size(part: _Part) -> tuple[int, int]:
    """How many ways of writing a part there are, and the characters of the longest."""
    if isinstance(part, str):
        return 1, len(part)
    return sum(high - low + 1 for low, high, _ in part), max(max(len(str(high)), least) for _, high, least in part)


def _written(part: _Part) -> list[str]:
    """All ways of writing a part; numbers have at least the digits of their range's first one."""
    if isinstance(part, str):
        return [part]
    written: list[str] = []
    for low, high, least in part:
        written += [str(number).zfill(least) for number in range(low, high + 1)]
    return written


def _not_a_list(text: str, name: str) -> UsageError:
    return UsageError(
        f"{name} from Slurm should be a list of hosts, such as a[01-03,7],b",
        f"it is {shown(text)}",
        "give rank 0's host yourself: MASTER_ADDR and MASTER_PORT",
    )
