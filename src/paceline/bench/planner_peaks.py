"""What a real step holds at most, rank by rank, as torch's profiler sees it: the measured half of `bench planner`.

`paceline run -n N planner_peaks.py NAME PLAN PARTS FOLDER` trains a small model under a plan and writes
`FOLDER/RANK.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.bench.planner_models import workload
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job


def measured(plan: Any, name: str, parts: dict[str, Any]) -> tuple[int, int, list[dict[str, Any]]]:
    """Of this rank: the most live bytes in the last step, the bytes at its end, and the ledger's rows of that step.

    The profiler hears only the threads that it was started in. Gloo lets go of what it has sent in a thread of its
    own; so after each collective there is time for that before this thread lets go.
    """
    api.init()
    made = workload(name, **parts)  # its data are no part of the job
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job = Job(made, plan)
        began = 0
        for batch in job.batches():
            began = time.time_ns()
            job.ledger.calls.clear()
            job.ledger.payload_bytes.clear()
            job.step(batch)
        rows = job.ledger.rows()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= began:
            peak = max(peak, live)
    return peak, live, rows


def with_time_to_let_go() -> None:
    """See `measured`."""
    from torch._C._distributed_c10d import Work

    wait = Work.wait

    def slowly(self: Any, *arguments: Any) -> Any:
        result = wait(self, *arguments)
        time.sleep(0.01)
        return result

    if wait.__name__ != "slowly":
        Work.wait = slowly  # type: ignore[method-assign, assignment]


def main() -> None:
    """One rank."""
    name, line, parts, folder = sys.argv[1:]
    torch.set_num_threads(1)  # kernels' scratch memory depends on it
    with_time_to_let_go()
    peak, _, rows = measured(Plan.parse(line), name, json.loads(parts))
    Path(folder, f"{api.rank()}.json").write_text(json.dumps({"peak": peak, "ledger": rows}))


if __name__ == "__main__":
    main()
