"""What was found, as a table for people and as JSON for programs.

equal     in float64 no value differs by more than rounding can do, and in the working precision every bit is the same
rounding  in float64 as above; in the working precision values differ by at most the bound that is shown
bug       something differs that rounding can't explain, or a promise beside the steps is broken; the line says which
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Check:
    """One line of the table: what was held against what, and how it came out."""

    name: str
    passed: bool
    said: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"check": self.name, "passed": self.passed, "said": self.said, **_finite(self.details)}


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


@dataclass(slots=True)
class FirstDifference:
    """Where the first difference is.

    Attributes:
        module: path of the module, "" for the loss or the update.
        collective: the one next to it, in words; "" where none is.
        phase: start, data, forward, loss, backward, update, buffer, load, order, dropout or traffic.
        said: a sentence.
    """

    module: str
    collective: str
    phase: str
    said: str

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"module": self.module, "collective": self.collective, "phase": self.phase, "said": self.said}


# What a check that is no step says when it fails, by the beginning of its name.
_BESIDE = {
    "dropout": "with random dropout ranks draw wrong masks, or drift apart",
    "traffic": "ranks send something else than what was predicted",
    "resume": "a job that resumes goes on differently",
    "reshard": "a checkpoint loaded under another mesh goes on differently",
}


@dataclass(slots=True)
class Verdict:
    """All checks of one plan."""

    plan: str
    checks: list[Check] = field(default_factory=list)
    is_compared: bool = False  # whether steps were
    is_bitwise: bool = False
    largest: float | None = None  # the parameters' difference in the working precision, over their norm
    precision: str = ""
    culprit: FirstDifference | None = None
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """equal, rounding or bug; "passed" where steps were not compared."""
        if not all(check.passed for check in self.checks):
            return "bug"
        if not self.is_compared:
            return "passed"
        return "equal" if self.is_bitwise else "rounding"

    @property
    def is_step_right(self) -> bool:
        """Whether nothing was found against the order of collectives and the steps themselves."""
        return not any(name.startswith(("order", "step", "run")) for name in self._failed())

    def _failed(self) -> list[str]:
        return [check.name for check in self.checks if not check.passed]

    def add(self, name: str, passed: bool, said: str, **details: Any) -> None:
        """One more line."""
        self.checks.append(Check(name, passed, said, details))

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "verdict": self.word, "plan": self.plan, "precision": self.precision,
            "largest_relative_difference": self.largest,
            "checks": [check.to_json() for check in self.checks],
            "culprit": self.culprit.to_json() if self.culprit else None,
            "notices": self.notices, "seconds": round(self.seconds, 2),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The table."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{check.name:<{width}}  {'ok ' if check.passed else 'BUG'}  {check.said}" for check in self.checks]
        lines += [f"note: {notice}" for notice in self.notices]
        lines.append("")
        if self.culprit is not None and self.culprit.phase == "order":  # the table has said it
            lines.append(f"collective:  {self.culprit.collective}")
        elif self.culprit is not None:
            lines.append(f"first difference: {self.culprit.said}")
            lines.append(f"  module:      {self.culprit.module or 'none'}")
            lines.append(f"  collective:  {self.culprit.collective or 'none'}")
        lines.append(f"{self.plan}: {self._meaning()}")
        return lines

    def _meaning(self) -> str:
        if self.word == "bug" and not self.is_step_right:
            return "bug (the distributed step is not the single-process step)"
        if self.word == "bug":
            step = "the distributed step is the single-process step, but " if self.is_compared else ""
            wrong = [text for start, text in _BESIDE.items() if any(name.startswith(start) for name in self._failed())]
            return f"bug ({step}{'; '.join(wrong)})"
        if self.word == "passed":
            return f"passed ({', '.join(check.name for check in self.checks)}; the plan's own steps were not compared)"
        if self.word == "equal":
            return "equal (the distributed step is the single-process step, bit for bit)"
        bound = f", which moves parameters by {self.largest:.1e} of their norm" if self.largest is not None else ""
        return f"rounding (the same step; in {self.precision} it rounds differently{bound})"
