"""A sink for Weights & Biases."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import UsageError
from paceline.nouns.sink import CLOSE_S
from paceline.sinks.numbers import address_of, name_of, numbers_of, path_of, picture_of

_STEP = "train/step"
_FINISH_S = 0.75 * CLOSE_S  # so that there is time to report unsent data


class WandB:
    """Writes a job's numbers, texts and pictures to Weights & Biases: `sinks=[WandB]`.

    A job that resumes goes on in the same run of W&B. The x axis is `train/step`; steps that are taken again appear
    again. With the environment's `WANDB_MODE=offline` everything stays in `wandb/` of the run directory, and
    `wandb sync` sends it later.

    Args:
        run_dir: the run directory of the job; None where there is none.
        project: the name of the project of W&B.
        settings: the further arguments of `wandb.init`.

    Raises:
        UsageError: the package wandb is not installed, or it is to send and has no key.

    Examples:
        >>> import os
        >>> from dataclasses import replace
        >>> from paceline.sinks.wandb import WandB
        >>> os.environ["WANDB_MODE"] = "disabled"
        >>> job = paceline.distribute(replace(workload, sinks=[lambda run_dir: WandB(run_dir, project="letters")]))
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> job.close()
    """

    def __init__(self, run_dir: Path | None, project: str = "paceline", **settings: object) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError(
                "can't write to Weights & Biases",
                "the package wandb is not installed",
                "pip install 'paceline[wandb]', or leave WandB out of sinks",
            ) from None
        mode = settings.get("mode") or os.environ.get("WANDB_MODE", "online")
        is_online = mode not in ("offline", "disabled", "dryrun")
        if is_online and not _has_key(wandb):
            raise UsageError(
                "can't send to Weights & Biases",
                "there is no key for it",
                "run `wandb login` on the first host, or set WANDB_API_KEY; "
                "or set WANDB_MODE=offline and send later by `wandb sync`",
            )
        self.run_dir = run_dir
        self.wandb = wandb
        same_run: dict[str, Any] = {}
        if run_dir is not None:
            # Of the place, so that a job that resumes finds its run, and two jobs of one name are two.
            key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
            same_run = {"id": key, "resume": "allow", "name": name_of(run_dir)}
        # `console` would pass on what the rank prints, through a thread of its own. Without a limit a server that is
        # away would hold `close`, and what W&B runs at the exit.
        same_run["settings"] = wandb.Settings(console="off", finish_timeout=_FINISH_S, finish_timeout_raises=True)
        folder = str(run_dir or Path.cwd())
        self.address = address_of(_settings(wandb).base_url) if is_online else folder
        self.options = {"project": project, "dir": folder, **same_run, **settings}
        self.run: Any = None
        self.facts: dict[str, Any] = {}  # the values that the run's configuration does not have yet
        if not is_online:  # else in `write`: the server may be away
            self._begin()

    def _begin(self) -> None:
        """Begin the run of W&B, or go on with it."""
        self.run = self.wandb.init(**self.options)
        self.run.define_metric("*", step_metric=_STEP)

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event's numbers, text or picture."""
        kind = event["event"]
        values: dict[str, Any] = dict(numbers_of(event))
        if kind == "start":
            self.facts = {name: event[name] for name in ("total_steps", "samples", "batch_size", "world_size")}
        if self.run is None:
            self._begin()
        if self.facts:
            self.run.config.update(self.facts, allow_val_change=True)
            self.facts = {}
        if kind == "text":
            values = {_key(event["name"]): self.wandb.Table(columns=["text"], data=[[event["text"]]])}
        elif kind == "picture":
            values = {_key(event["name"]): self.wandb.Image(str(picture_of(event, self.run_dir)))}
        if values:
            self.run.log({**values, _STEP: event["step"]})

    def close(self) -> None:
        """Send or write the rest."""
        if self.run is None:
            return
        folder = Path(self.run.dir).parent
        try:
            self.run.finish()
        except TimeoutError:
            raise TimeoutError(f"not all was sent in time; `wandb sync {folder}` sends it later") from None


def _settings(wandb: Any) -> Any:
    """Return the settings of the environment and of the user's files."""
    return wandb.sdk.wandb_setup.singleton().settings


def _has_key(wandb: Any) -> bool:
    """Log in. Without `silent` the server would be asked for the user's name, to print it."""
    settings = _settings(wandb)
    before, settings.silent = settings.silent, True
    try:
        return bool(wandb.login(prompt=False, verify=False))
    finally:
        settings.silent = before


def _key(name: str) -> str:
    """Return a name that can be a file's: W&B writes tables and images to files of their names."""
    return re.sub(r"[^\w\-. /]", "_", path_of(name))
