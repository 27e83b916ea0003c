"""Says where the ranks of a job stand when none of them gets on: who waits in what, and what the missing ones do.

Each rank writes down its own standing after some time without progress (`run/rank/watchdog.py`). A notice ends
nothing: a long first step, a compilation, an evaluation or a debugger looks alike. One thing is certain, and ends the
job whether notices are wanted or not: a rank that has closed its job after step N while another waits for it in a
later step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.reading import COUNT, read_json

FOLDER = "stalls"  # in the run directory
VARIABLE = "PACELINE_STALL_NOTICE"
DEFAULT_S = 60.0
_TELL = 0.75  # of the notice time: reports come a little late, and the notice should not
_AGAIN = 10  # times the notice time until the same is told again, and twice as long after each
_MINUTE_S = 60.0
_FRAMES = 8  # of a stack that is shown
_IDLE = 0.2  # cores: a rank that uses less is not computing
_STATES = {"T": "its process is stopped (SIGSTOP?)", "t": "a debugger has stopped its process", "Z": "it has ended"}
_GOES_ON = "nothing reported: it makes progress, or runs native code that lets no other thread run"

Report = dict[str, Any]


@dataclass(slots=True)
class Stalls:
    """What the ranks of one job have written down.

    Args:
        run_dir: of the job.
        notice_s: seconds without progress after which people are told; 0: never.
        ranks: how many there are.
    """

    run_dir: Path
    notice_s: float
    ranks: int = 1
    told: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)  # key: when, pause until the next
    is_told: bool = False  # the present stall has been
    reports: list[Report] = field(default_factory=list)

    def look(self, now: float, pids: Mapping[int, int]) -> list[str]:
        """Read what the ranks wrote; the lines to tell people now.

        Args:
            now: seconds since the epoch.
            pids: processes of ranks on this host, by rank.
        """
        self.reports = read_reports(self.run_dir / FOLDER)
        if not self.notice_s:
            return []
        longest_s = max((_stalled_s(report, now) for report in self.reports), default=0.0)
        if not self.reports and self.is_told:
            self.is_told = False
            return ["paceline: the job goes on"]
        if longest_s < _TELL * self.notice_s:
            return []
        # Where none waits, their lines change, and it stays the same notice.
        key = tuple((one["rank"], one["waits_in"], one["line"]) for one in self.reports if one["waits_in"])
        when, pause_s = self.told.get(key, (0.0, 0.0))
        if now - when < pause_s:
            return []
        pause_s = max(2 * pause_s, _AGAIN * self.notice_s)
        self.told[key] = (now, pause_s)
        self.is_told = True
        return told(self.reports, longest_s, self._missing(pids), pause_s)

    def _missing(self, pids: Mapping[int, int]) -> dict[int, str]:
        """What is known of ranks that wrote nothing."""
        reported = {report["rank"] for report in self.reports}
        missing = [rank for rank in range(self.ranks) if rank not in reported]
        return {rank: _STATES.get(process_state(pids.get(rank, 0)), _GOES_ON) for rank in missing}

    def clear(self) -> None:
        """Remove the folder where nothing is in it."""
        with contextlib.suppress(OSError):
            (self.run_dir / FOLDER).rmdir()

    def who_left(self) -> int | None:
        """A rank that has closed its job while another waits for it in a later step; None: there is none."""
        closing = {report["rank"]: report["steps_done"] for report in self.reports if report["is_closing"]}
        waiting = [report["step"] for report in self.reports if report["waits_in"] and report["is_in_step"]]
        left = [rank for rank, done in closing.items() if any(step is not None and step > done for step in waiting)]
        return min(left, default=None)


def notice_time(environment: Mapping[str, str]) -> float:
    """The seconds without progress after which people are told; 0: never.

    Raises:
        UsageError: the variable has something else.
    """
    text = environment.get(VARIABLE) or f"{DEFAULT_S}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        fix = f"write seconds, 0 for no notice, or unset {VARIABLE}"
        raise UsageError(f"{VARIABLE}={text}", "it is no number of seconds", fix)
    return seconds


def read_reports(folder: Path) -> list[Report]:
    """The reports there, by rank; one that can't be read, or has another form, is passed over."""
    reports = []
    for path in folder.glob("*.json"):
        try:
            report = read_json(path, _FORM)
        except ReadError:
            continue
        if all(len(frame) == _FRAME_PARTS for frame in report["stack"]):
            reports.append(report)
    return sorted(reports, key=lambda report: int(report["rank"]))


