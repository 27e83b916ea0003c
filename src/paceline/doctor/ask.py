"""Collect the facts of all hosts of a fleet, and answer when another host asks for this one's.

A request and its answer are one JSON object each, over the standard input and output of `paceline doctor --answer`,
started here or by the user's own ssh. In the first round a host looks at itself; in the second all hosts try to
reach each other at the same time; a third removes the file by which hosts that share a run directory know it.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from paceline.doctor.checks.network_checks import chosen_address
from paceline.doctor.facts import HostFacts
from paceline.doctor.meet import ReachableHost, meet
from paceline.doctor.probe.disk import marker_path
from paceline.doctor.probe.host_facts import Question, look
from paceline.launch.ssh import SshOptions, ssh_command, why_lost
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, UsageError, last_error_of
from paceline.nouns.names import check_name
from paceline.nouns.reading import Whole, parse_json, reason_of

_ANSWER = ("-m", module_names.COMMAND, "doctor", "--answer")
_LIMIT_S = 240.0  # the time for one answer: torch may come from a slow disk
_MAX_BYTES = 2**22  # the largest answer: a host sends some kilobytes, and a login may print before it
_MEET_S = 10.0  # hosts start within some seconds of each other
_LONGEST_MEET_S = 60.0  # the longest time for which a port is open, whatever the request says
_AT_ONCE = 32  # processes of ssh at a time


class Asker(Protocol):
    """A way to the doctor of a host."""

    def ask(self, host: str, request: bytes) -> bytes:
        """Return the answer to a request.

        Raises:
            UsageError: the host can't be asked.
        """


class LocalAsker:
    """Ask this host, whatever its name, through a child process, as ssh would start it."""

    def ask(self, host: str, request: bytes) -> bytes:
        """Return the answer of a child process."""
        return _answer_of([sys.executable, *_ANSWER], host, request, is_ssh=False)


@dataclass(frozen=True, slots=True)
class SshAsker:
    """Ask through the user's own ssh; this host itself is asked without it.

    Args:
        python: the Python program that has Paceline, on every host.
        options: the ssh program and its arguments.
    """

    python: str = sys.executable
    options: SshOptions = field(default_factory=SshOptions)

    def __post_init__(self) -> None:
        check_name("program", self.python)

    def needs_ssh(self, host: str) -> bool:
        """Return True if a host is another one."""
        return not is_this_host(host)

    def ask(self, host: str, request: bytes) -> bytes:
        """Return the answer of the doctor on `host`."""
        if not self.needs_ssh(host):
            return LocalAsker().ask(host, request)
        command = ssh_command(host, [self.python, *_ANSWER], self.options)
        return _answer_of(command, host, request, is_ssh=True)


def is_this_host(name: str) -> bool:
    """Return True if a name is this host's own, as hosts files of one host have it."""
    hostname = socket.gethostname()
    short_name = hostname.partition(".")[0]
    return name in ("localhost", "127.0.0.1", "::1", hostname, short_name)


def _answer_of(command: list[str], host: str, request: bytes, is_ssh: bool) -> bytes:
    try:
        completed = subprocess.run(command, input=request, capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        problem = f"it did not answer within {_LIMIT_S:.0f} s"
        raise UsageError(f"can't ask {host}", problem, f"see what `paceline doctor` waits for on {host}") from None
    except OSError as error:
        raise UsageError(f"can't ask {host}", f"{command[0]} can't be started ({error})", "install it") from None
    if completed.returncode == 0:
        return completed.stdout
    error_text = completed.stderr.decode(errors="replace")
    if is_ssh:
        raise why_lost(host, error_text)
    reason = last_error_of(error_text, f"it ended with {completed.returncode}")
    raise UsageError(f"can't ask {host}", f"its process failed: {reason}", "run `paceline doctor` there")


_PORT = Whole(0, 65535)
# The forms that a request of another host's doctor may have, one for each kind: look, meet, tidy.
_REQUEST = (
    {
        "kind": str,
        "question": {"names": [str], "runs": str, "ports": [_PORT], "is_quick": bool, "marker": str},
    },
    {
        "kind": str,
        "own": str,
        "seats": [{"host": str, "address": str, "port": _PORT, "token": str}],
        "seconds": float,
        "folder": str,
        "marker": str,
    },
    {"kind": str, "folder": str, "marker": str},
)


@dataclass(frozen=True, slots=True)
class Offset:
    """The seconds that a host's clock is ahead of the asking host's, and the largest error of that."""

    seconds: float
    uncertainty_s: float


@dataclass(slots=True)
class FleetFacts:
    """The answers of all hosts of a fleet. Every dictionary has the names of hosts as keys.

    Args:
        hosts: the facts of the hosts that answered.
        silent: the errors of the hosts that did not answer.
        offsets: the offset of each host's clock.
        reached: the outcomes of each host's attempts to reach the others, by their names; "": it was reached, else the
            reason.
        marker: True for each host that sees the file which the first host wrote to the run directory.
        ports: the address on which each host listened, as "address:port".
    """

    hosts: dict[str, HostFacts] = field(default_factory=dict)
    silent: dict[str, PacelineError] = field(default_factory=dict)
    offsets: dict[str, Offset] = field(default_factory=dict)
    reached: dict[str, dict[str, str]] = field(default_factory=dict)
    marker: dict[str, bool] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)


