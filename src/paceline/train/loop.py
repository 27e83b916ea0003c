"""The plain loop, for a file that declares a workload and no loop of its own."""

from __future__ import annotations

from paceline.nouns.workload import Workload
from paceline.train.job import distribute


def train(workload: Workload | None) -> None:
    """Train to the last step; evaluate once at the end where there is something to evaluate on."""
    if workload is None:
        return
    job = distribute(workload)
    for batch in job.batches():
        job.step(batch)
    if workload.evaluation is not None:
        result = job.evaluate()
        if job.rank == 0:
            print("  ".join(f"{name} {value:.6g}" for name, value in result.items()))
