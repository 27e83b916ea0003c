"""Print what the ranks of a job have printed.

paceline logs JOB                   all of it, with the rank before each line
paceline logs JOB --rank 1          that of one rank
paceline logs JOB --last 20         the last 20 lines
paceline logs JOB --follow          and what comes, until the job has ended, or was killed and is silent

JOB is a run's name in the folder of --runs, or the path of its run directory. The output of jobs that mpirun or srun
started is where those print it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import LineFollower, parse_whole, shown
from paceline.nouns.table import without_commands
from paceline.run.rank_output import FILE, Line, read_lines
from paceline.run.read.runs import QUIET_S, RUNNING, SILENT, find_folder, read_run

_LOOK_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("job", metavar="JOB", help="a run's name, or its run directory")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept")
    parser.add_argument("--rank", metavar="N", help="that of one rank alone, or of a server by its name")
    parser.add_argument("--last", type=int, metavar="N", help="the last N lines alone")
    parser.add_argument("--follow", "-f", action="store_true", help="go on with what comes until the job has ended")
    parser.add_argument("--time", action="store_true", help="with the time at which each line came")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each line")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    if arguments.last is not None and arguments.last < 1:
        raise UsageError(f"--last {arguments.last}", "it is no number of lines", "write --last 1 or more")
    folder = find_folder(arguments.runs, arguments.job)
    path = folder / FILE
    if not path.exists() and not (arguments.follow and _runs(folder)):
        raise UsageError(
            f"the output of {folder}",
            f"there is no {FILE} in it: its ranks have printed nothing, or mpirun or srun has started them",
            "look where that launcher prints",
        )
    _check_rank(folder, path, arguments.rank)
    follower = LineFollower(path)
    lines: Iterable[Line] = read_lines(follower, arguments.rank)
    for line in lines if arguments.last is None else deque(lines, arguments.last):
        print(_shown(line, arguments))
    if arguments.follow:
        for line in _following(folder, follower, arguments.rank):
            print(_shown(line, arguments), flush=True)
    return 0


def _check_rank(folder: Path, path: Path, rank: str | None) -> None:
    """Raise UsageError for a rank that the job does not have."""
    ranks = read_run(folder).ranks
    if rank is None or parse_whole(rank, 0, ranks - 1) is not None:
        return
    known = {line.source for line in read_lines(path)}
    if rank not in known:
        names = sorted(name for name in known if not name.isdecimal())
        found = f"it has the ranks 0 to {ranks - 1}{''.join(f', {name}' for name in names)}"
        raise UsageError(f"the output of rank {shown(rank)[1:-1]} of {folder}", found, "name one of these")


def _following(folder: Path, follower: LineFollower, rank: str | None) -> Iterator[Line]:
    """Yield the lines as they come, until the job has ended."""
    while True:
        is_over = not _runs(folder)  # asked before the file is read: it has all lines until then
        yield from read_lines(follower, rank)
        if is_over:
            return
        time.sleep(_LOOK_S)


def _runs(folder: Path) -> bool:
    status = read_run(folder).status
    if status != SILENT:
        return status == RUNNING
    try:  # killed, or in a long step: by its output
        return time.time_ns() / 1e9 - (folder / FILE).stat().st_mtime < QUIET_S
    except OSError:
        return False


def _shown(line: Line, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return json.dumps({"at": line.at, "rank": line.source, "text": line.text})
    at = f"{time.strftime('%H:%M:%S', time.localtime(line.at))} " if arguments.time else ""
    text = without_commands(line.text) if sys.stdout.isatty() else line.text
    return f"{at}[{line.source}] {text}"
