"""Which tests CI runs, which of them `make test` runs, and how two processes share them.

- A test function that takes longer than 0.15 s is `slow`, longer than a second `long`
  (`tests/durations.json`). One that was not measured is what its marks say.
- Of a table of long tests CI runs a tenth of the cells, at least one; the others are `complete`. Which ones depends
  on their names alone, so a cell that is added displaces at most one. A table that has `complete` cells already has
  chosen for itself (`support/sample.py`).
- One cell of such a table stays in `make test`, if it takes less than three seconds.
- The longest files come first, so that neither process waits for the other.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from support.durations import LONG, SLOW, read_durations
from support.sample import skip_if_late

# No test judges how long an example takes: machines are shared.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

TESTS = Path(__file__).parent
LAST = "server/test_protocol.py"  # its seeds take all cores

SAMPLED_FROM = {"integration": 2, "long": 3, "slow": 3}  # tables of so many cells
OF = {"integration": 10, "long": 10, "slow": 6}  # cells, CI runs one
NO_SHARD = "can't sum a gradient that only some ranks have"  # how `shard` is refused under torch 2.11
SHORT_ENOUGH = 3.0  # seconds: one cell of a long table, in `make test`

# Jobs that tests start read compiled files of Paceline instead of compiling it anew: a tenth of a small job's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def file_of(item) -> str:
    return item.path.relative_to(TESTS).as_posix()


def tables_of(items):
    """The cells of every test function, by its name in `tests/durations.json`."""
    tables = defaultdict(list)
    for item in items:
        tables[f"{file_of(item)}::{item.name.split('[')[0]}"].append(item)
    return tables


def mark_by_duration(cells, seconds):
    if seconds > SLOW:
        for item in cells:
            item.add_marker("slow")
    if seconds > LONG:
        for item in cells:
            if item.get_closest_marker("integration") is None:
                item.add_marker("long")


def leave_out_cells(cells, seconds):
    """Mark the cells of a table that CI does not run."""
    if any(item.get_closest_marker("complete") for item in cells):
        return
    kinds = defaultdict(list)
    for item in sorted(cells, key=lambda item: zlib.crc32(item.nodeid.encode())):
        kinds[next((kind for kind in SAMPLED_FROM if item.get_closest_marker(kind)), "")].append(item)
    if kinds["integration"] and seconds >= SHORT_ENOUGH:  # `make test` has none of them: one kind
        kinds["integration"] += kinds.pop("long", [])
        kinds["integration"].sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
    for kind, least in SAMPLED_FROM.items():
        if len(kinds[kind]) >= least:
            for item in kinds[kind][-(-len(kinds[kind]) // OF[kind]) :]:
                item.add_marker("complete")


def show_one_cell(cells, seconds):
    """Leave one cell of a long table to `make test`."""
    run = [item for item in cells if item.get_closest_marker("complete") is None]
    if len(cells) >= SAMPLED_FROM["long"] and seconds < SHORT_ENOUGH and run:
        run[0].own_markers[:] = [mark for mark in run[0].own_markers if mark.name != "long"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip tests of `shard` where torch is too old for it: in `scripts/test --torch 2.11.0`."""
    report = yield
    if report.failed and NO_SHARD in str(report.longrepr):
        from paceline.comm.fully_shard import can_reduce_unused

        if not can_reduce_unused():
            report.outcome = "skipped"
            report.longrepr = (str(item.path), None, f"this torch {NO_SHARD}")
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items):
    durations = read_durations()
    lengths = defaultdict(float)
    for name, cells in tables_of(items).items():
        seconds = durations.get(name, 0.0)
        mark_by_duration(cells, seconds)
        leave_out_cells(cells, seconds)
        show_one_cell(cells, seconds)
        lengths[file_of(cells[0])] += seconds * sum(item.get_closest_marker("complete") is None for item in cells)
    # Stable: within a file as they were found.
    items.sort(key=lambda item: (file_of(item) == LAST, -lengths[file_of(item)], file_of(item)))


def pytest_runtest_setup(item):
    if item.get_closest_marker("integration") or item.get_closest_marker("long"):
        skip_if_late()


@pytest.fixture(autouse=True)
def forget_open_jobs():
    """Forget the jobs that a test left open, so that the next test in this process doesn't end them."""
    yield
    jobs = sys.modules.get("paceline.train.open_jobs")
    if jobs is None:
        return
    for of_run in jobs._run_jobs:
        if of_run.job is not None:
            of_run.job.events.close()
            of_run.job.board.close()
    jobs._run_jobs.clear()
