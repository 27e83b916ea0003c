"""Train as a task of an Airflow DAG (Airflow 3).

with DAG("digits", schedule=None):
    train = PacelineOperator(task_id="train", file="train.py", ranks=2, runs="/data/runs")

This module needs no torch: with `python` the job runs in an environment that is not Airflow's.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from airflow.exceptions import AirflowException, AirflowFailException
from airflow.sdk import BaseOperator

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.names import job_name_of
from paceline.nouns.reading import read_json
from paceline.run.failures import format_failure

_REFUSED = 2  # exit code of a request that can't be met
_OURS = ("--job", "--runs", "--resume", "--resume-or-start", "--json", "--dry-run", "-n", "--plan")


class PacelineOperator(BaseOperator):
    """Run `paceline run` as a task: its output is in the task's log, its result is the task's XCom.

    A retry goes on from the newest checkpoint of the try before. A task that is cleared after its job was done trains
    anew, in a run directory of its own. When Airflow ends the task, the job is sent SIGTERM: it saves and stops. All
    arguments but `python` are templates.

    Args:
        file: the workload's file, as in `paceline run FILE`.
        arguments: of the file.
        ranks: their number, as `-n`; None: as many as the plan has, or one.
        plan: axes and options, as `--plan`; None: `replicate`.
        flags: more flags of `paceline run`, such as `["--checkpoint-every", "50", "--max-restarts", "2"]`.
        runs: folder of the runs, as `--runs`. A retry on another worker needs a folder that both have.
        job: the run's name; by default that of the DAG, the task and the DAG's run, and the index of a mapped task.
            What a run's name can't have becomes a hyphen.
        python: the interpreter of the environment that has Paceline and torch; by default Airflow's own.
        cwd: where the job runs; by default where the worker does.
        env: variables of the job besides the worker's. Those whose names begin with `AIRFLOW` are not handed on.
        task: arguments of Airflow's BaseOperator: `task_id`, `retries`, `execution_timeout` and so on.

    Raises:
        UsageError: a flag is among `flags` that the operator sets itself.

    Examples:
        >>> from airflow.sdk import DAG
        >>> with DAG("digits", schedule=None):
        ...     train = PacelineOperator(task_id="train", file="train.py", ranks=2, retries=2)
        ...     evaluate = PacelineOperator(task_id="evaluate", file="evaluate.py")
        ...     train >> evaluate
    """

    template_fields = ("file", "arguments", "ranks", "plan", "flags", "runs", "job", "cwd", "env")

    def __init__(  # noqa: PLR0913 (flags of `paceline run`)
        self,
        *,
        file: str,
        arguments: Sequence[str] = (),
        ranks: int | str | None = None,
        plan: str | None = None,
        flags: Sequence[str] = (),
        runs: str = "runs",
        job: str = "{{ ti.dag_id }}-{{ ti.task_id }}-{{ ti.run_id }}",
        python: str = sys.executable,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        **task: object,
    ) -> None:
        super().__init__(**task)
        self.file = file
        self.arguments = list(arguments)
        self.ranks = ranks
        self.plan = plan
        self.flags = list(flags)
        self.runs = runs
        self.job = job
        self.python = python
        self.cwd = cwd
        self.env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None
        _check_flags(self.flags)

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Run the job, and return its result as `paceline run --json` prints it.

        Args:
            context: Airflow's.

        Raises:
            AirflowFailException: the request can't be met, so a retry would not help.
            AirflowException: the job failed, or was stopped before its end.
        """
        job = self._free_name(_named(self.job, context["ti"].map_index))
        command = self._command(job)
        self.log.info("%s", shlex.join(command))
        with tempfile.TemporaryFile("w+") as printed:
            code = self._run(command, printed)
            printed.seek(0)
            result = _result_in(printed.read())
        _raise_unless_done(job, code, result)
        return result

    def on_kill(self) -> None:
        """Send the job SIGTERM: it saves a checkpoint and stops."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _free_name(self, name: str) -> str:
        """Return the job's name, with a number if a run of this name is done."""
        runs = Path(self.cwd or ".") / self.runs
        tried, number = name, 1
        while _is_done(runs / tried):
            number += 1
            tried = f"{name}-{number}"
        return tried

    def _command(self, job: str) -> list[str]:
        # In one word with its flag, no value is a flag. `--`: FILE follows, whatever it begins with.
        command = [self.python, "-m", "paceline", "run", "--json", f"--runs={self.runs}"]
        command += [f"--job={job}", "--resume-or-start"]
        if self.ranks is not None:
            command += ["-n", str(self.ranks)]
        if self.plan is not None:
            command += [f"--plan={self.plan}"]
        return [*command, *self.flags, "--", self.file, "--", *self.arguments]

    def _run(self, command: list[str], printed: IO[str]) -> int:
        """Run the command until it ends; log what it says on stderr. Its result goes to `printed`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        environment.update(self.env)
        self._process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.PIPE, cwd=self.cwd, env=environment, text=True, errors="replace"
        )
        try:
            assert self._process.stderr is not None  # it is a pipe
            for line in self._process.stderr:
                self.log.info("%s", line.rstrip())
            return self._process.wait()
        except BaseException:  # Airflow's time limit, or its signal
            self.on_kill()
            self._process.wait()
            raise
        finally:
            assert self._process.stderr is not None
            self._process.stderr.close()


def _check_flags(flags: Sequence[str]) -> None:
    for flag in flags:
        name = str(flag).partition("=")[0]
        if name in _OURS or name.startswith("-n"):
            raise UsageError(
                "`flags` of PacelineOperator are those of `paceline run` that it has no argument for",
                f"{name} is among them",
                "use the arguments ranks, plan, job and runs; the operator asks for JSON and resumes by itself",
            )


def _named(job: str, map_index: int | None) -> str:
    """Return the job's name without what a folder's name should not have."""
    index = "" if map_index is None or map_index < 0 else f"-{map_index}"
    return job_name_of(job) + index


def _is_done(run: Path) -> bool:
    try:
        return bool(read_json(run / "result.json", dict).get("status") == "done")
    except ReadError:
        return False


def _result_in(text: str) -> dict[str, Any]:
    """Return the result that the command printed; empty if it printed none."""
    try:
        result = json.loads(text)
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def _raise_unless_done(job: str, code: int, result: Mapping[str, Any]) -> None:
    if result.get("status") == "done" and code == 0:
        return
    if code == _REFUSED:
        raise AirflowFailException(f"paceline run refused the job {job}\n{_refusal(result)}")
    if result.get("status") == "stopped":
        raise AirflowException(f"the job {job} was stopped at step {result.get('steps')}; a retry goes on from there")
    failure = result.get("failure")
    told = format_failure(failure, 0) if failure else "what it said is in the log above"
    raise AirflowException(f"the job {job} ended with exit code {code}\n{told}")


def _refusal(result: Mapping[str, object]) -> str:
    error = result.get("error")
    if not isinstance(error, dict):
        return "what it said is in the log above"
    return str(UsageError(error["asked"], error["found"], error["fix"]))
