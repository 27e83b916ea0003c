"""Some steps of a model on a GPU, and what torch's caching allocator held for them: one process of `bench planner`.

`python -m paceline.bench.planner_gpu NAME BATCH LENGTH PARTS` prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import torch

from paceline.bench.planner_models import full_workload
from paceline.comm import api
from paceline.nouns.plan import Plan
from paceline.train.job import Job


def main() -> None:
    """Train, and say the largest number of bytes allocated and reserved since the second step began."""
    name, batch, length, parts = sys.argv[1:]
    api.init()
    job = Job(full_workload(name, int(batch), int(length), **json.loads(parts)), Plan())
    for number, one in enumerate(job.batches()):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        job.step(one)
    facts = {
        "device": torch.cuda.get_device_name(),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
