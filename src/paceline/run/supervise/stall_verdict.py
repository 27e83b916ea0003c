"""Ask why a job stands still, in a thread of its own: the ranks take seconds to answer, and the supervisor goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.run.causes import Cause
    from paceline.run.job_facts import Facts

_MOST = 3  # the number of causes that are reported: the others follow from them


@dataclass(slots=True)
class Verdict:
    """The causes that `paceline why` would find in a job that has stopped making progress.

    Args:
        run_dir: the run directory of the job.
        answer_s: the seconds in which a rank has to answer; None: as for `paceline why`.
    """

    run_dir: Path
    answer_s: float | None = None
    thread: threading.Thread | None = None
    facts: Facts | None = None  # what the ranks answered; None before they did
    found: list[Cause] = field(default_factory=list)
    dropped: int = 0  # the number of times that the answers were dropped
    lines: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Ask the ranks; nothing is done while they are being asked."""
        if self.thread is None or not self.thread.is_alive():
            self.lines = []
            self.thread = threading.Thread(
                target=self._judge, args=(self.dropped,), daemon=True, name="paceline-verdict"
            )
            self.thread.start()

    def take(self) -> list[str]:
        """Return the lines to print, once; empty before the ranks have answered."""
        if self.thread is None or self.thread.is_alive():
            return []
        self.thread = None
        return self.lines

    def answers(self) -> Facts | None:
        """Return the facts that the ranks' answers gave, once. Before, ask the ranks, and return None."""
        if self.facts is None:
            self.begin()
            return None
        facts, self.facts = self.facts, None
        return facts

    def drop(self) -> None:
        """Drop the question and its answers: the job goes on."""
        self.thread = None
        self.facts = None
        self.dropped += 1

    def _judge(self, dropped: int) -> None:
        # Every job begins with this file, and few ever stand still.
        from paceline.run.causes import causes
        from paceline.run.job_facts import collect

        facts = collect(self.run_dir, self.answer_s)
        if dropped != self.dropped:
            return
        self.found = causes(facts)[:_MOST]
        lines = []
        for cause in self.found:
            lines += [f"paceline: {cause.text}", f"  fix: {cause.fix}"]
        self.lines = lines
        self.facts = facts  # last: a thread that sees it finds the other fields filled
