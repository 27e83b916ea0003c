"""Describe the memory and traffic of a loop's first steps on one rank, as they were recorded.

`profile/profile_loop.py` writes it, `paceline plan` reads it: a file between a process with torch and one without.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.profile import LEDGER_ROW, Profile
from paceline.nouns.reading import COUNT, fault_of, read_json, reason_of

_MOST_BYTES = 2**30
_MODEL = {"name": str, "parameters": COUNT, "parameter_bytes": COUNT, "trained": COUNT, "buffer_bytes": COUNT}
_OPTIMIZER = {"name": str, "parameters": COUNT, "state_bytes": COUNT}
_STEP = {"traffic": [LEDGER_ROW], "backwards": COUNT, "updates": [COUNT]}
_FORM = {
    "profile": dict,
    "models": [_MODEL],
    "optimizers": [_OPTIMIZER],
    "steps": [_STEP],
    "from_step": COUNT,
    "batch_size": COUNT,
    "owned": [COUNT],
}


@dataclass(frozen=True, slots=True)
class LoopProfile:
    """A few steps of a loop on one rank, under one plan.

    Attributes:
        profile: the memory, the operations and the last step's traffic.
        models: the class and the sizes of each model that `prepare` was handed, over all ranks together.
        optimizers: the class of each optimizer, the elements that it updates, and the bytes of its state on this rank.
        steps: the recorded steps, from the first: the traffic of each, its calls of `job.backward`, and its updates by
            optimizer.
        from_step: the index of the first step that is like those which follow.
        batch_size: the samples in the last batch, over all ranks; 0 where the loop makes its own.
        owned: the number of elements that each rank of `shard` updates; empty where every rank updates all.
    """

    profile: Profile
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    from_step: int
    batch_size: int
    owned: list[int]

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        value = {name: getattr(self, name) for name in _FORM}
        path.write_text(json.dumps({**value, "profile": self.profile.to_json()}) + "\n")

    @classmethod
    def read(cls, path: Path) -> LoopProfile:
        """Read the file that `write` wrote.

        Raises:
            WorkloadError: the file is missing or is no such profile.
        """
        try:
            value = read_json(path, most_bytes=_MOST_BYTES)
            fault = fault_of(value, _FORM)
            if fault or value["from_step"] >= len(value["steps"]):
                raise ValueError(fault or "its first step is none of its steps")
            return cls(**{**{name: value[name] for name in _FORM}, "profile": Profile.of_json(value["profile"])})
        except ValueError as error:
            raise WorkloadError(
                f"a loop's profile in {path}",
                f"it can't be read ({reason_of(error)})",
                "record it again: paceline plan",
            ) from None
