"""Slurm's short words for hosts and for tasks per host, read without `scontrol`: containers have none.

a[01-03,7],b-gpu[1-2]-x,c     a01 a02 a03 a7 b-gpu1-x b-gpu2-x c
4(x2),3                       4 4 3
"""

from __future__ import annotations

import itertools
import re

from paceline.nouns.errors import UsageError

MOST_HOSTS = 1_000_000  # more is no cluster, but a slip such as a[1-99999999]; it must not fill the memory
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def hosts_of(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """The hosts of a node list, in its order; numbers keep the zeros that the lower end of a range has.

    Args:
        text: such as `a[01-03,7],b`.
        name: the variable that holds it, for the error.

    Raises:
        UsageError: it is no node list, or has over a million hosts.
    """
    return [host for word in _words(text, name) for host in _hosts_of_word(word, text, name)]


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
        repeats = int(match[2] or 1) if match else 0
        if match is None or not int(match[1]) or not 1 <= repeats <= MOST_HOSTS:
            raise UsageError(
                f"{name} from Slurm should be tasks per host, such as 4(x2),3",
                f"it is {text!r}",
                f"unset {name}, and give the ranks of a host as LOCAL_WORLD_SIZE",
            )
        counts += [int(match[1])] * repeats
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


def _hosts_of_word(word: str, text: str, name: str) -> list[str]:
    parts: list[list[str]] = []
    end = 0
    for match in _PART.finditer(word):
        if match.start() != end:
            break
        end = match.end()
        parts.append(_numbers(match[1], text, name) if match[2] is None else [match[2]])
    if end != len(word):
        raise _not_a_list(text, name)
    many = 1
    for part in parts:
        many *= len(part)
    if many > MOST_HOSTS:
        raise _not_a_list(text, name)
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    """The numbers of `01-03,7` as they are written in names."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(high) - int(low) < MOST_HOSTS:
            raise _not_a_list(text, name)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _not_a_list(text: str, name: str) -> UsageError:
    return UsageError(
        f"{name} from Slurm should be a list of hosts, such as a[01-03,7],b",
        f"it is {text!r}",
        "give rank 0's host yourself: MASTER_ADDR and MASTER_PORT",
    )
