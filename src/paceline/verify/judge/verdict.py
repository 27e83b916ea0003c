"""The verdict on a plan, as a table for users and as JSON for programs.

equal     in float64 no value differs by more than rounding can do, and in the working precision every bit is the same
rounding  in float64 as above; in the working precision values differ by at most the bound that is shown
bug       something differs that rounding can't explain, or a promise beside the steps is broken; the line says which
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.nouns.table import aligned


@dataclass(slots=True)
class Check:
    """One line of the table: what was compared, and how it came out."""

    name: str
    passed: bool
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {"check": self.name, "passed": self.passed, "said": self.message, **_finite(self.details)}


def _finite(value: Any) -> Any:
    """Replace infinities and NaN by words, since JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


@dataclass(slots=True)
class FirstDifference:
    """The place of the first difference between the ranks and one process.

    Attributes:
        module: the path of the module, "" for the loss or the update.
        collective: the collective next to it, in words; "" where none is.
        phase: the phase in which it is: start, data, forward, loss, backward, update, later step, buffer, load, order,
            dropout or traffic.
        message: a sentence that says what differs.
    """

    module: str
    collective: str
    phase: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Return the place as a JSON object."""
        return {"module": self.module, "collective": self.collective, "phase": self.phase, "said": self.message}


# What is wrong when a check beside the steps fails, by the beginning of its name.
_BESIDE = {
    "dropout": "with random dropout ranks draw wrong masks, or drift apart",
    "traffic": "ranks send something else than what was predicted",
    "resume": "a job that resumes goes on differently",
    "reshard": "a checkpoint loaded under another mesh goes on differently",
}


@dataclass(slots=True)
class Verdict:
    """All checks of one plan, and where the first difference is."""

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
        """One of equal, rounding and bug; "passed" where steps were not compared."""
        if not all(check.passed for check in self.checks):
            return "bug"
        if not self.is_compared:
            return "passed"
        return "equal" if self.is_bitwise else "rounding"

    @property
    def is_step_right(self) -> bool:
        """True if the order of collectives and the steps themselves passed their checks.

        Dropout and traffic may be wrong beside a right step; a checkpoint can then still be verified.
        """
        return not any(name.startswith(("order", "step", "run")) for name in self._failed())

    def _failed(self) -> list[str]:
        return [check.name for check in self.checks if not check.passed]

    def add(self, name: str, passed: bool, message: str, **details: Any) -> None:
        """Add a line to the table."""
        self.checks.append(Check(name, passed, message, details))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {
            "verdict": self.word, "plan": self.plan, "precision": self.precision,
            "largest_relative_difference": self.largest,
            "checks": [check.to_json() for check in self.checks],
            "culprit": self.culprit.to_json() if self.culprit else None,
            "notices": self.notices, "seconds": round(self.seconds, 2),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return the lines of the table, and below it the first difference and the meaning of the verdict."""
        rows = [(check.name, "ok" if check.passed else "BUG", check.message) for check in self.checks]
        lines = aligned(rows, "{:<}  {:<3}  {}")
        lines += [f"note: {notice}" for notice in self.notices]
        lines.append("")
        if self.culprit is not None and self.culprit.phase == "order":  # its sentence is in the table already
            lines.append(f"collective:  {self.culprit.collective}")
        elif self.culprit is not None:
            lines.append(f"first difference: {self.culprit.message}")
            lines.append(f"  module:      {self.culprit.module or 'none'}")
            lines.append(f"  collective:  {self.culprit.collective or 'none'}")
        lines.append(f"{self.plan}: {self._meaning()}")
        return lines

    def _meaning(self) -> str:
        """Explain the verdict's word."""
        if self.word == "bug":
            return f"bug ({self._what_is_wrong()})"
        if self.word == "passed":
            return f"passed ({', '.join(check.name for check in self.checks)}; the plan's own steps were not compared)"
        if self.word == "equal":
            return "equal (the distributed step is the single-process step, bit for bit)"
        bound = ""
        if self.largest is not None:
            bound = f", which moves parameters by {self.largest:.1e} of their norm"
        return f"rounding (the same step; in {self.precision} it rounds differently{bound})"

    def _what_is_wrong(self) -> str:
        if not self.is_step_right:
            return "the distributed step is not the single-process step"
        failed = self._failed()
        wrong = []
        for check, meaning in _BESIDE.items():
            if any(name.startswith(check) for name in failed):
                wrong.append(meaning)
        text = "; ".join(wrong)
        if self.is_compared:
            return f"the distributed step is the single-process step, but {text}"
        return text
