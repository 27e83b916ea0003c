"""Take one step of a BERT on made-up tokens, then write the time: the job of the start-up benchmark.

`paceline run -n 2 first_step.py FOLDER MARK` and `torchrun --nproc-per-node 2 first_step.py FOLDER MARK` run the
same file; rank 0 writes nanoseconds since the epoch to MARK when its first step is done.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import paceline
from paceline.demo.bert import Bert, BertConfig
from paceline.demo.demo_workload import make_workload


def main() -> None:
    """Take one step."""
    job = paceline.distribute(make_workload(Path(sys.argv[1]), 1, 4, model=lambda: Bert(BertConfig())))
    for batch in job.batches():
        job.step(batch)
        if job.rank == 0:
            Path(sys.argv[2]).write_text(str(time.time_ns()))


if __name__ == "__main__":
    main()
