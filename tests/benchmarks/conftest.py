"""What the tests of the benchmarks share."""

from __future__ import annotations

import pytest

from support.benchmarks import ENVIRONMENT


@pytest.fixture(autouse=True)
def processes_find_the_benchmarks(monkeypatch):
    """Have the processes that a test starts find `compare`, as those of `scripts/bench` do."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
