"""The job that `bench observe` times: the small GPT of `bench jobs`, whose times are kept and not kept in turn.

`observe_job.py BLOCKS FILE`: rank 0 writes to FILE a line of JSON, the seconds of each block of steps with and without.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import paceline
from compare.small_gpt import BATCH, SmallGpt, Windows, make_optimizer, summed_loss
from paceline.comm.step_times import TIMES
from paceline.train.times_file import TimesFile

STEPS = 10  # of a block
WARM_UP = 20


class NoTimes(TimesFile):
    """In place of the file of times: it keeps nothing."""

    def end_step(self, step: int) -> dict[str, float]:
        """Return nothing."""
        return {}


def main() -> None:
    """Train as the command line says."""
    blocks, file = int(sys.argv[1]), Path(sys.argv[2])
    workload = paceline.Workload(
        model=SmallGpt,
        loss=summed_loss,
        optimizer=make_optimizer,
        data=Windows(BATCH * (WARM_UP + 2 * blocks * STEPS)),
        batch_size=BATCH,
    )
    job = paceline.distribute(workload)
    batches = job.batches()
    files = {"with": job.times_file, "without": NoTimes(None, job.rank)}
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(WARM_UP):
        job.step(next(batches))
    for block in range(blocks):
        # With, without, without, with: what drifts does not favour one of them.
        for name in ("with", "without") if block % 2 == 0 else ("without", "with"):
            job.times_file = files[name]
            TIMES.is_on = name == "with"
            TIMES.spans = None
            began_s = time.perf_counter()
            for _ in range(STEPS):
                job.step(next(batches))
            seconds[name].append(time.perf_counter() - began_s)
    job.times_file = files["with"]
    TIMES.is_on = True
    if job.rank == 0:
        file.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
