"""Which cells of a large table CI runs: some along its diagonals, so that each row and each column has some."""

from __future__ import annotations

import os
import time

import pytest

COMPLETE, INTEGRATION, SLOW = pytest.mark.complete, pytest.mark.integration, pytest.mark.slow


def is_sampled(row: int, column: int, of: int = 3) -> bool:
    """True if CI runs the cell, of `of` in a row one."""
    return (row + column) % of == 0


def sampled(row: int, column: int, of: int = 3, mark: pytest.MarkDecorator = INTEGRATION) -> pytest.MarkDecorator:
    """The mark of a cell: `mark` where CI runs it, else `complete`."""
    return mark if is_sampled(row, column, of) else COMPLETE


def skip_if_late() -> None:
    """Skip a long test that would begin after TESTS_END_AT, in seconds since 1970: CI is cut off at some time."""
    end = os.environ.get("TESTS_END_AT")
    if end is not None and time.time_ns() / 1e9 > float(end):
        pytest.skip("CI's time is used up; `scripts/test --long` runs it")
