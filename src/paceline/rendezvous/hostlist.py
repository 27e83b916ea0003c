"""Read Slurm's short forms of host lists and of tasks per host, without `scontrol`: containers have none.

a[01-03,7],b-gpu[1-2]-x,c     a01 a02 a03 a7 b-gpu1-x b-gpu2-x c
4(x2),3                       4 4 3
"""

from __future__ import annotations

import itertools
import re

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole, shown

# In all of a list. More is no cluster, but a slip such as a[1-99999999]; it must not fill the memory.
MOST_HOSTS = 1_000_000
_MOST_CHARACTERS = 2**24
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_Part = str | list[tuple[int, int, int]]  # of an item: letters, or ranges of numbers (first, last, least digits)


def hosts_of(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Return the hosts of a node list, in its order; numbers keep the zeros that the lower end of a range has.

    Args:
        text: such as `a[01-03,7],b`.
        name: the variable that holds it, for the error.

    Raises:
        UsageError: it is no node list, or has over a million hosts.
    """
    items = [_parts_of(item, text, name) for item in _items(text, name)]
    # Count all of them before the first name is made: a short text can stand for more than the memory holds.
    hosts = 0
    characters = 0
    for parts in items:
        count, longest = _size_of_item(parts)
        hosts += count
        characters += count * longest
    if hosts > MOST_HOSTS or characters > _MOST_CHARACTERS:
        raise _not_a_list(text, name)
    names: list[str] = []
    for parts in items:
        for combination in itertools.product(*map(_texts_of, parts)):
            names.append("".join(combination))
    return names


def tasks_per_host(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Return the number of tasks of each host of a step, in the order of the node list.

    Args:
        text: such as `4(x2),3`.
        name: the variable that holds it, for the error.

    Raises:
        UsageError: it has not this form.
    """
    counts: list[int] = []
    for item in text.split(","):
        tasks, repeats = None, None
        match = _COUNT.fullmatch(item.strip())
        if match is not None:
            tasks = parse_whole(match[1], 1)
            # Bounded by what is left of MOST_HOSTS, so that the list can't fill the memory.
            repeats = parse_whole(match[2] or "1", 1, MOST_HOSTS - len(counts))
        if tasks is None or repeats is None:
            raise UsageError(
                f"{name} from Slurm should be tasks per host, such as 4(x2),3",
                f"it is {shown(text)}",
                f"unset {name}, and give the ranks of a host as LOCAL_WORLD_SIZE",
            )
        counts += [tasks] * repeats
    return counts


def _items(text: str, name: str) -> list[str]:
    """Return the list cut at the commas that stand outside of brackets."""
    items: list[str] = []
    depth = 0
    start = 0
    for index, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        # Slurm's lists have no brackets inside of brackets.
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    items.append(text[start:])
    if depth or not all(items):
        raise _not_a_list(text, name)
    return items


def _parts_of(item: str, text: str, name: str) -> list[_Part]:
    """Return an item in its parts: letters, or ranges of numbers of which every host has one."""
    parts: list[_Part] = []
    end = 0
    for match in _PART.finditer(item):
        if match.start() != end:
            break
        end = match.end()
        inside_brackets, letters = match.groups()
        parts.append(_ranges(inside_brackets, text, name) if letters is None else letters)
    if end != len(item):
        raise _not_a_list(text, name)
    return parts


def _ranges(inside: str, text: str, name: str) -> list[tuple[int, int, int]]:
    """Return the ranges of `01-03,7`, each as (first, last, least digits)."""
    ranges: list[tuple[int, int, int]] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _not_a_list(text, name)
        low = parse_whole(match[1])
        high = parse_whole(match[2] or match[1])
        if low is None or high is None or low > high:
            raise _not_a_list(text, name)
        # The lower end's digits: 01-03 is padded, 1-3 is not.
        ranges.append((low, high, len(match[1])))
    return ranges


def _size_of_item(parts: list[_Part]) -> tuple[int, int]:
    """Return the number of hosts of an item, and the length of the longest name."""
    hosts = 1
    longest = 0
    for part in parts:
        count, length = _size_of_part(part)
        hosts *= count
        longest += length
    return hosts, longest


def _size_of_part(part: _Part) -> tuple[int, int]:
    """Return the number of texts of a part, and the length of the longest."""
    if isinstance(part, str):
        return 1, len(part)
    count = 0
    longest = 0
    for low, high, least_digits in part:
        count += high - low + 1
        longest = max(longest, len(str(high)), least_digits)
    return count, longest


def _texts_of(part: _Part) -> list[str]:
    """Return all texts that a part stands for; numbers have at least the digits of their range's first one."""
    if isinstance(part, str):
        return [part]
    texts: list[str] = []
    for low, high, least_digits in part:
        texts += [str(number).zfill(least_digits) for number in range(low, high + 1)]
    return texts


def _not_a_list(text: str, name: str) -> UsageError:
    return UsageError(
        f"{name} from Slurm should be a list of hosts, such as a[01-03,7],b",
        f"it is {shown(text)}",
        "give rank 0's host yourself: MASTER_ADDR and MASTER_PORT",
    )
