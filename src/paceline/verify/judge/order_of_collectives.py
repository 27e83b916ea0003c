"""Check that all ranks begin the same collectives in the same order, or find which rank left it, and at which line.

It reads the traces that ranks write as they go, so it also explains a run that hung or died.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.mesh import AXES, Mesh
from paceline.run.read.standing import STALLS, Report, read_reports

# Seconds. A hang ends within 10 s, as docs/verify.md promises: this, the pause until a rank's next report, and the time
# to end the ranks.
IDLE_S = 6.0  # when all ranks wait for one another for so long, nobody will come any more
_IDLE_CORES = 0.2  # a process that uses less does not compute
NOTICE_S = 8.0  # by which ranks report: after 2, 4 and 6 seconds without progress
_PACELINE = f"{Path(__file__).parents[2]}{os.sep}"  # a user's folder may have that name too
_PAIRWISE = ("send", "receive")  # begun by two ranks of an axis, so not the same on all
_SAME_SIZE = ("all_reduce", "broadcast")  # in other collectives ranks may rightly have different numbers of rows
_AXES_OF = {"data": ["replicate", "shard"], "step": list(AXES), "world": list(AXES)}  # groups over several axes

Form = tuple[str, int]  # collective and payload bytes, 0 where ranks may have different numbers of them


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank began it."""

    collective: str
    axis: str
    payload_bytes: int
    line: str

    def __str__(self) -> str:
        place = f" at {self.line}" if self.line else ""
        return f"{self.collective} on {self.axis} ({self.payload_bytes} bytes){place}"


@dataclass(frozen=True, slots=True)
class Disorder:
    """The first place where ranks of one group begin different collectives."""

    axis: str
    rank: int  # the one that left the order
    call: Call | None  # what it began instead; None: nothing more
    regular_rank: int  # a rank that kept to it
    expected: Call | None
    last_common: Call | None
    number: int  # collectives on that axis before it

    def describe(self) -> str:
        """Describe the collective that the rank began, and the one that was expected."""
        actual = f"began {self.call}" if self.call else f"began nothing more on {self.axis}"
        expected = f"began {self.expected}" if self.expected else "began nothing more"
        last = f"the last they had in common was {self.last_common}" if self.last_common else "they had none in common"
        return f"rank {self.rank} {actual} where rank {self.regular_rank} {expected}; {last}"

    def to_json(self) -> dict[str, Any]:
        """Return the place as a JSON object."""
        return {
            "axis": self.axis, "rank": self.rank, "other_rank": self.regular_rank, "number": self.number,
            "began": _string(self.call), "line": self.call.line if self.call else None,
            "expected": _string(self.expected), "expected_line": self.expected.line if self.expected else None,
            "last_common": _string(self.last_common),
        }  # fmt: skip


def _string(call: Call | None) -> str | None:
    return str(call) if call else None


def read_trace(path: Path) -> list[Call]:
    """Read a rank's collectives; a last line that was cut off is left out."""
    if not path.exists():
        return []
    calls = []
    for line in path.read_text().splitlines():
        try:
            calls.append(Call(*json.loads(line)))
        except ValueError:  # the rank was killed while it wrote
            break
    return calls


def find_disorder(traces: dict[int, list[Call]], mesh: Mesh) -> Disorder | None:
    """Return the earliest place where ranks of one group differ; None where they agree.

    Groups are compared one by one: ranks of different groups may rightly interleave their collectives differently. Of
    several disorders the one with the fewest collectives before it on its axis is returned; the others may follow
    from it.
    """
    disorders = []
    for axis in [*AXES, *_AXES_OF]:
        groups = {mesh.peers_on(rank, _AXES_OF.get(axis, [axis])) for rank in traces}
        for group in sorted(groups):
            calls = {rank: _calls_on(axis, traces[rank]) for rank in group if rank in traces}
            disorder = _first_difference(axis, calls)
            if disorder is not None:
                disorders.append(disorder)
    return min(disorders, key=lambda disorder: disorder.number, default=None)


