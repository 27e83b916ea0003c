"""Serve the ranks of one host for a supervisor on another. `python -m paceline.run.supervise.agent`, over ssh.

It hears lines of JSON on its standard input and answers on its standard output; it listens nowhere. When the input
ends, the supervisor or the way to it has gone: the ranks are killed, and nothing is left behind.

    in   {"run_dir", "token", "script", "cwd", "environment", "interface", "others", "is_head", "has_servers"}  first
    out  {"address", "port", "interface"} or {"error": {"asked", "found", "fix"}}
    in   {"credentials": {role: {file: text}}}   {"start": RankSettings}
    in   {"signal": N, "ranks": [...]}   {"kill": true}   {"restart": rank}   {"over": true}
    out  {"started": {rank: pid}}  {"ended": rank, "status": N}    {"output": rank, "text": base64}
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from paceline.launch.local import RankSettings
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.reading import Whole, parse_json, read_text
from paceline.rendezvous.interfaces import (
    CAN_SHARE,
    address_of,
    address_towards,
    interface_of,
    open_listener,
    reserve_port,
)
from paceline.run.private import make_private
from paceline.run.supervise.host_backend import MOST_MESSAGE_BYTES, HostBackend, Lines, Listening, LocalBackend
from paceline.server.transport.credentials import keep_credentials

# The supervisor can't tell a dead host from one that it only can't reach. So ranks live for a lease after its last
# sign, and no others start in their place before the lease has ended: else two generations could write checkpoints.
LEASE_S = 20.0  # ten heartbeats of `host_backend.HEARTBEAT_S`
OUTLIVED_S = LEASE_S + 2.0  # as the supervisor's clock counts it, which may run faster than the agent's

HELD_S = 3.0  # seconds to wait for output after the fork server has ended
END_S = 5.0  # seconds to wait until the last messages have been taken
# The supervisor's messages, a line each.
_SUPERVISOR_MESSAGES = (
    {
        "token": str,
        "run_dir": str,
        "script": str,
        "cwd": str,
        "environment": {str: str},
        "interface": (str, None),
        "others": [str],
        "is_head": bool,
        "has_servers": bool,
    },
    {"credentials": {str: {str: str}}},
    {"start": str},
    {"signal": Whole(1, 64), "ranks": [int]},
    {"kill": bool},
    {"restart": int},
    {"over": bool},
    {"beat": bool},
)
MOST_WAITING = 2**16  # lines that nobody takes; what ranks write after that is left out


class AgentWriter:
    """Write standard output from a thread of its own.

    If the connection takes nothing more, the pipe to sshd fills up and a write blocks. In the agent's main thread that
    would keep the lease from being looked at, and the ranks would live on.
    """

    def __init__(self) -> None:
        # Without a maximum: `put` must never block. `say` bounds it.
        self.waiting: queue.Queue[str | None] = queue.Queue()
        self.is_broken = False
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def say(self, line: str) -> None:
        """Queue a line. Output is dropped when too much is waiting; starts, ends and errors never are."""
        if self.waiting.qsize() < MOST_WAITING or not line.startswith('{"output"'):
            self.waiting.put(line)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for the messages that are still to be sent."""
        self.waiting.put(None)
        self.thread.join(seconds)

    def _write(self) -> None:
        try:
            while (line := self.waiting.get()) is not None:
                print(line, flush=True)
        except (BrokenPipeError, OSError):
            self.is_broken = True


