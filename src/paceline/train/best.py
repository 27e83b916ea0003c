"""Which metrics were the best so far: `job.save_best`."""

from __future__ import annotations

import math
from typing import Any

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import UsageError
from paceline.train.schedulers import same_number

BEST = "_best"  # the name under which checkpoints have it


class Best:
    """The best metric of each folder.

    Attributes:
        states: by the folder the metric, its mode and its step: JSON keeps it.
    """

    def __init__(self) -> None:
        self.states: dict[str, list[Any]] = {}

    def is_better(self, metric: Any, mode: str, path: str, comm: AxisComm) -> bool:
        """True if the metric is better than all before it. Collective.

        Raises:
            UsageError: it is no number, or another on some rank; or `mode` is neither, or another than before.
        """
        if mode not in ("min", "max"):
            raise UsageError(
                "the mode of job.save_best should be 'min' or 'max'", f"it is {mode!r:.60}", "write one of them"
            )
        number = same_number("job.save_best", metric, comm, may_be_nan=True)
        if path not in self.states:
            return not math.isnan(number)
        best, earlier, _ = self.states[path]
        if mode != earlier:
            raise UsageError(
                f"job.save_best should have one mode for {path}",
                f"it is {mode!r} now, and was {earlier!r} before",
                "give the other metric a folder of its own: path=...",
            )
        return bool(number < best if mode == "min" else number > best)

    def note(self, metric: Any, mode: str, path: str, step: int) -> None:
        """Note the metric as the best so far."""
        self.states[path] = [float(metric), mode, step]
