"""How the tests share two processes: the longest files first, so that neither waits at the end for the other."""

from __future__ import annotations

import os
import sys

# Jobs that tests start read compiled files of Paceline instead of compiling it anew: a tenth of a small job's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Files that take longest, measured with `--durations`; about in this order. The others follow as they are found.
LONGEST = (
    "verify/test_command.py",
    "train/test_rehearse.py",
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
    "run/test_stalls.py",
    "parallel/test_replicate.py",
)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))  # stable: else as found
