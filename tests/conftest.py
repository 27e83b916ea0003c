"""Which tests CI runs, and how two processes share them.

Of a table of long tests CI runs a quarter of the cells, at least one; the others are `complete`. Which ones depends on
their names alone, so a cell that is added displaces at most one. A table that has `complete` cells already has
chosen for itself (`support/sample.py`). The longest files come first, so that neither process waits for the other.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

from support.sample import skip_if_late

TESTS = Path(__file__).parent
# Measured with `--durations`; the other files follow as they are found.
LONGEST = (
    "verify/test_command.py",
    "profile/test_simulate.py",
    "verify/test_unusual.py",
    "run/test_jobs.py",
    "verify/test_mutants.py",
    "parallel/test_pipeline.py",
    "run/test_joined.py",
    "server/test_cluster.py",
    "plan/test_traffic.py",
    "examples/test_glue.py",
    "parallel/test_every_plan.py",
    "server/test_protocol.py",
    "plan/test_published.py",
    "parallel/test_random_plans.py",
    "verify/test_no_false_alarm.py",
    "parallel/test_tensor.py",
    "checkpoint/test_last_checkpoint.py",
    "checkpoint/test_copies.py",
    "bench/test_planner.py",
    "run/test_stalls.py",
    "cli/test_as_rank.py",
    "parallel/test_replicate.py",
)
# Under `-m integration`. Of two neighbours one computes while the other mostly waits.
LONGEST_OF_INTEGRATION = (
    "integration/test_server_jobs.py",
    "parallel/test_every_plan.py",
    "examples/test_loops.py",
    "integration/test_launchers.py",
    "verify/test_mutants.py",
    "integration/test_servers_over_ssh.py",
    "integration/test_bench.py",
    "test_readme.py",
    "integration/test_odd_moments.py",
    "run/test_injected_causes.py",
    "examples/test_finetuning.py",
    "integration/test_release.py",
    "examples/test_distil.py",
    "examples/test_gpt.py",
    "profile/test_profile_loop.py",
    "integration/test_installed.py",
    "examples/test_embed.py",
)
LAST_OF_INTEGRATION = "server/test_protocol.py"  # its seeds take all cores

SAMPLED_FROM = {"integration": 2, "slow": 3}  # tables of so many cells
OF = 4  # cells, CI runs one
ALL_CELLS = ("test_readme.py",)  # every command of the README works

# Jobs that tests start read compiled files of Paceline instead of compiling it anew: a tenth of a small job's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def leave_out_cells(items):
    """Mark the cells of tables that CI does not run."""
    tables = defaultdict(list)
    for item in items:
        kind = next((name for name in ("complete", *SAMPLED_FROM) if item.get_closest_marker(name)), None)
        tables[item.nodeid.split("[")[0]].append((kind, item))
    for cells in tables.values():
        if any(kind == "complete" for kind, _ in cells) or cells[0][1].path.name in ALL_CELLS:
            continue
        for kind, least in SAMPLED_FROM.items():
            long = sorted(
                (item for own, item in cells if own == kind), key=lambda item: zlib.crc32(item.nodeid.encode())
            )
            if len(long) >= least:
                for item in long[-(-len(long) // OF) :]:
                    item.add_marker("complete")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config, items):
    leave_out_cells(items)
    is_integration = config.option.markexpr.startswith("integration")
    longest = LONGEST_OF_INTEGRATION if is_integration else LONGEST
    lost = [name for name in (*longest, LAST_OF_INTEGRATION) if not (TESTS / name).is_file()]
    assert not lost, f"{__file__} gives an order to {lost}"

    def place(item):
        name = item.path.relative_to(TESTS).as_posix()
        if name in longest:
            return longest.index(name)
        is_last = is_integration and name == LAST_OF_INTEGRATION
        return len(longest) + is_last

    items.sort(key=place)  # stable: the others as they were found


def pytest_runtest_setup(item):
    if item.get_closest_marker("integration"):
        skip_if_late()


@pytest.fixture(autouse=True)
def forget_open_jobs():
    """Forget the jobs that a test left open, so that the next test in this process doesn't end them."""
    yield
    jobs = sys.modules.get("paceline.train.job")
    if jobs is None:
        return
    for job in jobs._run_jobs:
        job.events.close()
        job.board.close()
    jobs._run_jobs.clear()