def _calls_on(axis: str, calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.axis == axis and call.collective not in _PAIRWISE]


def _first_difference(axis: str, calls: dict[int, list[Call]]) -> Disorder | None:
    """Return the first place where the calls of a group's ranks, by rank, differ."""
    for number in range(max(len(rank_calls) for rank_calls in calls.values())):
        forms = {rank: _form(_call_at(number, calls[rank])) for rank in sorted(calls)}
        if len(set(forms.values())) == 1:
            continue
        odd, regular = _odd_and_regular(calls, forms, number)
        last_common = calls[regular][number - 1] if number else None
        call, expected = _call_at(number, calls[odd]), _call_at(number, calls[regular])
        return Disorder(axis, odd, call, regular, expected, last_common, number)
    return None


def _call_at(number: int, calls: list[Call]) -> Call | None:
    return calls[number] if number < len(calls) else None


def _odd_and_regular(calls: dict[int, list[Call]], forms: dict[int, Form | None], number: int) -> tuple[int, int]:
    """Return a rank that left the order at call `number`, and one that kept to it."""
    if len(calls) == 2:
        return _odd_of_two(calls, number)
    values = list(forms.values())
    # What most ranks do is right; of two forms as frequent, one that is a call.
    usual = max(set(values), key=lambda form: (values.count(form), form is not None))
    odd = next(rank for rank, form in forms.items() if form != usual)
    regular = next(rank for rank, form in forms.items() if form == usual)
    return odd, regular


def _odd_of_two(calls: dict[int, list[Call]], number: int) -> tuple[int, int]:
    """Return first the rank that left out a call: the one whose call is what the other begins right after its own."""
    first, second = sorted(calls)
    form_of_first = _form(_call_at(number, calls[first]))
    next_form_of_second = _form(_call_at(number + 1, calls[second]))
    if form_of_first is None or form_of_first == next_form_of_second:
        return first, second
    return second, first


def _form(call: Call | None) -> Form | None:
    """Return the part of a call that must be the same on all ranks; None if there is no call."""
    if call is None:
        return None
    if call.collective in _SAME_SIZE:
        return call.collective, call.payload_bytes
    return call.collective, 0


@dataclass(slots=True)
class HangWatch:
    """A question that the supervisor asks at every turn: have all ranks made no progress, waiting for each other?

    Each rank's watchdog writes where it stands (`run/rank/watchdog.py`).

    Attributes:
        run_dir: the run directory of the ranks.
        ranks: the number of ranks.
        standing: the line at which each rank stands in a hang: the nearest of the user's code, else of Paceline's.
        has_hung: True if the ranks have hung.
    """

    run_dir: Path
    ranks: int
    standing: dict[int, str] = field(default_factory=dict)
    has_hung: bool = False

    def describe(self) -> str:
        """Describe the line at which each rank stands."""
        return "; ".join(f"rank {rank} at {place}" for rank, place in sorted(self.standing.items()))

    def __call__(self) -> bool:
        """Return True once all ranks have waited in collectives for a while.

        A rank that reads data, or computes, does not wait in one, so it does not hang.
        """
        reports = read_reports(self.run_dir / STALLS)
        if len(reports) < self.ranks:  # not every rank has started, or some make progress
            return False
        if not all(map(_waits_idly, reports)):
            return False
        self.standing = {int(report["rank"]): _place_of(report) for report in reports}
        self.has_hung = True
        return True


def _waits_idly(report: Report) -> bool:
    is_idle = report["cpu_s"] < _IDLE_CORES * report["stalled_s"]  # one that sends much computes meanwhile
    return bool(report["waits_in"] and report["stalled_s"] >= IDLE_S and is_idle)


def _place_of(report: Report) -> str:
    if report["line"]:
        return str(report["line"])
    for file, number, _ in report["stack"]:
        if file.startswith(_PACELINE) and not file.startswith(f"{_PACELINE}comm{os.sep}"):
            return f"paceline{os.sep}{file.removeprefix(_PACELINE)}:{number}"
    file, number, _ = report["stack"][0]
    return f"{file}:{number}"
