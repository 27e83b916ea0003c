"""`scripts/bench horovod`: sums by Horovod's names on two ranks, beside the same sums by torch.distributed.

The tensors are the 100 largest of a ResNet-50, 102 MB in float32. All contestants run in the same two processes, by
turns, and each result is checked. `drop_in_over_raw` is the speed by names over that of torch.distributed with a call
for each tensor of one list, or with one flat copy, whichever is faster: the median over the turns.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from compare.by_turns import Seconds
from compare.startup import median_ratio

JOB = Path(__file__).with_name("horovod_job.py")
RAW = ("raw_calls", "raw_flat")


def ratios(seconds: Seconds) -> dict[str, float]:
    """Return the speed by names, and in a group, over that of the faster way by torch.distributed."""
    raw = min((seconds[name] for name in RAW), key=statistics.median)
    ours = {"drop_in_over_raw": "names", "group_over_raw": "group"}
    return {ratio: round(median_ratio(raw, seconds[name]), 4) for ratio, name in ours.items()}
