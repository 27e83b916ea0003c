"""Start ranks on a host for the supervisor, report their starts, ends and output, and signal them.

A `LocalBackend` has the fork server of this host. A `RemoteBackend` has an agent on another, reached over ssh's
standard input and output: nothing listens for it, and when the connection ends the agent ends the ranks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from paceline.launch.local import ForkServer, RankSettings, start_ranks
from paceline.launch.process_template import Start
from paceline.nouns.errors import PacelineError, ReadError
from paceline.nouns.reading import COUNT, Whole, parse_json, parse_whole
from paceline.run.failures import EXITED_EARLY, lost_host, lost_server

HEARTBEAT_S = 2.0  # the time between two heartbeats to an agent, which ends its ranks after LEASE_S without one
MOST_BYTES = 2**20  # the longest line of a rank: without line ends its output must not fill our memory
MOST_MESSAGE_BYTES = 2 * MOST_BYTES  # the longest line of JSON that carries one: base64 makes 4 bytes of 3
_ERROR = {"error": {"asked": str, "found": str, "fix": str}}
# An agent's first message, and then its messages, a line each; see `run/supervise/agent.py`.
_ANSWER = (_ERROR, {"address": str, "port": Whole(0, 65535), "interface": str})
_AGENT_MESSAGES = (
    {"started": {str: COUNT}},
    {"output": COUNT, "text": str},
    {"ended": COUNT, "status": Whole(-64, EXITED_EARLY)},  # below 0: a signal
    {"error": {str: str}},
)
Listen = Callable[[int, Callable[[], bool]], None]  # a descriptor, and the function that reads it: False at its end


class HostEvents(Protocol):
    """The receiver of a host's events: the supervisor, or an agent that passes them on."""

    def on_started(self, pids: dict[int, int]) -> None:
        """Take in that ranks have been started; `pids` has their processes by rank."""

    def on_ended(self, rank: int, status: int) -> None:
        """Take in that a rank has ended with an exit code; below 0 the signal."""

    def on_output(self, rank: int, text: str) -> None:
        """Take in a line that a rank has written."""

    def on_lost(self, backend: HostBackend) -> None:
        """Take in that the fork server or the connection has ended; the ranks end with it."""


class HostBackend(Protocol):
    """The backend of one host: it starts, signals and kills the ranks there."""

    @property
    def host(self) -> str:
        """Return the host's name; "" is this host."""

    def start(self, settings: RankSettings) -> None:
        """Start the host's ranks."""

    def listen(self, register: Listen, events: HostEvents) -> None:
        """Register the descriptors to read, and the function that reads each."""

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Signal ranks."""

    def kill(self) -> None:
        """Kill the host's ranks and all processes that they started."""

    def restart(self, rank: int) -> None:
        """Start a rank again."""

    def finish(self) -> None:
        """Let the host's fork server end: all ranks have ended, and none will be started again."""

    def heartbeat(self, now_s: float) -> None:
        """Send a sign of life to the host now and then."""

    def close(self) -> int:
        """Wait for the host's end, and return the exit code of the fork server or of ssh."""

    def failure(self, status: int, at: float) -> dict[str, Any]:
        """Return the failure to report when the host was lost.

        Args:
            status: the exit code that `close` returned.
            at: the time at which that was heard, in seconds since the epoch.
        """


