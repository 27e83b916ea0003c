"""A rank that somebody else's launcher started: `python -m paceline.run.rank.external_rank FILE ARGS`.

This process forks the rank, hands signals on to it, waits for it and ends as it did. So it knows whether the rank has
run its file to the end, which an exit code of 0 does not say: the file may call `os._exit(0)`. Torch is imported in the
rank only, not in this process.

Under srun, mpirun or in a pod nobody of ours supervises. Each rank's end then stands in `ended/RANK` of the run
directory, rank 0 writes the result once all ranks have ended, and the exit code tells the launcher what to do: 0 done,
STOPPED_CODE saved before the end (start it again), 1 and 2 as everywhere.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import list_checkpoints
from paceline.checkpoint.owner import HEARTBEAT_S, LAUNCH, Ownership, is_of_launch
from paceline.launch.process_exit import die_with_parent, exit_process, kill_group
from paceline.launch.rank_command import STOPPED_CODE
from paceline.nouns.errors import PacelineError
from paceline.nouns.reading import parse_number
from paceline.rendezvous.launcher_env import find_position, variables_of
from paceline.run.directory import write_json
from paceline.run.ends import Ends, first_of
from paceline.run.failures import (
    EXITED_EARLY,
    SUPERVISED,
    first_cause,
    format_failure,
    format_failure_briefly,
    left_early,
    read_failures,
    silent_death,
)
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.stalls import TIMEOUT_VARIABLE, Stalls, Timeout, notice_time
from paceline.run.supervise.supervised_job import finish
from paceline.run.supervise.supervisor import Ending

SETTLE_S = 1.0  # the time for other ranks' failures, or after a signal, before the result is written
TELL_S = 10.0  # the time of waiting for other ranks until the user is told
_LOOK_S = 1.0  # the time between two looks for ranks without progress, and two tries to write the mark
_POLL_S = 0.1
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run the rank, and return its exit code."""
    die_with_parent()
    try:
        os.environ.update(variables_of(find_position(os.environ)))
        notice_s = notice_time(os.environ)
    except PacelineError as error:
        from paceline.run.rank.worker import failed

        return failed(error)
    timeout_s = parse_number(os.environ.get(TIMEOUT_VARIABLE, "")) or 0.0
    return JoinedRank(Path(os.environ["PACELINE_RUN_DIR"]), notice_s, timeout_s).run(sys.argv[1], sys.argv[2:])