class Agent:
    """One host's part of one generation of a job.

    It is to its ranks what the supervisor is on one host: it has a `LocalBackend`, whose events it passes on.
    """

    def __init__(self) -> None:
        self.backend = LocalBackend()
        self.listening = Listening()
        self.listener: socket.socket | None = None
        self.private = make_private()
        self.lines = Lines(sys.stdin.fileno(), MOST_MESSAGE_BYTES)
        self.has_started = self.is_over = self.has_lost = False
        self.writer = AgentWriter()
        self.heard_s = time.monotonic()  # any line renews the lease, not only a heartbeat

    def run(self) -> int:
        """Serve until the ranks have ended, or the supervisor has gone."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The end of the input tells the agent to end. A handler, not SIG_IGN: "ignore" would be inherited by the
            # ranks through exec, while a handler is reset to the default there.
            signal.signal(number, lambda *_: None)
        try:
            self.listening.register(sys.stdin.fileno(), self._hear)
            while not self.is_over and not self._is_lease_over():
                self.listening.turn(1.0)
            if self._is_lease_over():
                self._say_error("the supervisor's signs of life", f"none came for {LEASE_S:g} s", "its ranks are ended")
            self._end()
        finally:
            self.private.remove()
        return 0

    def _end(self) -> None:
        """Kill all ranks until nothing is left: those that are only about to start, too."""
        deadline = None
        while self.listening.open - {sys.stdin.fileno()}:
            self.backend.kill()  # in every turn: the fork server may have reported a rank only now
            if not self.backend.pids:
                self.backend.finish()  # a fork server of a job with parameter servers waits for the word
            self.listening.turn(0.2)
            if self.has_lost and deadline is None:
                deadline = time.monotonic() + HELD_S
            if deadline is not None and time.monotonic() > deadline:
                break  # something that a rank has left behind holds its output
        self.backend.close()
        self.writer.close(END_S)

    def _is_lease_over(self) -> bool:
        """Return True if no line came for so long that other ranks may have been started in place of these."""
        return self.has_started and time.monotonic() - self.heard_s > LEASE_S

    def _hear(self) -> bool:
        self.heard_s = time.monotonic()
        for line in self.lines.read():
            try:
                self._obey(parse_json(line, "the supervisor's line", _SUPERVISOR_MESSAGES))
            except PacelineError as error:
                self._say_error(error.asked, error.found, error.fix)
                self.is_over = True
        # End-of-file: the supervisor has ended, or the connection. Either way the ranks are ended.
        self.is_over = self.is_over or self.lines.is_over
        return not self.lines.is_over

    def _obey(self, message: dict[str, Any]) -> None:
        if "token" in message:
            self._say(self._prepare(message))
        elif "start" in message:
            self._start(RankSettings.from_json(message["start"]))
        elif "kill" in message:
            self.backend.kill()
        elif "signal" in message:
            self.backend.signal(message["ranks"], message["signal"])
        elif "restart" in message:
            self.backend.restart(message["restart"])
        elif "over" in message:
            self.backend.finish()
        elif "credentials" in message:
            self.has_started = True  # the lease runs as soon as keys are here
            keep_credentials(self.private.path, message["credentials"])

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check that this host sees the same files, and return its address.

        Raises:
            UsageError: the script or the run directory is not the supervisor's.
        """
        os.environ.update(request["environment"])
        with contextlib.suppress(OSError):
            os.chdir(request["cwd"])
        if not Path(request["script"]).is_file():
            raise UsageError(
                f"the file {request['script']}", "it is not there", "keep the code in a folder that all hosts share"
            )
        # A path of the same name proves nothing: each host may have its own. The token was written by the supervisor a
        # moment ago, so who reads it sees the same folder.
        token = Path(request["run_dir"], f".token-{request['token'][:8]}")
        if not token.is_file() or read_text(token) != request["token"]:
            raise UsageError(
                f"the run directory {request['run_dir']}",
                "it is not the one that the supervisor made",
                "name one with --runs on a file system that all hosts share",
            )
        address = own_address(request)
        port = 0
        if request["is_head"]:
            # The socket is opened, or the port reserved, before any rank starts anywhere: a port that was free a moment
            # ago may be taken by the time rank 0 wants it.
            self.listener = reserve_port(address) if request["has_servers"] else open_listener(address, 0)
            port = self.listener.getsockname()[1]
        return {"address": address, "port": port, "interface": interface_of(address) or ""}

    def _start(self, settings: RankSettings) -> None:
        rendezvous = settings.rendezvous
        if self.listener is not None and not settings.servers:
            # Rank 0 inherits the listening socket for its TCPStore; `detach` keeps it open without an owner here.
            rendezvous = dataclasses.replace(rendezvous, listener=self.listener.detach())
            self.listener = None
        elif self.listener is not None and not CAN_SHARE:  # else it is kept: their coordinator may be started again
            self.listener.close()
        self.backend.start(
            dataclasses.replace(
                settings, private=str(self.private.path), lock=self.private.lock, rendezvous=rendezvous, run_lock=-1
            )
        )
        self.backend.listen(self.listening.register, self)
        self.has_started = True

    def _say(self, message: dict[str, Any]) -> None:
        self.writer.say(json.dumps(message))
        self.is_over = self.is_over or self.writer.is_broken

    def _say_error(self, asked: str, found: str, fix: str) -> None:
        self._say({"error": {"asked": asked, "found": found, "fix": fix}})

    # --- HostEvents

    def on_started(self, pids: dict[int, int]) -> None:
        """Pass the event on."""
        self._say({"started": pids})

    def on_ended(self, rank: int, status: int) -> None:
        """Pass the event on."""
        self._say({"ended": rank, "status": status})

    def on_output(self, rank: int, text: str) -> None:
        """Pass the event on, in base64: a rank may write any bytes."""
        self._say({"output": rank, "text": base64.b64encode(text.encode()).decode()})

    def on_lost(self, backend: HostBackend) -> None:
        """End: the fork server has ended, so there is nothing more to do here."""
        self.is_over = self.has_lost = True
        if self.backend.pids:
            self._say_error("the fork server should live as long as its ranks", "it has ended", "see `dmesg` there")


def own_address(request: dict[str, Any]) -> str:
    """Return the address at which the job's other hosts reach this one.

    It is the one of the interface that was asked for; else the one that ssh came to; where ssh came over loopback,
    the one on the way to another host.
    """
    if request["interface"]:
        return address_of(request["interface"])
    connection = os.environ.get("SSH_CONNECTION", "").split()
    # The client's address and port, then the server's.
    came_to = connection[2] if len(connection) == 4 else "127.0.0.1"
    if not came_to.startswith("127.") and ":" not in came_to:
        return came_to
    other_hosts = [host.rpartition("@")[2] for host in request["others"]]
    return address_towards(other_hosts[0]) if other_hosts else "127.0.0.1"


if __name__ == "__main__":
    status = Agent().run()
    sys.stderr.flush()
    os._exit(status)  # a thread may still wait for a connection that takes nothing
