"""Tell the user where the ranks of a job stand when no rank makes progress: which wait in which call, which don't.

Each rank writes down where it stands after some time without progress (`run/rank/watchdog.py`). A notice ends
nothing: a long first step, a compilation, an evaluation or a debugger looks alike. One thing is certain, and ends the
job whether notices are wanted or not: a rank that has closed its job after step N while another waits for it in a
later step. Otherwise a job ends for want of progress only where the user set a time for that: see `Timeout`.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.nouns.errors import UsageError
from paceline.run.failures import made_no_progress
from paceline.run.read.standing import STALLS, Report, by_standing, read_reports, standing
from paceline.run.shown import rank_names
from paceline.run.supervise.stall_verdict import Verdict

if TYPE_CHECKING:  # every job begins with this file, and few ever stand still
    from paceline.run.job_facts import Facts, RankFacts

AT_START = "the start, until all ranks are there"  # the name of a rank's wait for the others before the first step
VARIABLE = "PACELINE_STALL_NOTICE"
TIMEOUT_VARIABLE = "PACELINE_STALL_TIMEOUT"  # the variable from `paceline run` to the rank that it becomes
DEFAULT_S = 60.0
_EARLY = 0.75  # the share of the notice time: reports come a little late, and the notice should not
_AGAIN = 10  # times the notice time until the same notice comes again, and twice as long after each
_MINUTE_S = 60.0
_FRAMES = 8  # the number of frames of a stack that are shown
_MOST_PASSED_S = 5.0  # the most that one look counts: this process, or the whole host, may have been suspended
_ANSWER_S = (4.0, 60.0)  # bounds for a tenth of the timeout, the time to answer: a network file system may be slow
_STATES = {"T": "its process is stopped (SIGSTOP?)", "t": "a debugger has stopped its process", "Z": "it has ended"}
_GOES_ON = "nothing reported: it makes progress, or runs native code that lets no other thread run"


@dataclass(slots=True)
class Stalls:
    """The reports that the ranks of one job have written, and the notices to the user about them.

    Args:
        run_dir: the run directory of the job.
        notice_s: the seconds without progress after which the user is told; 0: never.
        ranks: the number of ranks of the job, on all hosts.
        verdict: the object that asks the ranks for the cause after a notice; None: nobody asks.
    """

    run_dir: Path
    notice_s: float
    ranks: int = 1
    verdict: Verdict | None = None
    # By key: when the notice was given, and the pause until it may come again.
    notices: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)
    is_told: bool = False  # True where a notice of the present stall was given
    reports: list[Report] = field(default_factory=list)
    # By rank: the identity of its newest report, and the time when that was first seen.
    seen: dict[int, tuple[tuple[float, float], float]] = field(default_factory=dict)

    def look(self, now_s: float, pids: Mapping[int, int]) -> list[str]:
        """Read the ranks' reports, and return the lines to print for the user now.

        Args:
            now_s: the seconds of a clock that only goes forward.
            pids: the processes of ranks on this host, by rank.
        """
        self.reports = read_reports(self.run_dir / STALLS)  # also without notices: `who_left` judges by them
        if not self.notice_s:
            return []
        longest_s = max((self._stalled_s(report, now_s) for report in self.reports), default=0.0)
        if not self.reports and self.is_told:
            self.is_told = False
            if self.verdict is not None:
                self.verdict.drop()
            return ["paceline: the job goes on"]
        if self.verdict is not None and (lines := self.verdict.take()):
            return lines
        if longest_s < _EARLY * self.notice_s:
            return []
        # The same notice comes rarely: a rank that is slow in every step would otherwise fill the screen.
        key = self._notice_key()
        noticed_at, pause_s = self.notices.get(key, (0.0, 0.0))
        if now_s - noticed_at < pause_s:
            return []
        pause_s = max(2 * pause_s, _AGAIN * self.notice_s)
        self.notices[key] = (now_s, pause_s)
        self.is_told = True
        if self.verdict is not None:
            self.verdict.begin()
        lines = _notice(self.reports, longest_s, self._missing(pids), pause_s)
        return [*lines[:-1], f"  More: paceline why {shlex.quote(str(self.run_dir))}", lines[-1]]

    def _stalled_s(self, report: Report, now_s: float) -> float:
        """Return the seconds without progress of a rank that wrote a report, and has written no other since."""
        # Its time is only compared with the one before: clocks of hosts differ, and are set while a job runs.
        rank, stalled_s = int(report["rank"]), float(report["stalled_s"])
        identity = float(report["at"]), stalled_s
        if self.seen.get(rank, (None, 0.0))[0] != identity:
            self.seen[rank] = (identity, now_s)
        return stalled_s + now_s - self.seen[rank][1]

    def _notice_key(self) -> tuple[Any, ...]:
        """Return the key of a notice: the ranks that wait, with their calls and lines.

        Ranks that don't wait are no part of it: their lines change, and it stays the same notice.
        """
        waits = []
        for report in self.reports:
            if report["waits_in"]:
                waits.append((report["rank"], report["waits_in"], report["line"]))
        return tuple(waits)

    def _missing(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return a sentence about each rank that wrote no report, by rank."""
        reported = {report["rank"] for report in self.reports}
        missing = {}
        for rank in range(self.ranks):
            if rank not in reported:
                # A rank of another host has no process here: of process 0 nothing is known.
                state = process_state(pids.get(rank, 0))
                missing[rank] = _STATES.get(state, _GOES_ON)
        return missing

    def clear(self) -> None:
        """Remove the folder if it is empty; reports of ranks that were killed stay for the user to read."""
        with contextlib.suppress(OSError):
            (self.run_dir / STALLS).rmdir()

    def who_left(self, ended: Sequence[int] = ()) -> int | None:
        """Return a rank that has closed its job while another waits for it in a later step; None: there is none.

        Args:
            ended: the ranks whose processes have ended well. One of them has left, too, while another waits at the
                start, where all ranks meet.
        """
        if ended and any(report["waits_in"] == AT_START for report in self.reports):
            return min(ended)
        # Only a wait inside a step counts: a rank that waits elsewhere may still be met, for instance in `close`,
        # where all ranks write the last checkpoint together. A rank that is still in its loop may only be slow.
        awaited_steps = []
        for report in self.reports:
            if report["waits_in"] and report["is_in_step"] and report["step"] is not None:
                awaited_steps.append(report["step"])
        if not awaited_steps:
            return None
        latest_step = max(awaited_steps)
        closing = [report for report in self.reports if report["is_closing"]]
        early_ranks = [report["rank"] for report in closing if report["steps_done"] < latest_step]
        return min(early_ranks, default=None)


