"""Run one job from above its ranks: start them, show their output, kill all when one fails, report the first cause."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.owner import TOKEN, Ownership
from paceline.launch.local import RankSettings
from paceline.launch.process_template import Start
from paceline.launch.rank_assignment import HostRanks, Rendezvous, with_servers
from paceline.launch.torchrun_variables import AS_TORCHRUN, has_rank
from paceline.nouns.clock import Clock, WallClock
from paceline.nouns.errors import UsageError, how_to_write
from paceline.rendezvous.interfaces import LOOPBACK, open_listener
from paceline.rendezvous.launcher_env import joined_address
from paceline.run.failures import (
    STALLED,
    first_cause,
    left_early,
    read_failures,
    refusal,
    signal_name,
    silent_death,
    unwritten_failure,
)
from paceline.run.job_settings import GRACE_S
from paceline.run.private import PrivateFolder, make_private
from paceline.run.rank_output import OutputLog
from paceline.run.supervise.agent import OUTLIVED_S
from paceline.run.supervise.host_backend import HostBackend, Listening, LocalBackend
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.stall_verdict import Verdict
from paceline.run.supervise.stalls import DEFAULT_S, VARIABLE, Stalls, Timeout, process_state
from paceline.run.supervise.supervise_servers import Replaced, ServerNews
from paceline.server.coordinator.absences import silence_s

# All times are in seconds.
SETTLE_S = 0.5  # after the first death the others may write down what they saw, then they are killed
HELD_S = 3.0  # the time to wait for output after the last process has ended
LEFT_BEHIND_S = 5.0  # the time to wait for a worker that the others, which have ended, went on without
THE_COMMAND = "paceline run"  # the value of `Ending.stop_sent_to` where the command was asked to stop, not a rank
_LOOK_S = 1.0  # the time between two looks for ranks that make no progress
_TICK_S = 0.1
# Characters of the folder for temporary files: with the private folder's name and a data loader's socket the path has
# 107, the most that Linux takes.
_LONGEST_FOLDER = 70


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """A host, its ranks, and their rendezvous."""

    backend: HostBackend
    host_ranks: HostRanks
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to run: its file, its ranks and its run directory.

    Args:
        script, arguments: the path of the user's file, and its arguments.
        ranks: the number of ranks that are started and supervised from here.
        run_dir: the run directory of the job.
        resume: the checkpoint to go on from; None: the job begins at step 0.
        preload: the modules that the fork server imports before it forks.
        grace_s: the seconds that ranks get to save after a request to stop; 0: they are killed at once.
        servers: the number of parameter servers.
        assignments: the hosts and their ranks; empty: all ranks are on this host.
        world_size: the number of ranks of the job, where others are started elsewhere; 0: there are no others.
        environment: further variables for the ranks.
        stall_notice_s: the seconds without progress after which the user is told where the ranks stand; 0: never.
        stall_timeout_s: the seconds without progress after which the job is ended; 0: never.
        private: the private folder that the caller made for the job; None: one is made, and removed at its end.
        function: the descriptor of the function that every rank calls, in place of `script`; -1: there is none.
        start: the function that starts the fork server on this host.
        owned: the ownership of the run directory; None: another process has it, or nobody can want it.
        resumes_itself: True where the script's own trainer loads checkpoints, and none of the run's is.
    """

    script: Path
    arguments: Sequence[str]
    ranks: int
    run_dir: Path
    resume: Path | None = None
    preload: Sequence[str] = ()
    grace_s: float = GRACE_S
    servers: int = 0  # parameter servers; their coordinator comes on top
    assignments: Sequence[HostAssignment] = ()
    world_size: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    stall_notice_s: float = DEFAULT_S
    stall_timeout_s: float = 0.0
    private: PrivateFolder | None = None
    function: int = -1
    start: Start = subprocess.Popen
    owned: Ownership | None = None
    resumes_itself: bool = False

    @property
    def is_plain(self) -> bool:
        """Return True if the script distributes its training without Paceline, and is no job of ours."""
        return AS_TORCHRUN in self.environment

    @property
    def is_taken(self) -> bool:
        """Return True if another job has the run directory now."""
        return self.owned is not None and self.owned.is_taken()


