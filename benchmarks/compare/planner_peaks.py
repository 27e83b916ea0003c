"""Measure the peak memory of a real step, rank by rank, with torch's profiler: the measured half of `bench planner`.

`paceline run -n N planner_peaks.py NAME PLAN PARTS FOLDER` trains a small model under a plan and writes
`FOLDER/RANK.json`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from compare.planner_models import workload
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job


def measured(plan: Any, name: str, parts: dict[str, Any]) -> tuple[int, int, list[dict[str, Any]]]:
    """Train, and return this rank's peak of live bytes in the last step, those at its end, and its ledger's rows.

    The profiler records only the thread that started it. Gloo releases a buffer that it has sent in a thread of its
    own; if that were the last reference, the release would not be recorded. So `wait` gives it time for that, before
    this thread releases the buffer (`with_time_to_let_go`).
    """
    api.init()
    training = workload(name, **parts)  # before the profiler starts: its data are no part of the job
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job = Job(training, replace(plan, check="off"))  # a comparison is no part of what is predicted
        began_ns = 0
        for batch in job.batches():
            began_ns = time.time_ns()
            # Of each step anew, so that the last one's are left.
            job.ledger.calls.clear()
            job.ledger.payload_bytes.clear()
            job.step(batch)
        rows = job.ledger.rows()
    # An event for each allocation and, with negative bytes, for each release.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= began_ns:
            peak = max(peak, live)
    return peak, live, rows


def with_time_to_let_go() -> None:
    """Let each wait for a collective take 10 ms longer; see `measured`."""
    from torch._C._distributed_c10d import Work

    wait = Work.wait

    def slow_wait(self: Any, *arguments: Any) -> Any:
        result = wait(self, *arguments)
        time.sleep(0.01)
        return result

    if wait.__name__ != "slow_wait":  # not twice
        Work.wait = slow_wait  # type: ignore[method-assign, assignment]


def main() -> None:
    """Measure one rank."""
    name, line, parts, folder = sys.argv[1:]
    torch.set_num_threads(1)  # kernels' scratch memory depends on it
    with_time_to_let_go()
    peak, _, rows = measured(Plan.parse(line), name, json.loads(parts))
    Path(folder, f"{api.rank()}.json").write_text(json.dumps({"peak": peak, "ledger": rows}))


if __name__ == "__main__":
    main()
