"""Ask why a job stands still, in a thread of its own: the ranks take seconds to answer, and the supervisor goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from paceline.run.causes import causes
from paceline.run.job_facts import collect

_MOST = 3  # causes that are told: the others follow from them


@dataclass(slots=True)
class Verdict:
    """What `paceline why` would say of a job that has stopped making progress.

    Args:
        run_dir: of the job.
    """

    run_dir: Path
    thread: threading.Thread | None = None
    lines: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Ask the ranks; nothing is done while they are being asked."""
        if self.thread is None or not self.thread.is_alive():
            self.lines = []
            self.thread = threading.Thread(target=self._judge, daemon=True, name="paceline-verdict")
            self.thread.start()

    def take(self) -> list[str]:
        """Return the lines to tell, once; empty before the ranks have answered."""
        if self.thread is None or self.thread.is_alive():
            return []
        self.thread = None
        return self.lines

    def drop(self) -> None:
        """Tell nothing of what is being asked: the job goes on."""
        self.thread = None

    def _judge(self) -> None:
        lines = []
        for cause in causes(collect(self.run_dir))[:_MOST]:
            lines += [f"paceline: {cause.text}", f"  fix: {cause.fix}"]
        self.lines = lines
