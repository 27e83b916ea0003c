"""Say on one page why a job stands still or is slow: which rank, in which line of whose code, and what to do.

paceline why JOB

The ranks of a running job are asked where they stand; no process is stopped. JOB is a run's name in the folder of
--runs, or the path of its run directory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.nouns.table import printable
from paceline.run.causes import Cause, causes
from paceline.run.job_facts import Facts, RankFacts, collect
from paceline.run.read import times
from paceline.run.read.runs import find_folder
from paceline.run.shown import steps

_FRAMES = 8  # the number of frames of a stack
_STACKS = 3
_ROWS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="a run's name, or its run directory")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Print the page."""
    facts = collect(find_folder(arguments.runs, arguments.job))
    found = causes(facts)
    if arguments.json:
        print(json.dumps(_as_json(facts, found)))
        return 0
    print("\n".join(map(printable, page(facts, found))))
    return 0


def page(facts: Facts, found: Sequence[Cause]) -> list[str]:
    """Return the page, line by line."""
    job = facts.run
    lines = ["  ".join(part for part in (job.name, job.status, job.plan, f"step {steps(job)}") if part)]
    if facts.stands_s >= 1 and job.is_open:
        lines[0] += f"  no progress for {facts.stands_s:.0f} s"
    lines.append("")
    for cause in found:
        lines += [cause.text, f"  fix: {cause.fix}"]
    if not found:
        lines.append("nothing is found that stands still, or is slower on one rank than on the others")
    if facts.ranks:
        lines += ["", *(_standing(rank) for rank in facts.ranks[:_ROWS])]
        if len(facts.ranks) > _ROWS:
            lines.append(f"and {len(facts.ranks) - _ROWS} more ranks")
    if facts.splits:
        lines += ["", *times.table(facts.splits, _ROWS)]
    if facts.stands_s >= 1:
        for rank in _with_stacks(facts, found):
            lines += ["", f"rank {rank.rank}, innermost first:"]
            lines += [f"  {file}:{line} {function}" for file, line, function in _own_frames(rank)[:_FRAMES]]
    return lines


def _with_stacks(facts: Facts, found: Sequence[Cause]) -> list[RankFacts]:
    """Return the ranks whose stacks are shown: those that a cause names, then others at different lines."""
    named = set().union(*(cause.ranks for cause in found))
    shown: dict[str, RankFacts] = {}
    for rank in sorted(facts.ranks, key=lambda rank: rank.rank not in named):
        if rank.stack:
            shown.setdefault(f"{rank.waits_in} {rank.line}", rank)
    return list(shown.values())[:_STACKS]


def _own_frames(rank: RankFacts) -> list[tuple[str, int, str]]:
    """Return a rank's frames up to where its file was started."""
    frames = []
    for file, line, function in rank.stack:
        if file == "<frozen runpy>":
            break
        frames.append((file, line, function))
    return frames


def _standing(rank: RankFacts) -> str:
    """Return a rank's activity in a line."""
    if rank.answer is None:
        return f"rank {rank.rank}: {rank.state or 'no answer'}"
    step = "" if rank.answer["step"] is None else f"step {rank.answer['step']}, "
    does = f"waits in {rank.waits_in}" if rank.waits_in else "computes" if rank.computes else "is idle"
    return f"rank {rank.rank}: {step}{does}, at {rank.line}, for {rank.answer['stalled_s']:.1f} s"


def _as_json(facts: Facts, found: Sequence[Cause]) -> dict[str, object]:
    return {
        **facts.run.to_json(),
        "stands_s": round(facts.stands_s, 3),
        "causes": [asdict(cause) for cause in found],
        "ranks_now": [
            {"rank": rank.rank, "state": rank.state, "answer": None if rank.answer is None else dict(rank.answer)}
            for rank in facts.ranks
        ],
        "times": [split.to_json() for split in facts.splits],
    }
