"""A sink for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.nouns import arguments
from paceline.nouns.errors import UsageError
from paceline.sinks.numbers import numbers_of, picture_of

_FLUSH_S = 10  # a process that is killed loses no more


class TensorBoard:
    """Writes a job's numbers, texts and pictures: `sinks=[paceline.TensorBoard]`.

    Under `paceline run` they go to `tensorboard/` in the run directory; a job that resumes continues its curves there,
    and the steps that it takes again replace the old ones. A file that is run by itself gets `tensorboard/DATE-TIME`.

    Args:
        run_dir: the run directory of the job; None where there is none.

    Raises:
        UsageError: the package tensorboard is not installed.

    Examples:
        >>> import importlib.util
        >>> from dataclasses import replace
        >>> sinks = [paceline.TensorBoard] if importlib.util.find_spec("tensorboard") else []
        >>> job = paceline.distribute(replace(workload, sinks=sinks))
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> job.close()
    """

    def __init__(self, run_dir: Path | None) -> None:
        try:
            # Imported here and not at the first event: by then a data loader may be forking.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "can't write events for TensorBoard",
                "the package tensorboard is not installed",
                "pip install 'paceline[tensorboard]', or leave paceline.TensorBoard out of the workload's sinks",
            ) from None
        self.run_dir = None if run_dir is None else arguments.path("TensorBoard", "run_dir", run_dir)
        self.folder = Path("tensorboard", time.strftime("%Y%m%d-%H%M%S"))
        if self.run_dir is not None:
            self.folder = self.run_dir / "tensorboard"
        self.address = str(self.folder)
        self.make_writer = SummaryWriter
        self.writer: Any = SummaryWriter(str(self.folder), flush_secs=_FLUSH_S)

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event's numbers, text or picture."""
        kind = event["event"]
        for name, value in numbers_of(event).items():
            self.writer.add_scalar(name, value, global_step=event["step"], walltime=event["at"])
        if kind == "resumed" and not event.get("takes_over"):
            # TensorBoard then drops what an earlier process wrote of the steps that are taken again.
            self.writer.close()
            self.writer = self.make_writer(str(self.folder), purge_step=event["step"] + 1, flush_secs=_FLUSH_S)
        elif kind == "text":
            self.writer.add_text(event["name"], event["text"], global_step=event["step"], walltime=event["at"])
        elif kind == "picture":
            self._picture(event)

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()

    def _picture(self, event: Mapping[str, Any]) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(picture_of(event, self.run_dir)) as image:
            pixels = np.asarray(image.convert("RGB"))
        place = {"global_step": event["step"], "walltime": event["at"]}
        self.writer.add_image(event["name"], pixels, dataformats="HWC", **place)
