"""The ranks of one host for a supervisor on another. `python -m paceline.run.agent`, started over ssh.

It hears lines of JSON on its standard input and answers on its standard output; it listens nowhere. When the input
ends, the supervisor or the way to it has gone: the ranks are killed, and nothing is left behind.

    in   {"run_dir", "token", "script", "cwd", "environment", "interface", "others", "is_head"}   first
    out  {"address", "port", "interface"} or {"error": {"asked", "found", "fix"}}
    in   {"start": RankSettings}   {"signal": N, "ranks": [...]}   {"kill": true}
    out  {"started": {rank: pid}}  {"ended": rank, "status": N}    {"output": rank, "text": base64}
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.comm.interfaces import address_of, address_towards, interface_of, open_listener
from paceline.launch.local import RankSettings
from paceline.nouns.errors import PacelineError, UsageError
from paceline.run.station import Lines, Listening, LocalStation, Station

LEASE_S = 20.0  # the ranks' life after the supervisor's last sign; none starts in their place before it has ended


class Agent:
    """One host's part of one generation of a job."""

    def __init__(self) -> None:
        self.station = LocalStation()
        self.listening = Listening()
        self.listener: socket.socket | None = None
        self.private = tempfile.mkdtemp(prefix="paceline-")
        self.lines = Lines(sys.stdin.fileno())
        self.has_started = self.is_over = False
        self.heard_s = time.monotonic()

    def run(self) -> int:
        """Serve until the ranks have ended, or the supervisor has gone."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the end of the input says it
        try:
            self.listening.register(sys.stdin.fileno(), self._hear)
            while not self.is_over and not self._is_alone():
                self.listening.turn(1.0)
            self.station.kill()
            while self.listening.open - {sys.stdin.fileno()}:
                self.listening.turn(1.0)
            self.station.close()
        finally:
            shutil.rmtree(self.private, ignore_errors=True)
        return 0

    def _is_alone(self) -> bool:
        """Whether the supervisor has not been heard for so long that it may have started others in these' place."""
        return self.has_started and time.monotonic() - self.heard_s > LEASE_S

    def _hear(self) -> bool:
        self.heard_s = time.monotonic()
        for line in self.lines.read():
            try:
                self._obey(json.loads(line))
            except PacelineError as error:
                self._say({"error": {"asked": error.asked, "found": error.found, "fix": error.fix}})
                self.is_over = True
        self.is_over = self.is_over or self.lines.is_over
        return not self.lines.is_over

    def _obey(self, message: dict[str, Any]) -> None:
        if "token" in message:
            self._say(self._prepare(message))
        elif "start" in message:
            self._start(RankSettings.from_json(message["start"]))
        elif "kill" in message:
            self.station.kill()
        elif "signal" in message:
            self.station.signal(message["ranks"], message["signal"])

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Look whether this host sees the same files, and find its address."""
        os.environ.update(request["environment"])
        with contextlib.suppress(OSError):
            os.chdir(request["cwd"])
        if not Path(request["script"]).is_file():
            raise UsageError(
                f"the file {request['script']}", "it is not there", "keep the code in a folder that all hosts share"
            )
        token = Path(request["run_dir"], ".token")
        if not token.is_file() or token.read_text() != request["token"]:
            raise UsageError(
                f"the run directory {request['run_dir']}",
                "it is not the one that the supervisor made",
                "name one with --runs on a file system that all hosts share",
            )
        address = own_address(request)
        port = 0
        if request["is_head"]:
            self.listener = open_listener(address, 0)
            port = self.listener.getsockname()[1]
        return {"address": address, "port": port, "interface": interface_of(address) or ""}

    def _start(self, settings: RankSettings) -> None:
        meeting = settings.meeting
        if self.listener is not None:
            meeting = dataclasses.replace(meeting, listener=self.listener.detach())
            self.listener = None
        self.station.start(dataclasses.replace(settings, private=self.private, meeting=meeting))
        self.station.listen(self.listening.register, self)
        self.has_started = True

    def _say(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), flush=True)
        except BrokenPipeError:
            self.is_over = True

    # --- station.Hearer

    def on_started(self, pids: dict[int, int]) -> None:
        """Pass it on."""
        self._say({"started": pids})

    def on_ended(self, rank: int, status: int) -> None:
        """Pass it on."""
        self._say({"ended": rank, "status": status})

    def on_output(self, rank: int, text: str) -> None:
        """Pass it on; a rank may write any bytes."""
        self._say({"output": rank, "text": base64.b64encode(text.encode()).decode()})

    def on_lost(self, station: Station) -> None:
        """The fork server has ended: so has the work here."""
        self.is_over = True


def own_address(request: dict[str, Any]) -> str:
    """The address at which the job's other hosts reach this one.

    It is the one of the interface that was asked for; else the one that ssh came to; where ssh came over loopback,
    the one on the way to another host.
    """
    if request["interface"]:
        return address_of(request["interface"])
    words = os.environ.get("SSH_CONNECTION", "").split()
    came_to = words[2] if len(words) == 4 else "127.0.0.1"
    if came_to.startswith("127.") or ":" in came_to:
        others = request["others"]
        return address_towards(others[0]) if others else "127.0.0.1"
    return came_to


if __name__ == "__main__":
    sys.exit(Agent().run())
