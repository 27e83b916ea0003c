"""Parameter servers: start one by itself, look at those of a job, make what they need to leave a host.

`paceline run --plan server=2` starts servers and workers by itself, with `--on ssh -H h1:4,h2:4` on several hosts,
and `paceline submit kubernetes` in pods. By hand:

  paceline server credentials FOLDER               certificates, a folder for each role
  paceline server coordinate --listen HOST:PORT    one coordinator, which the others name
  paceline server serve --coordinator HOST:PORT    as many servers as --servers says
  PACELINE_COORDINATOR=HOST:PORT ... python FILE   as many workers: see docs/parameter-server.md

  paceline server top JOB                          a live table of clocks, bytes and ranges
  paceline server why-waiting JOB                  who everybody waits for
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import read_json
from paceline.run.directory import SERVERS
from paceline.server.transport.address import Address, Credentials
from paceline.server.transport.credentials import credentials_folder

REFRESH_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    credentials = verbs.add_parser("credentials", help="make a job's certificates")
    credentials.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    coordinate = verbs.add_parser("coordinate", help="be a job's coordinator")
    coordinate.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:PATH or HOST:PORT")
    coordinate.add_argument("--plan", required=True, metavar="PLAN", help="such as replicate=4,server=2,mode=sync")
    coordinate.add_argument("--log", type=Path, required=True, metavar="FILE", help="keeps its decisions")
    serve = verbs.add_parser("serve", help="be one server")
    serve.add_argument("--coordinator", required=True, metavar="ADDRESS", help="unix:PATH or HOST:PORT")
    serve.add_argument("--listen", required=True, metavar="ADDRESS", help="unix:PATH or HOST:PORT; port 0: a free one")
    top = verbs.add_parser("top", help="a live table")
    top.add_argument("--once", action="store_true", help="print it once")
    why_parser = verbs.add_parser("why-waiting", help="who everybody waits for")
    for looking in (top, why_parser):
        looking.add_argument("job", metavar="JOB", help="a run directory, or the coordinator's address")
        looking.add_argument("--json", action="store_true", help="print what is known as JSON")
    for verb_parser in (coordinate, serve, top, why_parser):
        verb_parser.add_argument(
            "--credentials", type=Path, metavar="FOLDER", help="this role's, for addresses that leave the host"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the verb's action."""
    acts = {
        "credentials": _make_credentials,
        "coordinate": _coordinate,
        "serve": _serve,
        "top": _top,
        "why-waiting": _why_waiting,
    }
    try:
        return acts[arguments.verb](arguments)
    except KeyboardInterrupt:
        return 130


def _make_credentials(arguments: argparse.Namespace) -> int:
    from paceline.server.transport.credentials import make_credentials

    for folder in make_credentials(arguments.folder):
        print(folder)
    print("paceline server: made; copy each folder to where its role runs, and nowhere else", file=sys.stderr)
    return 0


def _coordinate(arguments: argparse.Namespace) -> int:
    from paceline.server.coordinator.process import Coordination
    from paceline.server.settings import JobSettings

    plan = Plan.parse(arguments.plan)
    if not plan.server:
        raise UsageError(f"can't coordinate the plan {arguments.plan}", "it has no servers", "add e.g. server=2")

    def print_event(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    address = Address.parse(arguments.listen)
    process = Coordination(
        address, JobSettings.of(plan), arguments.log, print_event, credentials=_credentials(arguments)
    )
    asyncio.run(process.run(lambda bound: print_event({"event": "listening", "at": bound})))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from paceline.server.node import serve  # imports torch

    asyncio.run(serve(arguments.listen, arguments.coordinator, _credentials(arguments)))
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from paceline.server.status_table import table

    is_live = sys.stdout.isatty() and not arguments.once and not arguments.json
    while True:
        answers = _look(arguments)
        if arguments.json:
            print(json.dumps(answers))
            return 0
        clear = "\x1b[H\x1b[2J" if is_live else ""  # the cursor home, and an empty screen
        print(clear + table(answers), flush=True)
        if not is_live:
            return 0
        time.sleep(REFRESH_S)


def _why_waiting(arguments: argparse.Namespace) -> int:
    from paceline.server.status_table import why_waiting

    answers = _look(arguments)
    explanation = why_waiting(answers)
    print(json.dumps({"why": explanation}) if arguments.json else explanation)
    return 0


def _look(arguments: argparse.Namespace) -> dict[str, Any]:
    from paceline.server.status import look

    address = _coordinator(arguments.job)
    credentials = _credentials(arguments)
    if credentials is None and not address.is_unix and Path(arguments.job).is_dir():  # a run on several hosts
        # Kept there by `run/supervise/host_agents.py` while the job runs.
        watcher = credentials_folder(Path(arguments.job), "watcher")
        if not watcher.is_dir():
            raise UsageError(
                f"can't find the servers of the run {arguments.job}", "it has ended", "name a run that goes on"
            )
        credentials = Credentials(watcher)
    return asyncio.run(look(address, credentials))


def _coordinator(job: str) -> Address:
    """Return the address of the coordinator of a run; an address is taken as it is."""
    folder = Path(job)
    if not folder.is_dir() and ":" not in job:
        raise UsageError(
            f"can't find the servers of the run {job}",
            "there is no such folder",
            "name a run directory, unix:PATH or HOST:PORT",
        )
    if not folder.is_dir():
        return Address.parse(job)
    try:
        return Address.parse(read_json(folder / SERVERS, {"coordinator": str})["coordinator"])
    except ReadError as error:
        reason = f"it has no {SERVERS} that can be read: {error.found}"
        raise UsageError(
            f"can't find the servers of the run {job}", reason, "name a run whose plan has servers, or an address"
        ) from None


def _credentials(arguments: argparse.Namespace) -> Credentials | None:
    return Credentials(arguments.credentials) if arguments.credentials else None
