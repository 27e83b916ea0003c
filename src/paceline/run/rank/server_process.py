"""Run the process of a parameter server, and that of their coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import regular
from paceline.run.directory import SERVERS, write_json
from paceline.run.rank.worker import failed
from paceline.server.coordinator.process import Coordination
from paceline.server.node import serve
from paceline.server.settings import JobSettings
from paceline.server.transport.address import UNIX, Address, Credentials
from paceline.server.transport.credentials import credentials_folder
from paceline.train.compiler_import import defer_compiler_import

RETURNS_S = 20.0  # the time for the worker that the supervisor starts in a lost one's place


def run_server(private: Path, coordinator: str = "", host_address: str = "") -> int:
    """Run a parameter server in this process.

    Args:
        private: a folder that only this user can enter, with sockets and the credentials for other hosts.
        coordinator: the address HOST:PORT in a job of several hosts; "": a socket in `private`.
        host_address: the address of this host, in a job of several hosts.

    Returns:
        The exit code.
    """
    defer_compiler_import()
    if coordinator:
        # Port 0: the kernel chooses a free one.
        work = serve(f"{host_address}:0", coordinator, _credentials(private, "server"))
    else:
        work = serve(f"{UNIX}{private / f'server-{os.getpid()}'}", coordinator_address(private), None)
    return _exit_code(work)


def run_coordinator(private: Path, coordinator: str = "") -> int:
    """Run the coordinator in this process, and return the exit code. Arguments as `run_server` has them."""
    run_dir = Path(os.environ["PACELINE_RUN_DIR"])
    job = JobSettings.of(Plan.read(run_dir / "plan.json"))
    at = Address.parse(coordinator or coordinator_address(private))
    write_json(run_dir / SERVERS, {"coordinator": str(at)})
    credentials = _credentials(private, "coordinator") if coordinator else None
    return _exit_code(_coordinate(at, job, private / "log", run_dir, credentials))


def _credentials(private: Path, role: str) -> Credentials:
    return Credentials(credentials_folder(private, role))


async def _coordinate(at: Address, job: JobSettings, log: Path, run_dir: Path, credentials: Credentials | None) -> None:
    await Coordination(at, job, log, _event_writer(run_dir), RETURNS_S, credentials).run()


def _exit_code(work: Coroutine[Any, Any, None]) -> int:
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return 0
    except PacelineError as error:
        return failed(error.with_traceback(None))  # no line of the user's file is the cause
    except BaseException as error:
        return failed(error)
    return 0


def coordinator_address(private: Path) -> str:
    """Return the address of the coordinator of a job on this host."""
    return f"{UNIX}{private / 'coordinator'}"


def _event_writer(run_dir: Path) -> Callable[[dict[str, Any]], None]:
    path = run_dir / "servers.jsonl"
    is_reported = False

    def write_event(event: dict[str, Any]) -> None:
        nonlocal is_reported
        try:
            with open(
                path, "ab", buffering=0, opener=regular
            ) as file:  # unbuffered: a line that did not fit is not written later
                file.write(json.dumps({"at": time.time_ns() // 10**6 / 1e3, **event}).encode() + b"\n")
        except OSError as error:
            if not is_reported:
                print(
                    f"paceline: {path} can't be written ({error.strerror}); events are missing there", file=sys.stderr
                )
            is_reported = True

    return write_event