class LocalBackend:
    """The backend of this host."""

    def __init__(self, host: str = "", start: Start = subprocess.Popen) -> None:
        self.host = host
        self.start_process = start
        self.server: ForkServer | None = None
        self.has_started = False
        self.pids: dict[int, int] = {}

    def start(self, settings: RankSettings) -> None:
        """Start the host's ranks."""
        self.server = start_ranks(settings, self.start_process)

    def listen(self, register: Listen, events: HostEvents) -> None:
        """Register the fork server's messages and the ranks' output."""
        assert self.server is not None
        self.events = events
        for rank, output in self.server.outputs.items():
            register(output, _Reader(output, partial(events.on_output, rank), partial(os.close, output)))
        control = self.server.control.fileno()
        register(control, _Reader(control, self._take_message, lambda: events.on_lost(self)))

    def _take_message(self, text: str) -> None:
        message = json.loads(text)  # trusted: the fork server is our own child
        if "started" in message:
            self.has_started = True
            self.pids = {int(rank): pid for rank, pid in message["started"].items()}
            self.events.on_started(dict(self.pids))
        elif "restarted" in message:
            self.pids[message["restarted"]] = message["pid"]
            self.events.on_started({message["restarted"]: message["pid"]})
        else:
            self.pids.pop(message["ended"], None)
            self.events.on_ended(message["ended"], message["status"])

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Signal ranks."""
        for rank in ranks:
            if rank in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], number)

    def kill(self) -> None:
        """Kill the ranks and all processes that they started; before there is one, the fork server."""
        if self.server is not None and not self.has_started:
            self.server.process.kill()
        # Each rank leads a process group of its own, to which its data loader's workers belong.
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def restart(self, rank: int) -> None:
        """Start a rank again."""
        assert self.server is not None
        with contextlib.suppress(BrokenPipeError):
            self.server.control.sendall(json.dumps({"restart": rank}).encode() + b"\n")

    def finish(self) -> None:
        """Let the fork server end; in a job without parameter servers it does so by itself."""
        assert self.server is not None
        with contextlib.suppress(OSError):
            self.server.control.shutdown(socket.SHUT_WR)

    def heartbeat(self, now_s: float) -> None:
        """Do nothing: the fork server sees the supervisor's end by itself."""

    def close(self) -> int:
        """Wait for the fork server's end, and return its exit code."""
        if self.server is None:
            return 0
        self.server.control.close()  # the end that the fork server waits for
        return self.server.process.wait()

    def failure(self, status: int, at: float) -> dict[str, Any]:
        """Return the failure for the end of the fork server."""
        return lost_server(status, at)


class RemoteBackend:
    """The backend of another host, which an agent serves.

    Args:
        host: the name of the host.
        command: the command line that starts the agent there.
        request: the first message to the agent: see `run/supervise/agent.py`.
    """

    def __init__(self, host: str, command: Sequence[str], request: dict[str, Any]) -> None:
        self.host = host
        self.processes: tuple[int, ...] = (0,)
        # The certificates that go there before the start, by role: see server/transport/credentials.py.
        self.credentials: dict[str, dict[str, str]] = {}
        # A new session: Ctrl-C in the terminal would end ssh, and the host's ranks with it, before they could save.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self.errors = b""
        self.beat_s = float("-inf")
        assert self.process.stdout is not None
        self.lines = Lines(self.process.stdout.fileno(), MOST_MESSAGE_BYTES)
        self.send(request)

    def answer(self) -> dict[str, Any] | None:
        """Read the agent's first message, if it has been written by now. Wait only for the first bytes.

        Return None where it is not complete yet, or, with `lines.is_over`, where ssh or the agent has ended.

        Raises:
            PacelineError: the agent says what is wrong with its host.
        """
        for line in self.lines.read():
            try:
                message = parse_json(line, "an agent's answer", _ANSWER)
            except ReadError:
                continue  # a login shell may greet first
            if "error" in message:
                error = message["error"]
                raise PacelineError(f"{error['asked']} on {self.host}", error["found"], error["fix"])
            return dict(message)
        return None

    def last_words(self) -> str:
        """Return the standard error of ssh or the agent, once it has ended."""
        assert self.process.stderr is not None
        descriptor = self.process.stderr.fileno()
        # Not `read`: what ssh started, such as a ProxyCommand, may live on and hold the other end.
        while select.select([descriptor], [], [], 0.5)[0] and (content := os.read(descriptor, 2**16)):
            self.errors += content
        return self.errors.decode(errors="replace")

    def failure(self, status: int, at: float) -> dict[str, Any]:
        """Return the failure for the end of the connection, with the last line of ssh or the agent."""
        lines = self.errors.decode(errors="replace").strip().splitlines() or [""]
        return lost_host(self.host, lines[-1], at)

    def start(self, settings: RankSettings) -> None:
        """Start the host's ranks."""
        self.processes = settings.processes
        if self.credentials:  # before the start: servers read their certificates when they begin
            self.send({"credentials": self.credentials})
        self.send({"start": settings.to_json()})

    def listen(self, register: Listen, events: HostEvents) -> None:
        """Register the agent's messages."""
        self.events = events
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out = self.process.stdout.fileno()
        err = self.process.stderr.fileno()
        register(out, _Reader(out, self._take_message, lambda: events.on_lost(self), self.lines))
        register(err, _Reader(err, self._take_error, lambda: None))

    def _take_message(self, line: str) -> None:
        # What another host says is checked against its form, and is only believed of that host's own ranks.
        try:
            message = parse_json(line, "an agent's line", _AGENT_MESSAGES)
            if "started" in message:
                pids = {}
                for rank, pid in message["started"].items():
                    pids[self._checked(parse_whole(rank))] = pid
                self.events.on_started(pids)
            elif "output" in message:
                text = base64.b64decode(message["text"]).decode(errors="replace")
                self.events.on_output(self._checked(message["output"]), text)
            elif "ended" in message:
                self.events.on_ended(self._checked(message["ended"]), message["status"])
            elif "error" in message:
                self._take_error(": ".join(message["error"].values()))
        except ValueError:  # also a line that is no message: a login shell or ssh may write some
            self._take_error(line)

    def _checked(self, rank: int | None) -> int:
        """Return the rank; raise ValueError unless it is one of this host's."""
        if rank not in self.processes or rank is None:
            raise ValueError(rank)
        return rank

    def _take_error(self, text: str) -> None:
        self.errors += text.encode() + b"\n"
        self.events.on_output(self.processes[0], f"({self.host}) {text}")

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Signal ranks."""
        self.send({"signal": number, "ranks": list(ranks)})

    def kill(self) -> None:
        """Kill the host's ranks and all processes that they started."""
        self.send({"kill": True})

    def restart(self, rank: int) -> None:
        """Start a rank again."""
        self.send({"restart": rank})

    def finish(self) -> None:
        """Let the host's fork server end."""
        self.send({"over": True})

    def heartbeat(self, now_s: float) -> None:
        """Send a sign of life: without one for some time the agent ends the ranks, see `run/supervise/agent.py`."""
        if now_s - self.beat_s > HEARTBEAT_S:
            self.beat_s = now_s
            self.send({"beat": True})

    def send(self, message: dict[str, Any]) -> None:
        """Send the agent a line; where it has gone, the end of its output says so."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def close(self, patience_s: float = 10.0) -> int:
        """Let the agent end its ranks, and wait for it. Return ssh's exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:  # a host that stands still: its own sshd ends the agent
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()
        finally:
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()


