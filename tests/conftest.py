"""How the tests share two processes: the longest files first, so that neither waits at the end for the other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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

# Jobs that tests start read compiled files of Paceline instead of compiling it anew: a tenth of a small job's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_modifyitems(config, items):
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