def ask_fleet(
    names: Sequence[str],
    question: Question,
    asker: Asker,
    say: Callable[[str], None] = lambda text: None,
    meet_s: float = _MEET_S,
) -> FleetFacts:
    """Ask every host for its facts, then let all of them reach each other.

    Args:
        names: the names of the hosts.
        question: the facts that each host collects. With a marker, the first of `names` leaves it in the run directory.
        asker: the object that asks the hosts.
        say: a function that is called with progress lines.
        meet_s: the seconds for which hosts try to reach each other.
    """
    fleet = FleetFacts()

    # First round: each host looks at itself. Only the first one writes the marker, which the others then look for.
    say(f"asking {len(names)} hosts what they are")
    requests = {name: _look_request(question, name == names[0]) for name in names}
    for name, (answer, began_ns, ended_ns) in _ask_all(requests, asker, fleet).items():
        try:
            fleet.hosts[name] = HostFacts.from_json(answer.get("facts"))
            fleet.offsets[name] = clock_offset(
                began_ns, _integer(answer, "heard_ns"), _integer(answer, "said_ns"), ended_ns
            )
        except ValueError as error:
            fleet.hosts.pop(name, None)  # its facts were right, its times were not
            fleet.silent[name] = _nonsense(name, str(error))

    # Second round: all hosts at the same time, since each listens only for some seconds.
    seats = _seats(fleet)
    if len(seats) > 1:
        fleet.ports = {seat.host: f"{seat.address}:{seat.port}" for seat in seats}
        say(f"each host listens on one port for up to {meet_s:.0f} s, and the others try to reach it")
        runs = fleet.hosts.get(names[0], HostFacts()).runs
        is_written = bool(runs.path) and not runs.error
        marker = question.marker if is_written else ""
        _let_meet(fleet, seats, (runs.path, marker), asker, meet_s)

    # Third round: the host that wrote the marker removes it. If it is silent now, that is no finding of its own.
    if question.marker and names[0] in fleet.hosts:
        tidy = {"kind": "tidy", "folder": fleet.hosts[names[0]].runs.path, "marker": question.marker}
        _ask_all({names[0]: tidy}, asker, FleetFacts())
    return fleet


def _look_request(question: Question, is_first: bool) -> dict[str, Any]:
    marker = question.marker if is_first else ""
    return {"kind": "look", "question": {**asdict(question), "marker": marker}}


def _seats(fleet: FleetFacts) -> list[ReachableHost]:
    """Return the address on which each host is to listen, with a token that only the hosts of this fleet know."""
    seats = []
    for name, host in fleet.hosts.items():
        address = chosen_address(host)
        port = host.network.free_port
        if address and port:
            seats.append(ReachableHost(name, address, port, secrets.token_hex(16)))
    return seats


def _let_meet(
    fleet: FleetFacts, seats: list[ReachableHost], runs: tuple[str, str], asker: Asker, meet_s: float
) -> None:
    """Let all hosts with a seat reach each other, and write the outcome to `fleet`."""
    folder, marker = runs
    common = {"kind": "meet", "seats": [asdict(seat) for seat in seats], "seconds": meet_s}
    requests: dict[str, dict[str, Any]] = {}
    for seat in seats:
        requests[seat.host] = {**common, "own": seat.host, "folder": folder, "marker": marker}
    for name, (answer, _, _) in _ask_all(requests, asker, fleet).items():
        # Another host wrote the answer, so that its types are not certain.
        reached = answer.get("reached")
        if isinstance(reached, dict):
            fleet.reached[name] = {str(peer): str(reason) for peer, reason in reached.items()}
        has_marker = answer.get("has_marker")
        if marker and isinstance(has_marker, bool):
            fleet.marker[name] = has_marker


