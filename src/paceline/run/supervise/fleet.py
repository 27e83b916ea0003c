"""Agents on a job's hosts: each is asked whether its host is ready before any rank starts anywhere."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.launch.rank_assignment import Meeting, Seats
from paceline.launch.ssh import SshOptions, ssh_command, why_lost
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, UsageError
from paceline.run.supervise.station import RemoteStation
from paceline.run.supervise.supervisor import Post
from paceline.server.coordinator.absences import SILENCE
from paceline.server.transport.credentials import keep_credentials, new_credentials

ANSWER_S = 60.0  # for ssh to connect, and Python to start from a cold file system
_FAMILIES = (
    *("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "PYTHONPATH", "PYTHONHASHSEED", "GLIBC_TUNABLES"),
    SILENCE,  # the coordinator and the workers must count alike
)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How other hosts are reached, and what they get.

    Args:
        ssh: how ssh is called.
        python: of each host.
        interface: that torch's sockets are bound to on every host; "": the one that ssh came to.
        environment: variables for the ranks, beside those whose names say that they are torch's or Python's.
    """

    ssh: SshOptions = field(default_factory=SshOptions)
    python: str = sys.executable
    interface: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def agent_command(host: str, options: FleetOptions) -> list[str]:
    """What starts an agent on a host; all else goes in on its standard input."""
    return ssh_command(host, [options.python, "-m", module_names.AGENT], options.ssh)


def agent_request(
    seats: Sequence[Seats], at: int, script: Path, run_dir: Path, options: FleetOptions
) -> dict[str, Any]:
    """What the agent of host number `at` is told first, but for the token."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_FAMILIES)}
    return {
        "run_dir": str(run_dir.resolve()),
        "script": str(script.resolve()),
        "cwd": os.getcwd(),
        "environment": {**kept, **options.environment},
        "interface": options.interface,
        "others": [one.host for number, one in enumerate(seats) if number != at],
        "is_head": at == 0,
        "has_servers": any(one.servers for one in seats),
    }


def open_posts(seats: Sequence[Seats], script: Path, run_dir: Path, options: FleetOptions) -> list[Post]:
    """An agent on every host, ready to start its ranks.

    Raises:
        HostError: a host can't be reached, or does not see the job's files. No rank has started.
    """
    credentials = new_credentials() if any(one.servers for one in seats) else {}
    token = secrets.token_hex(16)
    path = run_dir / f".token-{token[:8]}"  # a name of its own: a network file system may remember an older one
    path.write_text(token)
    stations: list[RemoteStation] = []
    try:
        for number, one in enumerate(seats):
            request = {**agent_request(seats, number, script, run_dir, options), "token": token}
            stations.append(RemoteStation(one.host, agent_command(one.host, options), request))
            stations[-1].credentials = {role: credentials[role] for role in _roles(one) if credentials}
        answers = _answers(stations)
        if credentials:
            let_watch(run_dir, credentials)
    except BaseException:
        for station in stations:
            station.close(0.5)
        if credentials:
            end_watch(run_dir)
        raise
    finally:
        path.unlink(missing_ok=True)
    first = f"{answers[0]['address']}:{answers[0]['port']}"
    meeting = Meeting(coordinator=first) if credentials else Meeting(master=first)
    return [
        Post(station, own, replace(meeting, interface=answer["interface"], own=answer["address"]))
        for station, own, answer in zip(stations, seats, answers, strict=True)
    ]


def _roles(seats: Seats) -> list[str]:
    """Whose certificates a host of a job with parameter servers gets: those of what it has, and no more."""
    last = ["coordinator"] if seats.cross_rank == 0 else []
    return ["worker", *(["server"] if len(seats.servers) > len(last) else []), *last]


def let_watch(run_dir: Path, credentials: Mapping[str, Mapping[str, str]]) -> None:
    """Keep what `paceline server top` needs to look at a job of several hosts; `end_watch` removes it."""
    end_watch(run_dir)  # an earlier attempt's
    keep_credentials(run_dir, {"watcher": credentials["watcher"]})


def end_watch(run_dir: Path) -> None:
    """The job has ended."""
    shutil.rmtree(run_dir / "credentials", ignore_errors=True)


class HostError(UsageError):
    """Hosts that are not ready.

    Attributes:
        hosts: their names.
    """

    def __init__(self, errors: dict[str, PacelineError]) -> None:
        first = next(iter(errors.values()))
        others = [host for host in errors if errors[host] is not first]
        more = f"; {len(others)} more: {', '.join(others)}" if others else ""
        super().__init__(first.asked, f"{first.found}{more}", first.fix)
        self.hosts = tuple(errors)


def _answers(stations: Sequence[RemoteStation]) -> list[dict[str, Any]]:
    """What each agent says of its host; all are waited for at once."""
    answers: dict[str, dict[str, Any]] = {}
    errors = {one.host: _silent(one.host) for one in stations}
    deadline = time.monotonic() + ANSWER_S
    # No threads: a signal ends the wait anywhere, and the stations are closed while nobody reads them.
    with selectors.DefaultSelector() as waited:
        for station in stations:
            waited.register(station.lines.descriptor, selectors.EVENT_READ, station)
        while waited.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waited.select(left_s):
                outcome = _outcome(key.data)
                if outcome is None:
                    continue
                waited.unregister(key.fd)
                if isinstance(outcome, PacelineError):
                    errors[key.data.host] = outcome
                else:
                    del errors[key.data.host]
                    answers[key.data.host] = outcome
    if errors:
        raise HostError(errors)
    return [answers[station.host] for station in stations]


def _outcome(station: RemoteStation) -> dict[str, Any] | PacelineError | None:
    """What a host has answered, or why it never will; None: not yet."""
    try:
        answer = station.answer()
    except PacelineError as error:
        return error
    if answer is None and station.lines.is_over:
        return why_lost(station.host, station.last_words() or "the agent ended without a message")
    return answer


def _silent(host: str) -> PacelineError:
    found = f"it has not answered for {ANSWER_S:g} s"
    return UsageError(f"to reach {host} over ssh", found, "see whether the host hangs")
