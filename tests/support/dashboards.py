"""Folders of runs as jobs leave them, and a dashboard's server that shows them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.nouns.plan import Plan

TOKEN = "a-token-of-the-tests"


def step_event(number: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    """Return an event as a job writes it after a step."""
    return {
        "event": "step", "at": 1_790_000_000 + number / 10, "step": number, "position": 32 * number,
        "loss": 3 / number if loss is None else loss, "weight": 32.0, "samples": 32, "seconds": 0.05,
        "sent_bytes": 2**20, "gradient_norm": None, "memory_bytes": 300 * 2**20, **more,
    }  # fmt: skip


def start_event(steps: int, **more: Any) -> dict[str, Any]:
    """Return the first event of a job."""
    return {
        "event": "start", "at": 1_790_000_000.0, "version": 1, "total_steps": steps, "samples": 3200,
        "batch_size": 32, "world_size": 2, **more,
    }  # fmt: skip


def write_events(path: Path, events: list[Any]) -> None:
    """Write events as lines; a text is written as it is."""
    lines = [event if isinstance(event, str) else json.dumps(event) + "\n" for event in events]
    path.write_text("".join(lines))


def make_run(runs: Path, name: str, steps: int = 20, plan: str = "replicate=2", status: str | None = "done") -> Path:
    """Make a run directory with some steps, and a result unless its status is None."""
    folder = runs / name
    folder.mkdir(parents=True)
    Plan.parse(plan).write(folder / "plan.json")
    job = {"version": 1, "script": "/home/ada/train.py", "arguments": ["--lr", "0.1"], "ranks": 2}
    (folder / "job.json").write_text(json.dumps(job))
    write_events(folder / "events.jsonl", [start_event(steps), *(step_event(number) for number in range(1, steps + 1))])
    if status is not None:
        (folder / "result.json").write_text(json.dumps({"status": status}))
    return folder


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answers."""

    status: int
    text: str
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return the JSON that it sends."""
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Server:
    """A dashboard that runs."""

    port: int
    process: subprocess.Popen[str]
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        """Return the address without the token."""
        return f"http://{self.host}:{self.port}"

    def ask(self, path: str, method: str = "GET", token: str | None = TOKEN, **headers: str) -> Answer:
        """Send a request; headers' names have _ in place of -."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request(method, path, headers=given)
            answer = connection.getresponse()
            return Answer(
                answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
            )
        finally:
            connection.close()


@contextmanager
def dashboard(runs: Path, *words: str) -> Iterator[Server]:
    """Serve the dashboard of a folder until the block ends; it must then end by itself at Ctrl-C."""
    command = [sys.executable, "-m", "paceline", "dashboard", str(runs), "--port", "0", *words]
    environment = {**os.environ, "PACELINE_DASHBOARD_TOKEN": TOKEN}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://([\d.]+):(\d+)/\S*\?token=" + TOKEN, line)
        assert found is not None, line + process.stderr.read()
        yield Server(int(found[2]), process, found[1])
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert (process.wait(20), rest) == (0, "")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
