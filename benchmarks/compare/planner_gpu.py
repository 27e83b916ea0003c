"""Take some steps of a model on a GPU, and print the memory that torch's caching allocator held for them.

`python -m compare.planner_gpu NAME BATCH LENGTH PARTS` prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import torch

from compare.planner_models import full_workload
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job


def main() -> None:
    """Train, and print the largest number of bytes allocated and reserved since the second step began."""
    name, batch_size, length, parts = sys.argv[1:]
    api.init()
    job = Job(full_workload(name, int(batch_size), int(length), **json.loads(parts)), Plan())
    for number, batch in enumerate(job.batches()):
        if number == 1:  # the first step makes the optimizer's state
            torch.cuda.reset_peak_memory_stats()
        job.step(batch)
    peaks = {
        "device": torch.cuda.get_device_name(),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