@dataclass(slots=True)
class Ending:
    """The end of a job: its status, its exit code and the first cause of a failure.

    Attributes:
        status: one of the words "done", "stopped" and "failed".
        exit_code: the exit code of the command.
        cause: the record of the first failure; None: there was none.
        peer_count: the number of ranks that ended with it.
        is_regroup: True where the job was stopped by `should_stop`.
        stop_sent_to: the command or the ranks that were asked to stop; "": nobody.
        is_host_failure: True where the first cause is no error of the user's file, so that other hosts may do better.
        lost_hosts: the hosts to which the connection ended.
        bad_hosts: the lost hosts, and those on which a rank was ended by a signal.
    """

    status: str
    exit_code: int
    cause: dict[str, Any] | None = None
    peer_count: int = 0
    is_regroup: bool = False
    stop_sent_to: str = ""
    is_host_failure: bool = False
    lost_hosts: tuple[str, ...] = ()
    bad_hosts: tuple[str, ...] = ()


@dataclass(slots=True)
class Supervisor:
    """Starts one job's ranks, follows them to their end and decides how the job ended."""

    request: JobRequest
    screen: Screen
    clock: Clock = field(default_factory=WallClock)
    is_hung: Callable[[], bool] = bool  # asked at every turn; all ranks are killed where it returns True
    should_stop: Callable[[], bool] = bool  # asked at every turn; all ranks save and end where it returns True
    is_regroup: bool = False
    alive: dict[int, int] = field(default_factory=dict)  # rank: process
    ended: dict[int, int] = field(default_factory=dict)  # rank: exit code or EXITED_EARLY, below 0 the signal
    ended_at: dict[int, float] = field(default_factory=dict)  # seconds since the epoch
    killed: set[int] = field(default_factory=set)  # ranks that the supervisor killed itself
    deaths: dict[int, dict[str, Any]] = field(default_factory=dict)
    unwritten: dict[int, dict[str, Any]] = field(default_factory=dict)  # failures that ranks could not write down
    kill_at_s: float | None = None
    asked_to_stop: list[int] = field(default_factory=list)
    has_told_ranks: bool = False
    lost: list[tuple[HostBackend, float]] = field(default_factory=list)  # hosts with ranks; seconds since the epoch
    lost_s: dict[HostBackend, float] = field(default_factory=dict)  # the time of each loss, by `clock`
    replaced: Replaced = field(init=False)
    backends: dict[int, HostBackend] = field(default_factory=dict)  # the host of each rank
    gone: set[int] = field(default_factory=set)  # processes of lost hosts
    left_out: set[int] = field(default_factory=set)  # those processes without which the others went on
    survived: set[HostBackend] = field(default_factory=set)  # the hosts of those processes
    is_over: bool = False  # the servers' coordinator says that the training has ended
    listening: Listening = field(default_factory=Listening)
    all_ended_s: float | None = None
    progress: Progress = field(init=False)
    output: OutputLog = field(init=False)
    news: ServerNews | None = None  # the news of parameter servers
    stalls: Stalls = field(init=False)
    timeout: Timeout = field(init=False)
    looked_s: float = float("-inf")  # the time of the last look for stalls
    stopped_s: dict[int, float] = field(default_factory=dict)  # the time of each rank's stop (SIGSTOP)
    signals_before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = Progress(self.request.run_dir)
        self.output = OutputLog(self.request.run_dir)
        if self.request.servers:
            self.news = ServerNews(self.request.run_dir, self.screen.say, self._end_silent)
        self.replaced = Replaced(self.request.ranks, self.request.servers)
        ranks = self.request.world_size or self.request.ranks
        self.stalls = Stalls(self.request.run_dir, self.request.stall_notice_s, ranks, Verdict(self.request.run_dir))
        self.timeout = Timeout(self.request.run_dir, self.request.stall_timeout_s)

    def run(self) -> tuple[Ending, Progress]:
        """Run the job to its end. Nothing is left behind: no process, no file outside the run directory.

        From here until `restore_signals`, SIGINT, SIGTERM and SIGHUP are only recorded. One that comes after the job's
        end changes nothing: it must not turn a job that is done into one that was stopped.
        """
        private = None
        assignments = self.request.assignments
        if not assignments:
            private = self.request.private or private_folder()
            assignments = [self._local_assignment(private)]
        progress = self.progress
        # Before the first process starts: a signal that ended this process now would leave ranks behind.
        self._catch_signals()
        statuses: dict[HostBackend, int] = {}
        try:
            for assignment in assignments:
                self._start(assignment, private)
            while self.listening.open and not self._is_held_open():
                self._turn(progress)
        finally:
            # Processes first, then the folder that has their sockets.
            self._kill()
            for assignment in assignments:
                statuses[assignment.backend] = assignment.backend.close()
            self._outwait_lost_coordinator()
            if private and self.request.private is None:
                private.remove()
            self.listening.close()
            if not self.request.is_taken:
                self.stalls.clear()
            self.output.close()
        progress.read()  # what ranks wrote after the last turn; the ending depends on a "stopped" event there
        if progress.last is not None:
            self.screen.show_progress(progress.line(), float("inf"))  # at once, however new the last line is
        self.screen.end()
        owned = self.request.owned
        if owned is not None and owned.taken is not None:  # the failures that ranks wrote down there are another job's
            ending = self._failed([refusal(owned.taken, _time_stamp())])
        else:
            ending = self._ending(progress, statuses)
        self._add_hosts(ending)
        if self.news is not None and ending.status in ("done", "stopped"):
            self.news.read()
            self.news.say_end()
            progress.left_out = self.news.left_out
        return ending, progress

    def _local_assignment(self, private: PrivateFolder) -> HostAssignment:
        (host_ranks,) = with_servers([HostRanks("", 0, self.request.ranks)], self.request.servers)
        rendezvous = Rendezvous(str(private.path / "rendezvous"))
        if has_rank(self.request.environment):  # torchrun's variables name no file
            listener = open_listener(LOOPBACK, 0)
            master = joined_address(LOOPBACK, listener.getsockname()[1])
            rendezvous = Rendezvous(master=master, listener=listener.detach())
        return HostAssignment(LocalBackend(start=self.request.start), host_ranks, rendezvous)

    def _start(self, assignment: HostAssignment, private: PrivateFolder | None) -> None:
        request = self.request
        owned = request.owned
        token = {TOKEN: owned.owner.token} if owned else {}
        settings = RankSettings(
            str(request.script.resolve()),
            list(request.arguments),
            request.world_size or request.ranks,
            assignment.host_ranks,
            assignment.rendezvous,
            str(request.run_dir.resolve()),
            str(request.resume.resolve()) if request.resume else None,
            list(request.preload),
            request.servers,
            str(private.path) if private else "",
            private.lock if private else -1,
            environment={VARIABLE: str(request.stall_notice_s), **token, **request.environment},
            function=request.function,
            run_lock=owned.lock if owned else -1,
        )
        assignment.backend.start(settings)
        self.backends.update(dict.fromkeys(settings.processes, assignment.backend))
        assignment.backend.listen(self.listening.register, self)

    def _turn(self, progress: Progress) -> None:
        # One round: read what the hosts said, then act on signals, times and files.
        self.listening.turn(_TICK_S)
        now_s = self.clock.now_s()
        for backend in set(self.backends.values()):
            backend.heartbeat(now_s)
        # Once a stop has been asked for, hosts that change start no other generation.
        if not self.is_regroup and not self.asked_to_stop:
            self.is_regroup = self.should_stop()
        self._pass_on_stop(now_s)
        is_time_up = self.kill_at_s is not None and now_s >= self.kill_at_s
        has_lost_folder = self.request.owned is not None and self.request.owned.taken is not None
        if is_time_up or has_lost_folder or self.is_hung():
            self._kill()
        if progress.read():
            self.timeout.progress()
            self.screen.show_progress(progress.line(), now_s)
        if self.news is not None:
            self.news.read()
        if now_s - self.looked_s >= _LOOK_S:
            self.looked_s = now_s
            self._look_for_stalls(now_s)

    def _look_for_stalls(self, now_s: float) -> None:
        local_pids = {}
        for rank, pid in self.alive.items():
            if isinstance(self.backends[rank], LocalBackend):
                local_pids[rank] = pid
        if self.news is not None and not self.news.mode:  # the servers have not said yet that they started
            self._end_stopped(local_pids)
        for line in self.stalls.look(now_s, local_pids):
            self.screen.say(line)
        self._end_at_timeout(now_s, local_pids)
        if self.request.servers:  # workers don't wait for each other in collectives; the coordinator judges them
            return
        # The one hang that is certain. The killed ranks' own statuses don't count: see `_is_own_doing`.
        ended_well = [rank for rank, status in self._ended_workers().items() if status == 0]
        early_rank = self.stalls.who_left(ended_well)
        if early_rank is not None and self.kill_at_s is None:
            found = "it left its loop and closed the job while others were still training"
            if early_rank in ended_well:
                found = "its file has ended, and others wait for it at the job's start"
            self.deaths[early_rank] = left_early(early_rank, _time_stamp(), found)
            self._kill()

    def _end_at_timeout(self, now_s: float, local_pids: dict[int, int]) -> None:
        """End a job that has made no progress for as long as --stall-timeout says."""
        pids = local_pids
        if not self.alive and not self.ended:  # what starts the ranks hangs, such as an import of the file's
            pids = dict.fromkeys(self.backends, 0)
        failure = self.timeout.look(now_s, _time_stamp(), self.ended, pids)
        if failure is None or self.kill_at_s is not None:
            return
        rank = failure["rank"]
        self.deaths[-1 if rank is None else rank] = failure
        self.kill_at_s = now_s
        self._kill()
        for backend in set(self.backends.values()) - {self.backends[rank] for rank in self.alive}:
            backend.kill()  # it has started none of its ranks

    def _is_held_open(self) -> bool:
        """Return True if all processes have ended, and only a process that one of them left behind holds its output.

        Without this limit a program that a rank started in a session of its own would keep the job open for as long as
        it has the pipe.
        """
        if len(self.ended.keys() | self.gone) < len(self.backends):
            self.all_ended_s = None  # a process of a server job has been started again
        elif self.all_ended_s is None:
            self.all_ended_s = self.clock.now_s()
            # The fork server of a job with parameter servers doesn't end with its last process: it may be told to
            # start one again.
            for backend in set(self.backends.values()):
                backend.finish()
        return self.all_ended_s is not None and self.clock.now_s() - self.all_ended_s > HELD_S

    # --- HostEvents

    def on_output(self, rank: int, text: str) -> None:
        """Show a line that a rank has written; take in a failure that it could not write down."""
        failure = unwritten_failure(text)
        if failure is not None:
            self.unwritten[rank] = failure
            return
        source = rank if self._is_worker(rank) else self.replaced.name(rank)
        fault = self.output.add(source, text)
        self.screen.show_output(source, text)
        if fault:
            self.screen.say(
                f"paceline: what ranks print can't be kept in {self.output.path} ({fault}); it is shown here"
            )

    def on_lost(self, backend: HostBackend) -> None:
        """Take in that a fork server or a connection has ended: its ranks end with it, and then the others."""
        on_backend = {rank for rank, its_backend in self.backends.items() if its_backend is backend}
        lost = on_backend - self.ended.keys()
        self.gone |= lost
        for rank in lost:
            self.alive.pop(rank, None)
        if self._have_workers_ended() or not lost:
            return  # it has done its part; others may still be saving
        self.lost.append((backend, _time_stamp()))
        self.lost_s[backend] = self.clock.now_s()
        if self._goes_on_without(lost):
            self._leave_out(backend, lost)
            return
        self.kill_at_s = self.clock.now_s()  # also those that are only about to start
        self._kill()

    def _goes_on_without(self, lost: set[int]) -> bool:
        """Return True if the others can train on without a host's processes.

        They can if training is under way and parameter servers hold the parameters. They can't without the coordinator,
        nor without rank 0, which saves; under mode=sync not without any worker. They don't either if a process has
        already died and the job is ending for it, unless a stop has been asked for: then others may be saving.
        """
        request = self.request
        other_workers = set(range(request.ranks)) - lost
        is_useful = any(self.ended.get(rank, 0) == 0 for rank in other_workers)
        # The loss may be heard of before this turn has read the files: has the first step been taken, in which mode?
        self.progress.read()
        if self.news is not None:
            self.news.read()
        has_lost_worker = min(lost) < request.ranks
        needs_all = self.news is not None and self.news.mode == "sync" and has_lost_worker
        # Before the first step the coordinator waits for all, and nobody would come in the lost ones' place.
        has_begun = bool(request.servers) and not needs_all and self.progress.last is not None
        is_failing = bool(self.deaths) and not self.asked_to_stop
        coordinator = request.ranks + request.servers
        has_lost_indispensable = not lost.isdisjoint({0, coordinator})
        return has_begun and is_useful and not is_failing and not has_lost_indispensable

    def _leave_out(self, backend: HostBackend, lost: set[int]) -> None:
        self.survived.add(backend)
        self.left_out |= lost  # `_have_workers_succeeded` does not ask for their success
        # Nothing more will be heard of them: without a status the job would wait for their end.
        self.ended.update(dict.fromkeys(lost, -signal.SIGKILL))
        names = ", ".join(self.replaced.name(rank) for rank in sorted(lost))
        self.screen.say(f"paceline: {backend.host} is lost; the others go on without {names}")
        self._end_if_all_workers_have()

    def _outwait_lost_coordinator(self) -> None:
        """Wait until the agent of a host that was lost with the coordinator has ended its ranks.

        The host may train on until its agent knows that it was lost, that is, until its lease ends. Nothing may take
        its place before.
        """
        coordinator = self.request.ranks + self.request.servers
        if not (self.request.assignments and self.request.servers and coordinator in self.gone):
            return
        lost_s = self.lost_s.get(self.backends[coordinator])
        if lost_s is None:
            return
        until_s = lost_s + OUTLIVED_S
        self.screen.say(
            f"paceline: waiting {OUTLIVED_S:g} s: a lost host that still runs ends its processes in that time"
        )
        signals_before = len(self.asked_to_stop)
        while self.clock.now_s() < until_s and len(self.asked_to_stop) == signals_before:  # a signal ends the wait
            time.sleep(_TICK_S)

    def _have_workers_ended(self) -> bool:
        return len(self._ended_workers()) == self.request.ranks

    def _end_if_all_workers_have(self) -> None:
        """Kill the servers, and their coordinator, when they have nobody left to serve."""
        if self._have_workers_ended():
            self._kill()

    def on_started(self, pids: dict[int, int]) -> None:
        """Take in that ranks have been started; `pids` has their processes by rank."""
        self.alive.update(pids)
        self.timeout.progress()
        self.replaced.started(pids, self.clock.now_s())  # a short life counts from here
        if self.has_told_ranks:  # the others were told before these were there
            self._tell_ranks(pids)
        self._end_if_all_workers_have()  # a server that comes back only now

    def on_ended(self, rank: int, status: int) -> None:
        """Take in that a rank has ended: have another take its place, or end the others."""
        self.alive.pop(rank, None)
        self.timeout.progress()
        if self._is_replaced(rank, status):
            return
        self.ended[rank] = status
        self.ended_at[rank] = _time_stamp()
        self._end_servers(rank, status)
        is_own_doing = self._is_own_doing(rank, status)
        if is_own_doing and status == -signal.SIGTERM:
            # SIGTERM came before the rank had set its handler (while it imported, for instance).
            # Without it the others can't save; workers of servers can, and a script of torch's may.
            if not self.request.servers and not self.request.is_plain:
                self._kill_after_settling()
        elif status != 0 and not is_own_doing:
            name = f"rank {rank}" if self._is_worker(rank) else self.replaced.name(rank)
            self.deaths.setdefault(rank, silent_death(rank, status, _time_stamp(), name))
            # After a request to stop others may be saving, whoever died: they keep the time that they have for it.
            if self.kill_at_s is None or not self.asked_to_stop:
                self._kill_after_settling()

    def _kill_after_settling(self) -> None:
        """Kill all ranks in SETTLE_S, or earlier where an earlier time is set."""
        set_before_s = self.kill_at_s or float("inf")
        self.kill_at_s = min(set_before_s, self.clock.now_s() + SETTLE_S)

    def _end_silent(self, rank: int | None, pid: int, silent_s: float) -> None:
        """Kill a process that the coordinator has given up, unless it has already ended; another takes its place.

        Process numbers are unique on one host only. If the rank is unknown and two hosts have a process of this number,
        none is killed: it might be a healthy one.

        Args:
            rank: the rank of the process; None for a server that never answered.
            pid: the process number.
            silent_s: the seconds for which it has not answered.
        """
        matching = []
        for alive_rank, alive_pid in self.alive.items():
            if alive_pid == pid and rank in (None, alive_rank):
                matching.append(alive_rank)
        if len(matching) != 1:
            return
        (silent_rank,) = matching
        name = self.replaced.name(silent_rank)
        self.screen.say(f"paceline: {name} has been silent for {silent_s:.0f} s: killing it")
        self.backends[silent_rank].signal([silent_rank], signal.SIGKILL)

    def _end_stopped(self, local_pids: dict[int, int]) -> None:
        """Kill processes of this host that have long been stopped (SIGSTOP) before the servers start.

        Once the servers run, the coordinator gives up a process that is silent. Before that it may not have heard of
        the process at all, and the job would wait for it for ever. A process that runs, and takes long to load its
        data, is not ended: only the kernel's state T counts.
        """
        now_s = self.clock.now_s()
        stopped = [rank for rank, pid in local_pids.items() if process_state(pid) == "T"]
        # A rank that runs again is no longer in it: its time begins anew when it is stopped again.
        self.stopped_s = {rank: self.stopped_s.get(rank, now_s) for rank in stopped}
        for rank, since_s in self.stopped_s.items():
            if now_s - since_s > silence_s(os.environ):
                self._end_silent(rank, local_pids[rank], now_s - since_s)

    def _is_worker(self, rank: int) -> bool:
        """Return True for a rank that trains, False for a parameter server or the coordinator."""
        return not self.request.servers or rank < self.request.ranks

    def _end_servers(self, rank: int, status: int) -> None:
        """Kill the servers after the last worker; give workers little time once the coordinator has ended well."""
        request = self.request
        if self._have_workers_ended():
            self._kill()
        # The coordinator has the last number. It ends with 0 only when the training is over.
        elif request.servers and rank == request.ranks + request.servers and status == 0:
            self.is_over = True
            self.kill_at_s = self.clock.now_s() + LEFT_BEHIND_S

    def _is_replaced(self, rank: int, status: int) -> bool:
        """Start another process in this one's place, unless the job is ending; True if one was started."""
        is_stopping = bool(self.asked_to_stop) or self.is_regroup
        is_being_killed = self.kill_at_s is not None or rank in self.killed
        if is_stopping or is_being_killed:
            return False
        if not self.replaced.should(rank, status, self.clock.now_s()):
            return False
        name = self.replaced.name(rank)
        self.screen.say(f"paceline: {name} was ended by {signal_name(-status)}; another takes its place")
        self.backends[rank].restart(rank)
        return True

    def _ended_workers(self) -> dict[int, int]:
        return {rank: status for rank, status in self.ended.items() if self._is_worker(rank)}

    def _is_own_doing(self, rank: int, status: int) -> bool:
        """Return True if the supervisor's own signal ended the rank: a kill, or a stop before its handler was set."""
        was_asked = self.has_told_ranks and status == -signal.SIGTERM
        was_killed = rank in self.killed and status == -signal.SIGKILL
        return was_asked or was_killed

    def _catch_signals(self) -> None:
        def on_signal(number: int, _: object) -> None:
            self.asked_to_stop.append(number)

        # The handler only keeps the number. Anything more could interrupt a write to the screen or to an agent halfway.
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            caught.append(signal.SIGHUP)
        self.signals_before = {}
        for number in caught:
            self.signals_before[number] = signal.signal(number, on_signal)

    def restore_signals(self) -> None:
        """Set the signal handlers that were there before `run`."""
        for number, handler in self.signals_before.items():
            signal.signal(number, handler)
        self.signals_before = {}

    def _pass_on_stop(self, now_s: float) -> None:
        # The ranks are told once to save and stop; the second signal kills them.
        # Before the first process has started, the stop waits until there is one.
        if not (self.asked_to_stop or self.is_regroup) or not self.alive:
            return
        if len(self.asked_to_stop) >= 2:
            self._kill()
        elif not self.has_told_ranks:
            self.has_told_ranks = True
            self.kill_at_s = now_s + self.request.grace_s
            if not self.request.grace_s or self.request.is_plain:
                self.screen.say("stopping")
            elif self.asked_to_stop:
                self.screen.say("stopping: finishing the step and saving; once more to kill")
            else:
                self.screen.say("other hosts: finishing the step and saving")
            self._tell_ranks(self.alive)

    def _tell_ranks(self, ranks: Iterable[int]) -> None:
        """Ask those of `ranks` that train to save and stop, with one call for each host."""
        for backend in set(self.backends.values()):
            workers = [rank for rank in ranks if self.backends[rank] is backend and self._is_worker(rank)]
            if workers:
                backend.signal(workers, signal.SIGTERM)

    def _kill(self) -> None:
        # Before the kill: their ends must be recognized as the supervisor's own doing.
        self.killed |= self.alive.keys()
        for backend in {self.backends[rank] for rank in self.alive}:
            backend.kill()

    def _add_hosts(self, ending: Ending) -> None:
        """Add to an ending the facts about the job's hosts; an elastic job decides by them whether to go on."""
        ending.is_regroup = self.is_regroup and not self.asked_to_stop and ending.status == "stopped"
        ending.lost_hosts = tuple(sorted({backend.host for backend, _ in self.lost}))
        # A signal from outside (the kernel for want of memory, an administrator) speaks against the host; an exception
        # in the file would come on any host.
        bad_hosts = set(ending.lost_hosts)
        for rank in self.deaths:
            if self._was_signalled(rank):
                bad_hosts.add(self.backends[rank].host)
        ending.bad_hosts = tuple(sorted(bad_hosts))
        ending.is_host_failure = not self.asked_to_stop and self._is_host_failure(ending.cause)

    def _is_host_failure(self, cause: dict[str, Any] | None) -> bool:
        """Return True if a failure is not an error of the user's file, so that other hosts may do better."""
        if not cause or "host" in cause or cause["type"] == STALLED:  # ranks that hung, or a lost connection
            return True
        if cause["rank"] is not None and self._was_signalled(cause["rank"]):
            return True
        return bool(cause["is_peer_loss"])

    def _was_signalled(self, rank: int) -> bool:
        return self.ended.get(rank, 0) < 0

    def _ending(self, progress: Progress, statuses: dict[HostBackend, int]) -> Ending:
        """Return the ending of the job.

        Args:
            progress: the job's progress, read to the end of its events.
            statuses: the exit codes of the backends.
        """
        # A stop that the ranks completed comes first: ranks killed after saving are no failures.
        stop = self._stop_signal()
        if stop and progress.has_stopped:
            is_saved = progress.saved_step == progress.stopped_step
            # SIGTERM asks for a checkpoint and an end: where there are both, the job did what was asked.
            exit_code = 0 if is_saved and stop == signal.SIGTERM else 128 + stop
            return self._stopped(exit_code)
        if self._have_workers_succeeded():
            if progress.has_stopped:  # the supervisor asked nobody: SIGTERM was sent to a rank itself
                return Ending("stopped", 128 + signal.SIGTERM, stop_sent_to=_named(progress.asked_to_stop))
            return Ending("done", 0)  # also when the signal came too late to stop anything
        # What a rank wrote down of its end says more than what its process's status does.
        failures = list({**self.deaths, **self.unwritten, **read_failures(self.request.run_dir)}.values())
        host_failures = {backend: backend.failure(statuses[backend], at) for backend, at in self.lost}
        for backend, failure in host_failures.items():
            if backend not in self.survived:
                failures.append(failure)
        # A stop before the first step, or one that had to be forced, kills ranks on purpose.
        if stop and all(failure["is_peer_loss"] for failure in failures):
            return self._stopped(128 + stop)
        failures += self._left_early(failures)
        if not failures:  # only hosts that the job survived: nothing else explains the end
            return self._failed(list(host_failures.values()))
        for failure in failures:
            # A dead process could not write down its step: it was in the one after the last that was recorded.
            if failure["type"] == "ProcessDied" and progress.last is not None:
                failure["step"] = progress.last["step"] + 1
        return self._failed(failures)

    def _stop_signal(self) -> int | None:
        """Return the signal that asked for a stop; SIGTERM also where the hosts change."""
        if self.asked_to_stop:
            return self.asked_to_stop[0]
        return signal.SIGTERM if self.is_regroup else None

    def _stopped(self, exit_code: int) -> Ending:
        return Ending("stopped", exit_code, stop_sent_to=THE_COMMAND if self.asked_to_stop else "")

    def _failed(self, failures: Sequence[dict[str, Any]]) -> Ending:
        if not failures:  # all were killed on purpose: they hung
            return Ending("failed", 1, None, self.request.ranks)
        cause = first_cause(failures)
        is_of_rank = cause["rank"] is not None
        return Ending("failed", cause["exit_code"], cause, self.request.ranks - is_of_rank)

    def _have_workers_succeeded(self) -> bool:
        """Return True if all workers ended with 0, except those that the others went on without."""
        if not self._have_workers_ended():
            return False
        ended = self._ended_workers()
        left_behind = set(self.left_out)
        if self.is_over:  # the training went on to its end without those that were then killed
            left_behind |= self.killed
        return not any(ended[rank] for rank in ended.keys() - left_behind)

    def _left_early(self, failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the failure of the first rank that ended with 0, if all failures are of ranks that lost a peer.

        That rank is the lost peer: it left the loop before the others. In any other case, and always with parameter
        servers, the list is empty.
        """
        ended_well = [rank for rank, status in self._ended_workers().items() if status == 0]
        is_explained = bool(self.lost) or not all(failure["is_peer_loss"] for failure in failures)
        if self.request.servers or not failures or is_explained or not ended_well:
            return []
        return [left_early(ended_well[0], self.ended_at[ended_well[0]])]


def _named(ranks: Sequence[int]) -> str:
    """Return ranks as they stand in a sentence."""
    if not ranks:
        return "a rank"
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def private_folder() -> PrivateFolder:
    """Make a folder that only this user can enter, with a path short enough for the sockets in it.

    Raises:
        UsageError: it can't be made.
    """
    try:
        folder = tempfile.gettempdir()
        return make_private("/tmp" if len(folder) > _LONGEST_FOLDER else folder)
    except OSError as error:
        raise UsageError(
            "can't make a temporary folder for the job's sockets",
            f"it can't be made ({error.strerror})",
            how_to_write(error, "with the variable TMPDIR"),
        ) from None


def _time_stamp() -> float:
    return time.time_ns() / 1e9