class JoinedRank:
    """The process that waits for one rank.

    Args:
        run_dir: the run directory of the job.
        notice_s: the seconds without progress after which the user is told where the ranks stand; 0: never.
        timeout_s: the seconds without progress after which rank 0 ends the job; 0: never.
    """

    def __init__(self, run_dir: Path, notice_s: float, timeout_s: float = 0.0) -> None:
        self.run_dir = run_dir
        self.rank = int(os.environ["PACELINE_RANK"])
        self.size = int(os.environ["PACELINE_WORLD_SIZE"])
        # Our supervisor looks for itself, and mpirun takes STOPPED_CODE for a failure.
        self.is_supervised = SUPERVISED in os.environ
        self.is_telling = self.rank == 0 and not self.is_supervised
        self.ends = Ends(run_dir, self.size)
        self.has_begun = False  # True once the rank's file stands in `ended/`
        self.progress = Progress(run_dir)  # before the first step: it follows from the file's present end
        self.stalls = Stalls(run_dir, notice_s, self.size)
        self.timeout = Timeout(run_dir, timeout_s)
        self.signals: list[int] = []  # the numbers of signals that were handed on to the rank while it ran
        self.pid = 0
        self.failure_found: dict[str, Any] | None = None  # the failure of the job for which this process ended its rank
        self.launch = os.environ.get(LAUNCH, "")
        # What rank 0 took before it became this program.
        self.owned = Ownership.inherited(run_dir, os.environ) if self.is_telling else None
        self.printed_message = ""  # the message of the failure that was printed in full

    def run(self, script: str, arguments: list[str]) -> int:
        """Run the rank to its end, and return the exit code. Where a signal ended it, the same ends this process."""
        # Before the fork: rank 0 takes a rank without a mark for one that never began.
        if not self.is_supervised:
            self.has_begun = self.ends.begin(self.rank)
        wake = _wake_at_signals()
        finished = self._fork(script, arguments)
        if self.owned is not None:
            self.owned.start_beating()  # after the fork, which has no threads
        for number in _HANDED_ON:
            signal.signal(number, self._hand_on)
        group = self.pid
        status = self._wait(wake)
        if self.failure_found is not None and status == -signal.SIGKILL:
            status = int(
                self.failure_found["exit_code"]
            )  # of an error: after a signal a scheduler would start the job again
        if status == 0 and not _has_finished(finished):
            status = EXITED_EARLY
        if status not in (0, STOPPED_CODE):
            kill_group(group)
        if self._is_taken():
            return self._report_taken()
        # The failure before the end: when rank 0 sees that all have ended, it reads the failures at once.
        self._write_failure(status)
        if not self.is_supervised:
            self.ends.write(self.rank, status)
        if self.is_telling:
            status = self._write_result(status)
        return _end_as(status)

    def _is_taken(self) -> bool:
        """Return True if another job has the run directory now: the end of this one is not to be written there."""
        if self.is_supervised:
            return False
        is_foreign = bool(self.launch) and not is_of_launch(self.run_dir, self.launch)
        return is_foreign or (self.owned is not None and self.owned.is_taken())

    def _report_taken(self) -> int:
        """Print that another job has the run directory, and return the exit code."""
        if self.owned is not None:
            self.owned.release()
            if self.owned.taken is not None:
                print(f"paceline run: {self.owned.taken}", file=sys.stderr, flush=True)
        return 1

    def _fork(self, script: str, arguments: list[str]) -> int:
        """Start the rank. Return the read end of the pipe to which it writes once it has run its file to the end."""
        finished, rank_end = os.pipe()
        os.set_blocking(finished, False)  # a process that the rank forked may still hold the other end
        self.pid = os.fork()
        if self.pid:
            os.close(rank_end)
            if "PACELINE_LISTENER" in os.environ:
                os.close(int(os.environ["PACELINE_LISTENER"]))  # of rank 0's store: it ends with the rank
            return finished
        signal.set_wakeup_fd(-1)  # the pipe is the parent's
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(finished)
        die_with_parent()
        os.setsid()  # signals to this process's group would come twice; see also run/rank/forkserver.py
        from paceline.run.rank.worker import run_rank

        code = run_rank(script, arguments, 0 if self.is_supervised else STOPPED_CODE)
        exit_process(code, partial(os.write, rank_end, b"."))

    def _hand_on(self, number: int, _: object) -> None:
        self.signals.append(number)
        if self.pid:  # 0 once the rank has ended: kill(0, ...) would go to this process's own group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _wait(self, wake: int) -> int:
        """Wait until the rank has ended. Return its exit code, or below 0 the signal that ended it."""
        looked_s = beat_s = time.monotonic()
        timeout_s = None if self.is_supervised else _LOOK_S  # supervised there is nothing to do between two signals
        while True:
            readable, _, _ = select.select([wake], [], [], timeout_s)
            if readable:
                os.read(wake, 4096)  # a byte per signal; only that there was one matters
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0  # a signal that comes from now on must not go to a process that has this number next
                return os.waitstatus_to_exitcode(status)
            if not self.is_supervised and time.monotonic() - looked_s >= _LOOK_S:
                looked_s = time.monotonic()
                if not self.has_begun:
                    self.has_begun = self.ends.begin(self.rank)
                elif looked_s - beat_s >= HEARTBEAT_S:
                    beat_s = looked_s
                    self.ends.heartbeat(self.rank)
                if self.is_telling:
                    self._look_for_stalls()
                if self.owned is not None and self.owned.taken is not None:
                    os.kill(self.pid, signal.SIGKILL)

    def _look_for_stalls(self) -> None:
        """Print ranks without progress for the user; end this rank where another left before it, or none makes any.

        Only rank 0 does so. Its end is what the launcher, or the other ranks' collectives, then fail by.
        """
        now_s = time.monotonic()
        pids = {self.rank: self.pid}
        for line in self.stalls.look(now_s, pids):
            print(line, flush=True)
        if self.progress.read():
            self.timeout.progress()
        is_due = 0 < self.timeout.seconds <= self.timeout.quiet_s  # of a large job the ends are not read every second
        ended = self.ends.read(range(self.size)) if is_due else {}
        failure = self.timeout.look(now_s, _time_stamp(), ended, pids)
        if not _STOPS.isdisjoint(self.signals):  # after it the ranks save, in the time that the launcher gives them
            failure = None
        early_rank = None
        if failure is None and "PACELINE_COORDINATOR" not in os.environ:  # workers of servers don't wait for each other
            early_rank = self.stalls.who_left()
        if early_rank is not None:
            found = "it left its loop and closed the job while others were still training"
            failure = left_early(early_rank, _time_stamp(), found)
        if failure is not None and not read_failures(self.run_dir):
            self.failure_found = failure
            self._write(failure)
            os.kill(self.pid, signal.SIGKILL)

    def _write_failure(self, status: int) -> None:
        """Write down the rank's failure where it could not do so itself."""
        if status in (0, STOPPED_CODE):
            return
        failures = read_failures(self.run_dir)
        failure = failures.get(self.rank)
        if failure is None and not (status < 0 and self.signals):  # a signal that came for the whole job
            failure = silent_death(self.rank, status, _time_stamp(), run_dir=self.run_dir)
            self._write(failure)
        if failure is None or self.is_supervised or failure["is_peer_loss"]:
            return
        text = format_failure_briefly(failure, "failed")
        if first_cause([failure, *failures.values()]) is failure:  # as far as is known
            text = format_failure(failure, 0, "failed")
            self.printed_message = failure["message"]
        print(f"paceline run: {text}", file=sys.stderr, flush=True)

    def _write(self, failure: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            (self.run_dir / "failures").mkdir(exist_ok=True)
            write_json(self.run_dir / "failures" / f"{self.rank}.json", failure)

    def _write_result(self, status: int) -> int:
        """Wait until all ranks have ended, and write the job's result. Return the status to end this process with."""
        ended = {self.rank: status, **self._wait_for_other_ranks(status)}
        has_failed = any(_is_error(rank_status) for rank_status in ended.values())
        is_incomplete = status == 0 and len(ended) < self.size
        self.progress.read()
        cause = None
        if has_failed or is_incomplete:
            cause = first_of(self.run_dir, ended, self.size, self.progress.last)
            exit_code = _exit_code(status) if _is_error(status) else cause["exit_code"]
            ending = Ending("failed", exit_code, cause)
        else:
            ending = Ending("stopped" if status == STOPPED_CODE else "done", _exit_code(status))
        finish(self.run_dir, ending, self.progress, partial(print, file=sys.stderr), self.owned)
        self._print_cause(cause)
        self.ends.clear()
        self.stalls.clear()
        if self.owned is not None:
            self.owned.release()
        return status if _is_error(status) else ending.exit_code

    def _wait_for_other_ranks(self, status: int) -> dict[int, int]:
        """Wait for the other ranks, and return the statuses of those that have ended, by rank.

        The wait ends when all have ended or one has failed, and otherwise SETTLE_S after the last reason to wait: this
        rank ended well, no signal has come since, and every missing rank still shows signs of life.
        """
        signals_before = len(self.signals)
        until_s = time.monotonic() + SETTLE_S
        tell_s = time.monotonic() + TELL_S
        while True:
            ended = self.ends.read(range(1, self.size))
            has_failed = any(_is_error(rank_status) for rank_status in ended.values())
            if has_failed or len(ended) == self.size - 1 or time.monotonic() > until_s:
                return ended
            if status == 0 and len(self.signals) == signals_before and not self.ends.silent(ended):
                until_s = time.monotonic() + SETTLE_S  # they may have much to do after the last step
            if time.monotonic() > tell_s:
                tell_s = float("inf")
                missing = min(set(range(1, self.size)) - ended.keys())
                print(f"paceline: rank 0 has ended, and waits for rank {missing}", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)

    def _print_cause(self, cause: dict[str, Any] | None) -> None:
        """Print a failure that no rank has printed itself, and which of several ranks failed first."""
        if cause is None:
            return
        failures = read_failures(self.run_dir)
        recorded = failures.get(cause["rank"]) if cause["rank"] is not None else None
        if recorded is None or recorded["is_peer_loss"]:
            if cause["message"] != self.printed_message:
                print(f"paceline run: {format_failure(cause, 0)}", file=sys.stderr, flush=True)
        elif sum(not failure["is_peer_loss"] for failure in failures.values()) > 1:
            text = format_failure_briefly(cause, "failed first")
            if cause["message"] == self.printed_message:
                text = text.partition(":")[0]
            print(f"paceline run: {text}", file=sys.stderr, flush=True)
        if newest := list_checkpoints(self.run_dir / "checkpoints")[:1]:
            print(f"  Last checkpoint: {newest[0]}; go on with --resume --job {self.run_dir.name}", file=sys.stderr)


def _wake_at_signals() -> int:
    """Return a descriptor that becomes readable after a signal, also after the end of a child."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # Python writes to the descriptor only for signals with a handler
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake


def _has_finished(finished: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(finished, 1))
    return False


def _is_error(status: int) -> bool:
    return status not in (0, STOPPED_CODE)


def _exit_code(status: int) -> int:
    if status < 0:  # a signal, as shells number it
        return 128 - status
    return 1 if status == EXITED_EARLY else status


def _end_as(status: int) -> int:
    """Return the exit code, or end this process by the signal that ended the rank: launchers tell it from an error."""
    if status < 0:
        # No second core file: the rank has written its own, and this process holds nothing of interest.
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), -status)
    return _exit_code(status)


def _time_stamp() -> float:
    return time.time_ns() / 1e9


if __name__ == "__main__":
    sys.exit(main())