@dataclass(slots=True)
class Timeout:
    """Judges when a job has made no progress for so long that it is to be ended.

    Progress is an event of the job, and what the ranks' watchdogs count: a step, or the begin of a collective. When no
    event has come for the whole time, the ranks are asked. The job stands if each rank that answers has made no
    progress for as long; a rank that gives no answer twice is stopped, or holds Python's lock in native code.

    Args:
        run_dir: the run directory of the job.
        seconds: the seconds without progress after which the job is ended; 0: it is never ended.
        verdict: the object that asks the ranks.
        quiet_s: the seconds without progress so far, as this process looked on.
        looked_s: the time of the last look, by the clock of `now_s`.
        silent: the ranks that gave no answer when they were asked last; None: they were not asked.
    """

    run_dir: Path
    seconds: float = 0.0
    verdict: Verdict = field(init=False)
    quiet_s: float = 0.0
    looked_s: float = math.inf
    silent: set[int] | None = None

    def __post_init__(self) -> None:
        least_s, most_s = _ANSWER_S
        self.verdict = Verdict(self.run_dir, min(max(self.seconds / 10, least_s), most_s))

    def progress(self, ago_s: float = 0.0) -> None:
        """Take in that the job made progress, `ago_s` seconds ago."""
        self.quiet_s = min(self.quiet_s, ago_s)
        self.silent = None
        self.verdict.drop()  # answers from before it

    def look(self, now_s: float, at: float, ended: Collection[int], pids: Mapping[int, int]) -> dict[str, Any] | None:
        """Return the failure of a job that is to be ended; None: it goes on, or is not known to stand.

        Args:
            now_s: the seconds of a clock that only goes forward.
            at: the time in seconds since the epoch.
            ended: the ranks that have ended.
            pids: the processes of ranks on this host, by rank; 0 for one that is not started yet.
        """
        self.quiet_s += min(max(now_s - self.looked_s, 0.0), _MOST_PASSED_S)
        self.looked_s = now_s
        if not self.seconds or self.quiet_s < self.seconds:
            return None
        facts = self.verdict.answers()
        if facts is None or not self._stands(facts, ended, pids):
            return None
        ranks = [rank for rank in facts.ranks if rank.rank not in ended]
        culprit = self._culprit()
        step = next((rank.answer["step"] for rank in ranks if rank.rank == culprit and rank.answer), None)
        return made_no_progress(self.seconds, at, (culprit, step), self._found(ranks), self._fix(ranks))

    def _stands(self, facts: Facts, ended: Collection[int], pids: Mapping[int, int]) -> bool:
        ranks = [rank for rank in facts.ranks if rank.rank not in ended]
        answered = [rank for rank in ranks if rank.answer is not None]
        if not ranks or facts.not_asked is not None:
            self.progress()  # nothing is known: the run directory is not seen here, or can't be written
            return False
        youngest_s = min((rank.stalled_s for rank in answered), default=math.inf)
        if youngest_s < self.seconds:
            self.progress(youngest_s)
            return False
        silent = {rank.rank for rank in ranks if rank.answer is None}
        if not answered and not all(rank.pid or rank.rank in pids for rank in ranks):
            self.progress()  # of none of them a sign has ever been seen here
            return False
        # A rank that is only slow to answer, as on a busy core, is asked again.
        is_known = silent <= (self.silent or set())
        self.silent = silent
        return is_known

    def _found(self, ranks: Sequence[RankFacts]) -> str:
        """Return the cause, where there is one, and the position of each rank."""
        positions = []
        for rank in ranks:
            silent = f"no answer, {rank.state or ('running' if rank.pid else 'its job has not begun')}"
            positions.append((rank.rank, silent if rank.answer is None else standing(rank.answer)))
        standings = [f"{rank_names(numbers)}: {text}" for text, numbers in by_standing(positions).items()]
        first = self.verdict.found[0].text if self.verdict.found else "no step was taken, and no collective begun"
        return f"{first} ({'; '.join(standings)})"

    def _fix(self, ranks: Sequence[RankFacts]) -> str:
        """Return the advice, with the folder of the stacks, which are written now."""
        # Not the advice of the cause: that is about processes which are ended now.
        folder = self._write_stacks(ranks)
        stacks = f"look at the stacks in {folder}, or " if folder is not None else ""
        return f"{stacks}raise --stall-timeout if the job may take so long there"

    def _write_stacks(self, ranks: Sequence[RankFacts]) -> Path | None:
        """Write the ranks' answers to a folder of their own: the next start removes the other reports."""
        number = 1
        while (folder := self.run_dir / STALLS / f"ended-{number}").exists():
            number += 1
        answers = {rank.rank: rank.answer for rank in ranks if rank.answer is not None}
        if not answers:
            return None
        try:
            folder.mkdir(parents=True)
            for number, answer in answers.items():
                (folder / f"{number}.json").write_text(json.dumps(answer, indent=1))
        except OSError:  # the error is reported without them
            return None
        return folder

    def _culprit(self) -> int | None:
        """Return the only rank that the others wait for; None: there is none, or several."""
        first = self.verdict.found[0] if self.verdict.found else None
        return first.ranks[0] if first is not None and len(first.ranks) == 1 else None


