"""Write what each rank of a run did, when, as a trace for Perfetto.

paceline timeline JOB                  writes JOB-timeline.json, which https://ui.perfetto.dev opens
paceline timeline JOB --steps 10:20    only these steps

It has every step's time by kind of work, and what was done in the first 20 steps and in every hundredth: forward and
backward passes, collectives by axis, messages between stages as arrows, checkpoints. What `paceline run --profile` has
recorded is in it too. JOB is a run's name in the folder of --runs, or the path of its run directory; it may still be
running.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline.cli.closed_output import check_may_write
from paceline.nouns.errors import UsageError, how_to_write
from paceline.nouns.reading import parse_steps
from paceline.run.read.runs import find_folder
from paceline.run.shown import left_out
from paceline.run.timeline import make_trace, write_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="a run's name, or its run directory")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="these steps alone, both included")
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="where to write (default JOB-timeline.json)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout: the file, and what is in it")


def run(arguments: argparse.Namespace) -> int:
    """Write the trace."""
    folder = find_folder(arguments.runs, arguments.job)
    first, last = (None, None) if arguments.steps is None else parse_steps(arguments.steps, "--steps")
    output = arguments.output or Path(f"{folder.resolve().name}-timeline.json")
    check_may_write(output)
    trace = make_trace(folder, first, last)
    if not trace.steps:
        suffix = "" if arguments.steps is None else f" with the steps {arguments.steps}"
        raise UsageError(
            f"the timeline of {folder}{suffix}",
            f"there are no such steps in {folder / 'times'}",
            "name a run whose ranks have taken steps; jobs before this version of Paceline kept no times",
        )
    try:
        write_trace(trace, output)
    except OSError as error:
        raise UsageError(f"a timeline in {output}", f"{error.strerror}", how_to_write(error, "with -o")) from None
    if notice := left_out(trace.unreadable):
        print(f"paceline timeline: {notice}", file=sys.stderr)
    if arguments.json:
        counts = {"steps": trace.steps, "detailed": trace.detailed, "ranks": len(trace.ranks)}
        print(json.dumps({"output": str(output), **counts, "messages": trace.messages}))
        return 0
    ranks = f"{len(trace.ranks)} rank{'s' * (len(trace.ranks) > 1)}"
    print(f"{output}: {trace.steps} steps of {ranks}, {trace.detailed} of them in detail; open it in ui.perfetto.dev")
    return 0