# What `run/rank/watchdog.py` writes. A frame of the stack is its file, line and function.
_FORM = {
    "rank": COUNT,
    "at": float,
    "stalled_s": float,
    "cpu_s": float,
    "step": (COUNT, None),
    "steps_done": COUNT,
    "waits_in": (str, None),
    "is_in_step": bool,
    "is_closing": bool,
    "line": (str, None),
    "stack": [[(str, COUNT)]],
}
_FRAME_PARTS = 3


def told(reports: Sequence[Report], longest_s: float, missing: Mapping[int, str], pause_s: float) -> list[str]:
    """The notice, line by line.

    Args:
        reports: of the ranks that wrote one.
        longest_s: seconds without progress, of the rank that has had none for longest.
        missing: what is known of the others.
        pause_s: until the same is told again.
    """
    lines = [f"paceline: no progress for {longest_s:.0f} s"]
    groups: dict[str, list[int]] = {}
    for report in reports:
        groups.setdefault(_standing(report), []).append(report["rank"])
    for rank, text in missing.items():
        groups.setdefault(text, []).append(rank)
    lines += [f"  {_ranks(ranks)}: {text}" for text, ranks in groups.items()]
    lines.append("  " + _meaning(reports, missing))
    first = {text: ranks[0] for text, ranks in groups.items()}
    shown = [report for report in reports if report["rank"] in first.values()]
    waiting = [report for report in shown if report["waits_in"]][:2]
    for report in [*waiting, *[report for report in shown if not report["waits_in"]][:2]]:
        lines += _stack(report)
    again = f"{pause_s / 60:.0f} min" if pause_s >= _MINUTE_S else f"{pause_s:.0f} s"
    lines.append(f"  No process was ended; the next notice comes in {again} at the earliest (--stall-notice).")
    return lines


def _standing(report: Report) -> str:
    step = f"step {report['step']}, " if report["step"] is not None else ""
    at = report["line"] or _innermost(report)
    if report["is_closing"]:
        return f"left its loop after step {report['steps_done']}, closing the job"
    if report["waits_in"]:
        return f"{step}waiting in {report['waits_in']}, called at {at}"
    is_idle = report["cpu_s"] < _IDLE * report["stalled_s"]
    return f"{step}at {at}, {'idle' if is_idle else 'computing'}"


def _meaning(reports: Sequence[Report], missing: Mapping[int, str]) -> str:
    waiting = {report["waits_in"] for report in reports if report["waits_in"]}
    if not waiting:
        return "None waits for another: a long step, a compilation, an evaluation or slow data looks like this."
    if len(waiting) > 1:
        return "They wait in different calls: do all ranks make the same calls in the same order?"
    if missing or any(not report["waits_in"] for report in reports):
        return "Those that wait go on when the others come to the same call."
    return "All wait in the same call: the network between them, or different shapes, may be why."


def _stack(report: Report) -> list[str]:
    frames = report["stack"][:_FRAMES]
    return [f"  rank {report['rank']}, innermost first:", *[f"    {file}:{line} {name}" for file, line, name in frames]]


def _innermost(report: Report) -> str:
    if not report["stack"]:
        return "an unknown line"
    file, line, name = report["stack"][0]
    return f"{file}:{line} ({name})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _stalled_s(report: Report, now: float) -> float:
    return float(report["stalled_s"]) + max(0.0, now - float(report["at"]))


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does, such as S or T; "" where that can't be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