class Lines:
    """Split the bytes from a descriptor into lines; of a line above `most_bytes` the end is kept."""

    def __init__(self, descriptor: int, most_bytes: int = MOST_BYTES) -> None:
        self.descriptor = descriptor
        self.most_bytes = most_bytes
        self.unfinished = b""  # the bytes since the last end of a line
        self.is_over = False

    def read(self) -> list[str]:
        """Return the lines that are there; wait for the first bytes."""
        try:
            content = os.read(self.descriptor, 2**16)  # as much as a Linux pipe holds
        except (ConnectionResetError, OSError):
            content = b""
        *lines, self.unfinished = (self.unfinished + content).split(b"\n")
        if b"\r" in self.unfinished:  # a bar that is drawn anew: only its last state
            self.unfinished = self.unfinished[self.unfinished.rstrip(b"\r").rfind(b"\r") + 1 :]
        lines = [line[-self.most_bytes :] for line in lines]
        self.unfinished = self.unfinished[-self.most_bytes :]
        self.is_over = not content
        if self.is_over and self.unfinished:
            lines = [self.unfinished]
            self.unfinished = b""
        return [line.decode(errors="replace") for line in lines]


class _Reader:
    """Hands on the lines of a descriptor, and says when it has ended."""

    def __init__(
        self, descriptor: int, take: Callable[[str], None], over: Callable[[], None], lines: Lines | None = None
    ) -> None:
        self.lines = lines or Lines(descriptor)
        self.take = take
        self.over = over

    def __call__(self) -> bool:
        for line in self.lines.read():
            self.take(line)
        if self.lines.is_over:
            self.over()
        return not self.lines.is_over


class Listening:
    """The descriptors of some host backends in one selector."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.open: set[int] = set()

    def register(self, descriptor: int, read: Callable[[], bool]) -> None:
        """Read this descriptor too."""
        self.open.add(descriptor)
        self.selector.register(descriptor, selectors.EVENT_READ, read)

    def turn(self, seconds: float) -> None:
        """Read the bytes that are there, or come within `seconds`."""
        for key, _ in self.selector.select(seconds):
            if not key.data():
                self.selector.unregister(key.fd)
                self.open.discard(key.fd)

    def close(self) -> None:
        """Close the selector."""
        self.selector.close()
