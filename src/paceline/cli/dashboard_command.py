"""Show the runs of a folder in a browser, live: curves, time by rank, timelines, memory, events, and why a job is slow.

paceline dashboard                   the runs in runs/
paceline dashboard runs/JOB          that run, and the others in its folder

It listens only on this machine, and prints an address with a token, which the browser keeps. The variable
PACELINE_DASHBOARD_TOKEN has a token of your own. Ctrl-C ends it; jobs go on. It reads the runs' files, and changes none
of them; the page `why` asks the ranks of a running job.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from paceline.nouns.errors import UsageError

_NEEDED = ("starlette", "uvicorn", "jinja2", "plotly")
_MOST_PORT = 65535
_RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "runs", nargs="?", type=Path, default=_RUNS, metavar="DIR", help="the folder of runs, or a run's folder"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port to listen on (default 8265, or the next that is free)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen there (default 127.0.0.1: for this machine alone)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    runs: Path = arguments.runs
    job = None
    if (runs / "job.json").is_file():
        runs, job = runs.resolve().parent, runs.resolve().name
    # The default need not be there yet: the page says so, and shows the first run as it comes.
    if not runs.is_dir() and (runs != _RUNS or runs.exists()):
        found = "it is a file" if runs.exists() else "there is no such folder"
        raise UsageError(f"the runs in {runs}", found, "name the folder of your runs: paceline dashboard DIR")
    if arguments.port is not None and not 0 <= arguments.port <= _MOST_PORT:
        raise UsageError(
            f"--port {arguments.port}", f"ports go from 0 to {_MOST_PORT}", "write another, or leave it out"
        )
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        found = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise UsageError("the dashboard", found, "pip install 'paceline[dashboard]'")
    from paceline.dashboard.serve import serve  # here: it needs the extra

    serve(runs, arguments.host, arguments.port, _say, job)
    return 0


def _say(text: str) -> None:
    print(f"paceline dashboard: {text}", file=sys.stderr, flush=True)
