"""A range of steps, as flags and variables have it: 20:25, or 20 for one."""

from __future__ import annotations

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole, shown


def parse_steps(text: str, name: str) -> tuple[int, int]:
    """Read FIRST:LAST, both included, or one step.

    Args:
        text: to read.
        name: of the flag or variable, for the error.

    Raises:
        UsageError: it is no such range; steps count from 1.

    Examples:
        >>> from paceline.nouns.step_range import parse_steps
        >>> parse_steps("20:25", "--steps"), parse_steps("7", "--steps")
        ((20, 25), (7, 7))
    """
    words = text.split(":")
    numbers = [parse_whole(word) for word in words]
    first, last = numbers[0], numbers[-1]
    if len(words) > 2 or first is None or last is None or not 1 <= first <= last:
        found = "it is no range of steps, which count from 1"
        raise UsageError(f"{name} {shown(text)[1:-1]}", found, f"write {name} 10:20")
    return first, last
