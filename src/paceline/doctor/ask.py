"""Asks the hosts of a fleet what they are, and answers when another host asks.

A request and its answer are one JSON object each, over the standard input and output of `paceline doctor --answer`,
started here or by the user's own ssh. In the first round a host looks at itself; in the second all hosts try to
reach each other at the same time; a third removes the file by which a shared run directory is known.
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

from paceline.doctor.checks.network import chosen_address
from paceline.doctor.facts import HostFacts
from paceline.doctor.meet import ReachableHost, meet
from paceline.doctor.probe.disk import marker_path
from paceline.doctor.probe.host import Question, look
from paceline.launch.ssh import SshOptions, ssh_command, why_lost
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.reading import Whole, parse_json, reason_of

_ANSWER = ("-m", module_names.COMMAND, "doctor", "--answer")
_LIMIT_S = 240.0  # of one answer: torch may come from a slow disk
_MAX_BYTES = 2**22  # of an answer: a host sends some kilobytes
_MEET_S = 10.0  # hosts start within some seconds of each other
_LONGEST_MEET_S = 60.0  # whatever is asked: a port is not left open
_AT_ONCE = 32  # ssh's at a time


class Asker(Protocol):
    """Reaches the doctor of a host."""

    def ask(self, host: str, request: bytes) -> bytes:
        """The answer to a request.

        Raises:
            UsageError: the host can't be asked.
        """


class LocalAsker:
    """Asks this host, whatever its name, through a child process as ssh would start it."""

    def ask(self, host: str, request: bytes) -> bytes:
        """The answer of a child process."""
        return _answer_of([sys.executable, *_ANSWER], host, request, is_ssh=False)


@dataclass(frozen=True, slots=True)
class SshAsker:
    """Asks through the user's own ssh; this host itself is asked without it.

    Args:
        python: the Python that has Paceline, on every host.
        options: how ssh is called.
    """

    python: str = sys.executable
    options: SshOptions = field(default_factory=SshOptions)

    def needs_ssh(self, host: str) -> bool:
        """Whether a host is another one."""
        return not is_this_host(host)

    def ask(self, host: str, request: bytes) -> bytes:
        """The answer of the doctor on `host`."""
        if not self.needs_ssh(host):
            return LocalAsker().ask(host, request)
        return _answer_of(ssh_command(host, [self.python, *_ANSWER], self.options), host, request, is_ssh=True)


def is_this_host(name: str) -> bool:
    """Whether a name is this host's own, as hosts files of one host have it."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


def _answer_of(command: list[str], host: str, request: bytes, is_ssh: bool) -> bytes:
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        found = f"it did not answer within {_LIMIT_S:.0f} s"
        raise UsageError(f"to ask {host}", found, f"see what `paceline doctor` waits for on {host}") from None
    except OSError as error:
        raise UsageError(f"to ask {host}", f"{command[0]} can't be started ({error})", "install it") from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace")
    if is_ssh:
        raise why_lost(host, said)
    last = (said.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    raise UsageError(f"to ask {host}", f"its process failed: {last}", "run `paceline doctor` there")


_PORT = Whole(0, 65535)
# What another host's doctor asks of this one.
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
    """How far a host's clock is ahead of the asking host's, in seconds, and by how much that may be wrong."""

    seconds: float
    uncertainty_s: float


@dataclass(slots=True)
class FleetFacts:
    """What the hosts of a fleet answered.

    Args:
        hosts: the facts of those that answered.
        silent: why the others did not.
        offsets: of their clocks.
        reached: by host, what happened as it tried to reach each other one; "" is reached.
        marker: by host, whether it sees the file that the first host wrote to the run directory.
        ports: where each host listened: "address:port".
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
    """Ask every host what it is, then let all of them reach each other.

    Args:
        names: the hosts.
        question: what each looks at. With a marker, the first host that answers leaves it in the run directory.
        asker: the way to them.
        say: told what happens, for the person who waits.
        meet_s: how long hosts try to reach each other.
    """
    fleet = FleetFacts()
    say(f"asking {len(names)} hosts what they are")
    answers = _ask_all({name: _look_request(question, name == names[0]) for name in names}, asker, fleet)
    for name, (answer, began_ns, ended_ns) in answers.items():
        try:
            fleet.hosts[name] = HostFacts.from_json(answer.get("facts"))
            fleet.offsets[name] = clock_offset(
                began_ns, _integer(answer, "heard_ns"), _integer(answer, "said_ns"), ended_ns
            )
        except ValueError as error:
            fleet.hosts.pop(name, None)
            fleet.silent[name] = _nonsense(name, str(error))
    seats = _seats(fleet)
    if len(seats) > 1:
        fleet.ports = {seat.host: f"{seat.address}:{seat.port}" for seat in seats}
        say(f"each host listens on one port for up to {meet_s:.0f} s, and the others try to reach it")
        first = fleet.hosts.get(names[0], HostFacts()).runs
        marker = question.marker if first.path and not first.error else ""  # else the first host could not write it
        _let_meet(fleet, seats, (first.path, marker), asker, meet_s)
    if question.marker and names[0] in fleet.hosts:
        tidy = {"kind": "tidy", "folder": fleet.hosts[names[0]].runs.path, "marker": question.marker}
        _ask_all({names[0]: tidy}, asker, FleetFacts())
    return fleet


def _look_request(question: Question, is_first: bool) -> dict[str, Any]:
    marker = question.marker if is_first else ""
    return {"kind": "look", "question": {**asdict(question), "marker": marker}}


def _seats(fleet: FleetFacts) -> list[ReachableHost]:
    seats = []
    for name, facts in fleet.hosts.items():
        address = chosen_address(facts)
        if address and facts.network.free_port:
            seats.append(ReachableHost(name, address, facts.network.free_port, secrets.token_hex(16)))
    return seats


def _let_meet(
    fleet: FleetFacts, seats: list[ReachableHost], runs: tuple[str, str], asker: Asker, meet_s: float
) -> None:
    folder, marker = runs
    request = {"kind": "meet", "seats": [asdict(seat) for seat in seats], "seconds": meet_s}
    requests = {seat.host: {**request, "own": seat.host, "folder": folder, "marker": marker} for seat in seats}
    late = FleetFacts()
    for name, (answer, _, _) in _ask_all(requests, asker, late).items():
        reached = answer.get("reached")
        if isinstance(reached, dict):
            fleet.reached[name] = {str(other): str(why) for other, why in reached.items()}
        if marker and isinstance(answer.get("has_marker"), bool):
            fleet.marker[name] = answer["has_marker"]
    fleet.silent.update(late.silent)


def _ask_all(
    requests: Mapping[str, dict[str, Any]], asker: Asker, fleet: FleetFacts
) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Each host's answer, with this host's clock before and after (ns since 1970); failures go to `fleet.silent`."""

    def ask(name: str) -> tuple[dict[str, Any], int, int]:
        request = json.dumps(requests[name]).encode()
        began_ns = time.time_ns()
        text = asker.ask(name, request)
        return _parse(name, text), began_ns, time.time_ns()

    answers = {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(requests))) as pool:
        for name, future in {name: pool.submit(ask, name) for name in requests}.items():
            try:
                answers[name] = future.result()
            except PacelineError as error:
                fleet.silent[name] = error
    return answers


