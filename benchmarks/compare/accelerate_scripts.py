"""`scripts/bench accelerate`: a script of Accelerate on two ranks, by its own accelerator and by Paceline's.

The script is that of `nlp_example.py` with a BERT-Tiny, 16 texts of 64 tokens on a rank, in float32. Both take turns of
five steps in the same two processes, and their losses are compared. `script_over_accelerate` is the rate of samples by
Paceline over that by Accelerate: the median over the turns.
"""

from __future__ import annotations

from pathlib import Path

from compare.by_turns import Seconds
from compare.startup import median_ratio

JOB = Path(__file__).with_name("accelerate_job.py")


def ratios(seconds: Seconds) -> dict[str, float]:
    """Return the rate of samples by Paceline over that by Accelerate."""
    return {"script_over_accelerate": round(median_ratio(seconds["accelerate"], seconds["ours"]), 4)}
