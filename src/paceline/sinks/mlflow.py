"""A sink for MLflow."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.reading import read_text
from paceline.sinks.numbers import address_of, name_of, numbers_of, path_of, picture_of

RUN = "mlflow-run"  # a file of the run directory: the id of MLflow's run
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MLflow:
    """Writes a job's numbers, texts and pictures to an MLflow tracking server or folder: `sinks=[MLflow]`.

    Where: `MLFLOW_TRACKING_URI` of the environment; else `mlruns/` of the run directory, which `mlflow ui` shows. A job
    that resumes goes on in the same run of MLflow, where steps that are taken again have two values.

    Args:
        run_dir: the run directory of the job; None where there is none.
        experiment: the name of MLflow's experiment, which is made where there is none.
        uri: the address of the tracking server or folder, in place of `MLFLOW_TRACKING_URI`.

    Raises:
        UsageError: the package mlflow is not installed.

    Examples:
        >>> from dataclasses import replace
        >>> from paceline.sinks.mlflow import MLflow
        >>> here = [lambda run_dir: MLflow(run_dir, experiment="letters", uri="file:mlruns")]
        >>> job = paceline.distribute(replace(workload, sinks=here))
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> job.close()
    """

    def __init__(self, run_dir: Path | None, experiment: str = "paceline", uri: str | None = None) -> None:
        # It asks to leave folders for a database, which mlflow-skinny has not.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise UsageError(
                "can't write to MLflow",
                "the package mlflow is not installed",
                "pip install 'paceline[mlflow]', or leave MLflow out of sinks",
            ) from None
        self.run_dir = run_dir
        self.make_metric = Metric
        self.has_ended = False
        folder = (run_dir or Path()).resolve() / "mlruns"
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri()
        self.address = address_of(uri)
        self.client = MlflowClient(tracking_uri=uri)
        self.experiment = experiment
        self.run_id = ""  # the server is asked in `write`: it may be away
        self.metrics: set[str] = set()
        self.tags: dict[str, Any] = {}  # the tags that are not sent yet

    def _begin(self) -> None:
        """Find or make MLflow's run."""
        run_id = self._same_run() or self._new_run(self.experiment)
        self.metrics = {*self.client.get_run(run_id).data.metrics}  # those of an earlier start too
        self.run_id = run_id

    def _same_run(self) -> str | None:
        """Return the run in which the job has written before."""
        with contextlib.suppress(OSError, ReadError):
            if self.run_dir is not None:
                run_id = read_text(self.run_dir / RUN).strip()
                self.client.update_run(run_id, status="RUNNING")
                return run_id
        return None

    def _new_run(self, experiment: str) -> str:
        found = self.client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self.client.create_experiment(experiment)
        run = self.client.create_run(number, run_name=name_of(self.run_dir))
        if self.run_dir is not None:
            (self.run_dir / RUN).write_text(run.info.run_id + "\n")
        return str(run.info.run_id)

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event's numbers, text or picture."""
        kind = event["event"]
        if kind == "start":
            self.tags = {name: event[name] for name in ("total_steps", "samples", "batch_size", "world_size")}
        if not self.run_id:
            self._begin()
        for name in [*self.tags]:
            self.client.set_tag(self.run_id, name, self.tags[name])
            del self.tags[name]
        at_ms = round(1000 * event["at"])
        metrics = [
            self.make_metric(self._metric_of(name), value, at_ms, event["step"])
            for name, value in numbers_of(event).items()
        ]
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)
        elif kind == "text":
            name = _NOT_IN_NAMES.sub("_", path_of(event["name"]))
            self.client.log_text(self.run_id, event["text"], f"text/{name}-{event['step']:08}.txt")
        elif kind == "picture":
            self.client.log_artifact(self.run_id, str(picture_of(event, self.run_dir)), "pictures")
        self.has_ended |= kind == "end"

    def _metric_of(self, name: str) -> str:
        """Return a name that MLflow takes: in its folders a metric can't be a folder of others too."""
        path = _NOT_IN_NAMES.sub("_", path_of(name))
        parents = [path[:at] for at, character in enumerate(path) if character == "/"]
        if any(parent in self.metrics for parent in parents):
            path = path.replace("/", ".")
        elif any(known.startswith(f"{path}/") for known in self.metrics):
            path += ".value"
        self.metrics.add(path)
        return path

    def close(self) -> None:
        """End the run: FINISHED after the job's end, else FAILED."""
        if self.run_id:
            self.client.set_terminated(self.run_id, "FINISHED" if self.has_ended else "FAILED")
