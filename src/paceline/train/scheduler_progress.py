"""Tell the scheduler that runs a job how far it is: Kubeflow Trainer the TrainJob's status, Slurm the job's comment.

Both are sinks (`nouns/sink.py`) of rank 0, made where the scheduler's variables are. What goes wrong in one is reported
once and ends nothing.

Kubeflow Trainer's protocol is KEP-2779 (its feature gate TrainJobStatus is alpha): a POST with a bearer token that
rotates, every five seconds and at the end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import read_text
from paceline.nouns.sink import MakeSink
from paceline.nouns.step_record import elapsed_s

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # a file's path
_TRAINER_EVERY_S = 5.0
_SLURM_EVERY_S = 60.0  # scontrol asks the controller of the whole cluster
_LIMIT_S = 10.0  # of one message
_MOST_METRICS = 256
_SPEED_OVER_S = 5.0  # the shortest time over which the speed is taken
_PREFIX = "paceline"  # Paceline's comments begin so
_OUR_COMMENT = re.compile(rf"{_PREFIX}\b.*: step \d+")
_COMMENT = re.compile(r"(?:^|\s)Comment=(.*?)(?=\s\w+=|$)", re.MULTILINE)  # AdminComment is another
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Progress:
    """How far a job is, by its events."""

    def __init__(self) -> None:
        self.step = 0
        self.total_steps = 0
        self.began: int | None = None  # the first step of this process
        self.last: Mapping[str, Any] = {}  # the newest step's event
        self.passed_s = 0.0  # since the end of the first step
        self.metrics: dict[str, float] = {}
        self.status = "running"

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in an event."""
        kind = event["event"]
        if kind in ("start", "own_batches"):
            self.total_steps = int(event["total_steps"])
        elif kind == "step":
            self.step = int(event["step"])
            if self.began is None:
                self.began = self.step
            else:
                self.passed_s += elapsed_s([self.last, event])
            self.last = event
            self.metrics["loss"] = event["loss"]
        elif kind in ("evaluation", "logged"):
            prefix = "evaluation/" if kind == "evaluation" else ""
            for name, value in event.items():
                if name not in ("event", "step", "epoch", "at") and type(value) in (int, float):
                    self.metrics[f"{prefix}{name}"] = value
        elif kind in ("stopped", "end"):
            self.status = "stopped" if kind == "stopped" or self.status == "stopped" else "done"

    @property
    def percentage(self) -> int | None:
        """Return the share of the job that is done, in percent; None where its length is not known."""
        if not self.total_steps:
            return None
        # Only the end of the file is the end: a loop may evaluate after its last step.
        most = 100 if self.status == "done" else 99
        return min(most, 100 * self.step // self.total_steps)

    @property
    def remaining_s(self) -> int | None:
        """Return the seconds that are left at this process's speed."""
        if self.began is None or not self.total_steps or self.step <= self.began or self.passed_s < _SPEED_OVER_S:
            return None
        remaining = max(self.total_steps - self.step, 0)
        return math.ceil(self.passed_s / (self.step - self.began) * remaining)


class _Scheduler:
    """A sink that sends the progress from time to time, and at the end.

    Args:
        every_s: the seconds between two messages.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.sent_s = -math.inf
        self.progress = Progress()

    def write(self, event: Mapping[str, Any]) -> None:
        """Take in an event; send where it is time."""
        self.progress.take(event)
        if time.monotonic() - self.sent_s >= self.every_s and self.progress.step:
            self.sent_s = time.monotonic()
            self.send()

    def close(self) -> None:
        """Send the end."""
        if self.progress.step:
            self.send()

    def send(self) -> None:
        """Send the progress."""
        raise NotImplementedError


class TrainJobStatus(_Scheduler):
    """The status of a TrainJob of Kubeflow Trainer.

    Args:
        environment: the environment, with the variables that Kubeflow Trainer sets.
        run_dir: the run directory of the job.

    Raises:
        UsageError: a variable is missing, or the token would go over a connection that is not encrypted.
    """

    def __init__(self, environment: Mapping[str, str], run_dir: Path | None) -> None:
        super().__init__(_TRAINER_EVERY_S)
        self.url = environment[SERVER_URL]
        if _TOKEN not in environment:
            fix = "look at the version of Kubeflow Trainer, which sets both"
            raise UsageError(f"{SERVER_URL}={self.url}", f"{_TOKEN} is not set", fix)
        self.token = Path(environment[_TOKEN])
        parts = urlsplit(self.url)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            found = "a token would go there without encryption"
            raise UsageError(f"{SERVER_URL}={self.url}", found, f"unset {SERVER_URL}, or give it https")
        self.address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        authority = environment.get(_CA_CERT)
        self.context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self.context = ssl.create_default_context(cafile=authority)

    def send(self) -> None:
        """Post the status. A server that is away, or too busy, is asked again with the next message."""
        # Of urllib, ssl, a torn answer, and a token that is just being replaced, whose text no error may show.
        with contextlib.suppress(OSError, HTTPException, ValueError):
            headers = {
                "Authorization": f"Bearer {read_text(self.token).strip()}",  # read each time: it rotates
                "Content-Type": "application/json",
            }
            request = urllib.request.Request(self.url, json.dumps(self.body()).encode(), headers, method="POST")
            # No proxy, and no other address: the token is for the cluster's own controller.
            proxy, https = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.context)
            handlers = [proxy, https, _NoRedirects()]
            with urllib.request.build_opener(*handlers).open(request, timeout=_LIMIT_S) as answer:
                answer.read()

    def body(self) -> dict[str, Any]:
        """Return the message."""
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        metrics = [{"name": name, "value": f"{value:g}"} for name, value in self.progress.metrics.items()]
        status["metrics"] = metrics[:_MOST_METRICS]
        if self.progress.percentage is not None:
            status["progressPercentage"] = self.progress.percentage
        if self.progress.remaining_s is not None:
            status["estimatedRemainingSeconds"] = self.progress.remaining_s
        return {"trainerStatus": status}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes an answer that names another address for an error."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return nothing: no request is made."""


class SlurmComment(_Scheduler):
    """The comment of a Slurm job, which `squeue -o %k` and `sacct -o comment` show.

    A comment that somebody else has written stays: some sites account by it.

    Args:
        job: the number of the Slurm job.
        program: the path of scontrol.
        run_dir: the run directory of the job.
    """

    def __init__(self, job: str, program: str, run_dir: Path | None) -> None:
        super().__init__(_SLURM_EVERY_S)
        self.job = job
        self.program = program
        self.name = "" if run_dir is None else f" {run_dir.name}"
        self.is_free: bool | None = None  # there is no comment, or one of Paceline's

    def send(self) -> None:
        """Change the comment; where Slurm refuses that, nothing happens."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self.is_free is None:
                self.is_free = self._is_free()
            if self.is_free:
                self._scontrol("update", f"JobId={self.job}", f"Comment={self.text()}")

    def _is_free(self) -> bool | None:
        """Return whether the job has no comment, or one of Paceline's; None where Slurm does not say."""
        answer = self._scontrol("show", "job", "--oneliner", self.job)
        if answer.returncode:
            return None
        comment = _COMMENT.search(answer.stdout)
        return comment is None or comment[1] in ("", "(null)") or _OUR_COMMENT.match(comment[1]) is not None

    def _scontrol(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self.program, *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S)

    def text(self) -> str:
        """Return the comment."""
        progress = self.progress
        step = f"step {progress.step}/{progress.total_steps}" if progress.total_steps else f"step {progress.step}"
        parts = [f"{_PREFIX}{self.name}: {step}", f"loss {progress.metrics['loss']:.4g}"]
        if progress.remaining_s is not None and progress.status == "running":
            parts.append(f"{progress.remaining_s} s left")
        if progress.status != "running":
            parts.append(progress.status)
        return ", ".join(parts)


def scheduler_sinks(environment: Mapping[str, str] = os.environ) -> list[MakeSink]:
    """Return the sinks of the scheduler that runs this process; none where there is no such one."""
    sinks: list[MakeSink] = []
    if environment.get(SERVER_URL):
        sinks.append(_named(TrainJobStatus, environment))
    program = shutil.which("scontrol", path=environment.get("PATH"))
    if environment.get("SLURM_JOB_ID", "").isdecimal() and program is not None:
        sinks.append(_named(SlurmComment, environment["SLURM_JOB_ID"], program))
    return sinks


def _named(kind: Any, *arguments: Any) -> MakeSink:
    def make(run_dir: Path | None) -> Any:
        try:
            return kind(*arguments, run_dir)
        except UsageError as error:  # the scheduler's variables are no settings of the user's: the job goes on
            raise ValueError(f"{error.asked}: {error.found}") from None

    make.__name__ = kind.__name__  # for notices
    return make