def notice_time(environment: Mapping[str, str]) -> float:
    """Return the seconds without progress after which the user is told; 0: never.

    Raises:
        UsageError: the variable's value is no number of seconds.
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


def _notice(reports: Sequence[Report], longest_s: float, missing: Mapping[int, str], pause_s: float) -> list[str]:
    """Return the notice, line by line.

    Args:
        reports: the reports of the ranks that wrote one.
        longest_s: the largest number of seconds without progress of any rank.
        missing: a sentence about each rank that wrote no report, by rank.
        pause_s: the seconds until the same notice comes again.
    """
    reported = [(report["rank"], standing(report)) for report in reports]
    ranks_by_standing = by_standing([*reported, *missing.items()])
    lines = [f"paceline: no progress for {longest_s:.0f} s"]
    for text, ranks in ranks_by_standing.items():
        lines.append(f"  {rank_names(ranks)}: {text}")
    lines.append(f"  {_meaning(reports, missing)}")
    # One stack for ranks that stand at the same place, and at most two of those that wait and two of the others.
    first_ranks = {ranks[0] for ranks in ranks_by_standing.values()}
    shown = [report for report in reports if report["rank"] in first_ranks]
    waiting = [report for report in shown if report["waits_in"]]
    running = [report for report in shown if not report["waits_in"]]
    for report in [*waiting[:2], *running[:2]]:
        lines += _stack(report)
    again = f"{pause_s / 60:.0f} min" if pause_s >= _MINUTE_S else f"{pause_s:.0f} s"
    lines.append(f"  No process was ended; the next notice comes in {again} at the earliest (--stall-notice).")
    return lines


def _meaning(reports: Sequence[Report], missing: Mapping[int, str]) -> str:
    """Return a sentence about the meaning of the reports."""
    waiting = {report["waits_in"] for report in reports if report["waits_in"]}
    if not waiting:
        return "None waits for another: a long step, a compilation, an evaluation or slow data looks like this."
    if len(waiting) > 1:
        return "They wait in different calls: do all ranks make the same calls in the same order?"
    if missing or any(not report["waits_in"] for report in reports):
        return "Those that wait go on when the others come to the same call."
    return "All wait in the same call: the network between them, or different shapes, may be why."


def _stack(report: Report) -> list[str]:
    lines = [f"  rank {report['rank']}, innermost first:"]
    for file, line, name in report["stack"][:_FRAMES]:
        lines.append(f"    {file}:{line} {name}")
    return lines


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as S or T; "" where that can't be known."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The state comes after the program's name in brackets, which may have spaces and brackets of its own.
        return content.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
