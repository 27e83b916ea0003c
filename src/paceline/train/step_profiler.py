"""Have torch's profiler record some steps of this rank, into `profiles/RANK.json.gz` of the run directory.

`paceline run --profile FIRST:LAST` asks for it, by a variable, so that it reaches the ranks of every launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paceline.torch_private.autograd import is_profiler_running
from paceline.train.profile_files import VARIABLE, path_of, wanted_steps


class StepProfiler:
    """Records the steps of one job that its environment asks for.

    Args:
        run_dir: the run directory of the job; None: nothing is recorded.
        rank: the rank of this process.
        environment: the environment of this process.
        notice: a function that prints a notice for the user.

    Raises:
        UsageError: the variable is no range of steps.
    """

    def __init__(
        self, run_dir: Path | None, rank: int, environment: Mapping[str, str], notice: Callable[[str], None]
    ) -> None:
        text = environment.get(VARIABLE)
        self.steps = None if not text or run_dir is None else wanted_steps(text, VARIABLE)
        self.path = None if run_dir is None else path_of(run_dir, rank)
        self.rank = rank
        self.notice = notice
        self.profile: torch.profiler.profile | None = None
        self.is_recording = False
        if text and run_dir is None and rank == 0:
            notice(f"{VARIABLE} has no effect: a job without a run directory keeps no profile")

    def step_ended(self, step: int) -> None:
        """Begin before the first step that is wanted, and end after the last.

        Args:
            step: the step that has ended, or after which a resumed job begins.
        """
        if self.steps is None:
            return
        first, last = self.steps
        if self.profile is None and first - 1 <= step + 1 <= last and not self._prepare():
            return
        if self.profile is not None and not self.is_recording and first <= step + 1 <= last:
            self.is_recording = self._try(self.profile.start_trace)
        elif self.is_recording and step >= last:
            self._end()

    def close(self, step: int) -> None:
        """Keep what was recorded of a job that ends before the last step that was wanted.

        Args:
            step: the last one of the job.
        """
        if self.is_recording:
            self._end()
        elif self.steps is not None and self.rank == 0:
            first, last = self.steps
            self.notice(
                f"nothing was profiled: steps {first} to {last} were asked for, and this process ended with {step}"
            )
        self.steps = None

    def _prepare(self) -> bool:
        """Load what the profiler needs, which takes up to a second, one step early where there is one."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print two lines among the job's output
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(activities=activities)
        return self._try(self.profile.prepare_trace)

    def _try(self, begin: Callable[[], None]) -> bool:
        """Return whether a part of the profiler has begun. A process has one: a second would end the first."""
        try:
            if is_profiler_running():
                raise RuntimeError("the file has a profiler of its own that records")
            begin()
            return True
        except RuntimeError as error:
            self.profile = None
            self._give_up(str(error).splitlines()[0])
            return False

    def _end(self) -> None:
        assert self.profile is not None
        assert self.path is not None
        profile, self.profile = self.profile, None
        self.steps = None
        self.is_recording = False
        try:
            profile.stop_trace()
            self.path.parent.mkdir(exist_ok=True)
            draft = self.path.with_name(f".{self.path.name}")
            profile.export_chrome_trace(str(draft))
            draft.replace(self.path)
        except (OSError, RuntimeError) as error:
            self._give_up(str(error).splitlines()[0])

    def _give_up(self, found: str) -> None:
        self.steps = None
        self.notice(f"rank {self.rank} keeps no profile: {found}")