def _parse(name: str, text: bytes) -> dict[str, Any]:
    if len(text) > _MAX_BYTES:
        raise _nonsense(name, f"{len(text)} bytes")
    try:
        lines = text.decode().strip().splitlines() or [""]
        return dict(parse_json(lines[-1], "its answer", dict))  # a login may greet before it
    except ValueError as error:
        raise _nonsense(name, reason_of(error)) from None


def _nonsense(name: str, what: str) -> UsageError:
    return UsageError(
        f"to ask {name}", f"its answer can't be read ({what})", f"install this version of Paceline on {name}"
    )


def _integer(answer: Mapping[str, Any], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise ValueError(f"{name} should be a number")
    return value


def clock_offset(began_ns: int, heard_ns: int, said_ns: int, ended_ns: int) -> Offset:
    """How far the other clock is ahead. It lies between the two ways; their middle may be wrong by half their sum.

    Args:
        began_ns: this host's clock as the question left.
        heard_ns: the other's as it came.
        said_ns: the other's as the answer left.
        ended_ns: this host's as it came.

    Source: Mills 1991, Internet time synchronization: the Network Time Protocol, IEEE Trans. Communications 39(10).
    """
    there, back = (heard_ns - began_ns) / 1e9, (ended_ns - said_ns) / 1e9
    return Offset((there - back) / 2, max(0.0, (there + back) / 2))


def answer(text: bytes, heard_ns: int) -> dict[str, Any]:
    """Do what another host's doctor asks of this one.

    Args:
        text: its request.
        heard_ns: this host's clock as it came.

    Raises:
        UsageError: the request can't be read.
    """
    try:
        request = parse_json(text, "the request", _REQUEST)
        kind = request["kind"]
        if kind == "look":
            facts = look(_question(request["question"])).to_json()
            return {"facts": facts, "heard_ns": heard_ns, "said_ns": time.time_ns()}
        if kind == "meet":
            reached = meet(
                request["own"],
                [ReachableHost(**seat) for seat in request["seats"]],
                min(request["seconds"], _LONGEST_MEET_S),
            )
            marker = request["marker"]
            return {"reached": reached, "has_marker": bool(marker) and marker_path(request["folder"], marker).exists()}
        if kind == "tidy":
            marker_path(request["folder"], request["marker"]).unlink(missing_ok=True)
            return {}
        raise ValueError(f"the kind {kind!r}")
    except (ValueError, KeyError, TypeError, StopIteration, OSError) as error:  # OSError: a path too long
        found = f"it can't be read ({reason_of(error)})"
        raise UsageError(
            "a request of another host's doctor", found, "install one version of Paceline on all hosts"
        ) from None


def _question(value: Mapping[str, Any]) -> Question:
    names, ports = tuple(value["names"]), tuple(value["ports"])
    return Question(names, value["runs"], ports, value["is_quick"], value["marker"])
