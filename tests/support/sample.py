"""Which cells of a large table CI runs: some along its diagonals, so that each row and each column has some."""

from __future__ import annotations

import pytest

COMPLETE, INTEGRATION, SLOW = pytest.mark.complete, pytest.mark.integration, pytest.mark.slow


def is_sampled(row: int, column: int, of: int = 3) -> bool:
    """True if CI runs the cell, of `of` in a row one."""
    return (row + column) % of == 0


def sampled(row: int, column: int, of: int = 3, mark: pytest.MarkDecorator = INTEGRATION) -> pytest.MarkDecorator:
    """The mark of a cell: `mark` where CI runs it, else `complete`."""
    return mark if is_sampled(row, column, of) else COMPLETE