def _ask_all(
    requests: Mapping[str, dict[str, Any]], asker: Asker, fleet: FleetFacts
) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Return each host's answer, with this host's clock before and after it (ns since 1970).

    Hosts that fail are left out; their errors go to `fleet.silent`.
    """

    def ask(name: str) -> tuple[dict[str, Any], int, int]:
        request = json.dumps(requests[name]).encode()
        began_ns = time.time_ns()
        text = asker.ask(name, request)
        return _parse(name, text), began_ns, time.time_ns()

    answers = {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(requests))) as pool:
        futures = {name: pool.submit(ask, name) for name in requests}  # all at once, before the first is waited for
        for name, future in futures.items():
            try:
                answers[name] = future.result()
            except PacelineError as error:
                fleet.silent[name] = error
    return answers


def _parse(name: str, text: bytes) -> dict[str, Any]:
    if len(text) > _MAX_BYTES:
        raise _nonsense(name, f"{len(text)} bytes")
    try:
        lines = text.decode().strip().splitlines()
        last_line = lines[-1] if lines else ""  # a login may print something before the answer
        return dict(parse_json(last_line, "its answer", dict))
    except ValueError as error:
        raise _nonsense(name, reason_of(error)) from None


def _nonsense(name: str, reason: str) -> UsageError:
    return UsageError(
        f"can't ask {name}", f"its answer can't be read ({reason})", f"install this version of Paceline on {name}"
    )


def _integer(answer: Mapping[str, object], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise ValueError(f"{name} should be a number")
    return value


def clock_offset(began_ns: int, heard_ns: int, said_ns: int, ended_ns: int) -> Offset:
    """Return the offset of the other host's clock.

    The way there looks longer by the offset, and the way back shorter. Half the difference is the offset if both ways
    take the same time; if they don't, it is wrong by half of their sum at most.

    Args:
        began_ns: the time on this host's clock when the question left, in nanoseconds.
        heard_ns: the time on the other's clock when it came.
        said_ns: the time on the other's clock when the answer left.
        ended_ns: the time on this host's clock when it came.

    Source: Mills 1991, Internet time synchronization: the Network Time Protocol, IEEE Trans. Communications 39(10).
    """
    there_s = (heard_ns - began_ns) / 1e9
    back_s = (ended_ns - said_ns) / 1e9
    return Offset((there_s - back_s) / 2, max(0.0, (there_s + back_s) / 2))


def answer(text: bytes, heard_ns: int) -> dict[str, Any]:
    """Carry out the request of another host's doctor, and return the answer.

    Args:
        text: the request as JSON.
        heard_ns: the time on this host's clock when it came, in nanoseconds.

    Raises:
        UsageError: the request can't be read.
    """
    try:
        request = parse_json(text, "the request", _REQUEST)
        kind = request["kind"]
        if kind == "look":
            host = look(_question(request["question"])).to_json()
            # The clock is read last: looking takes seconds, which are no part of the way back.
            return {"facts": host, "heard_ns": heard_ns, "said_ns": time.time_ns()}
        if kind == "meet":
            seats = [ReachableHost(**seat) for seat in request["seats"]]
            reached = meet(request["own"], seats, min(request["seconds"], _LONGEST_MEET_S))
            marker = request["marker"]
            has_marker = bool(marker) and marker_path(request["folder"], marker).exists()
            return {"reached": reached, "has_marker": has_marker}
        if kind == "tidy":
            marker_path(request["folder"], request["marker"]).unlink(missing_ok=True)
            return {}
        raise ValueError(f"the kind {kind!r}")
    except (ValueError, KeyError, TypeError, StopIteration, OSError) as error:  # OSError: a path too long
        problem = f"it can't be read ({reason_of(error)})"
        fix = "install one version of Paceline on all hosts"
        raise UsageError("can't answer another host's doctor", problem, fix) from None


def _question(value: Mapping[str, Any]) -> Question:
    return Question(
        names=tuple(value["names"]),
        runs=value["runs"],
        ports=tuple(value["ports"]),
        is_quick=value["is_quick"],
        marker=value["marker"],
    )
