"""Run an elastic job: generation after generation, each on the hosts that there are when it begins."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.launch.hosts import Host, parse_hosts
from paceline.launch.rank_assignment import seat
from paceline.launch.ssh import ssh_command
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.errors import PacelineError, ReadError, UsageError, WorkloadError, how_to_write
from paceline.nouns.mesh import AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.reading import parse_whole, read_text, write_whole
from paceline.run import directory
from paceline.run.failures import in_one_line, refusal
from paceline.run.supervise.agent import OUTLIVED_S
from paceline.run.supervise.host_agents import FleetOptions, HostError, open_posts
from paceline.run.supervise.interrupts import Interrupted
from paceline.run.supervise.membership import WAIT_S, GiveUp, Membership, Regroup, Rules, Start, Wait
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.supervised_job import finish
from paceline.run.supervise.supervisor import Ending, JobRequest, Supervisor

# Seconds.
DISCOVER_S = 1.0  # the time between two looks, as Horovod has it
SCRIPT_S = 30.0  # the time that the script may take
GENERATION = "generation"  # a file of the run directory


@dataclass(slots=True)
class Elastic:
    """A job that goes on while hosts come and go.

    Args:
        rules: the limits on hosts, restarts and failures.
        discover: the function that lists the hosts that there are now; raises UsageError when that can't be known.
        fleet: the ways to reach the hosts.
        plan: the plan for any number of ranks: its `replicate` or `shard` axis grows and shrinks.
        request: the job's request; ranks and assignments are replaced in each generation.
        screen: the screen that shows messages and output to the user.
    """

    rules: Rules
    discover: Callable[[], Sequence[Host]]
    fleet: FleetOptions
    plan: Plan
    request: JobRequest
    screen: Screen
    wait_s: float = WAIT_S
    progress: Progress | None = None  # the progress of the newest generation that has begun

    def run(self) -> tuple[Ending, Progress, dict[str, object]]:
        """Run the job to its end, and write its result.

        Raises:
            UsageError: there were not enough hosts for the first generation.
        """
        try:
            ending, progress = self._generations()
        except (PacelineError, Interrupted) as error:  # between two generations
            if self.progress is None:
                raise
            ending = _ended_by(error)
            progress = self.progress
        return ending, progress, finish(self.request.run_dir, ending, progress, self.screen.say, self.request.owned)

    def _generations(self) -> tuple[Ending, Progress]:
        members = Membership(self.rules, generation=last_generation(self.request.run_dir))
        while True:
            members, start = self._next(members)
            try:
                ending, progress, members = self._generation(members, start)
            except HostError as error:  # no rank has started, so there is no lease to wait out
                self.screen.say(f"paceline: {error.asked}: {error.found}")
                members = members.not_ready(error.hosts)
                time.sleep(DISCOVER_S)
                continue
            if not _goes_on(ending):
                return ending, progress
            self.screen.say(f"paceline: generation {start.generation} ended: {_reason_of(ending)}")
            members, decision = members.ended(ending.bad_hosts, ending.status == "failed")
            if isinstance(decision, GiveUp):
                self.screen.say(f"paceline: no other generation: {decision.reason}")
                return ending, progress

    def _next(self, members: Membership) -> tuple[Membership, Start]:
        """Return the next generation, as soon as there are hosts enough.

        Raises:
            UsageError: there are not within `wait_s`.
        """
        began_s = time.monotonic()
        shown = ""
        while True:
            members = self._listed(members)
            members, decision = members.discovered(self._discover(members))
            if isinstance(decision, Start):
                lacking = self._lacking(decision.hosts)
                if lacking is None:
                    return members, decision
                # It has not begun: its number stays free, and no host is in it.
                members = replace(members, hosts=(), generation=members.generation - 1)
                decision = Wait(lacking)
            assert isinstance(decision, Wait)
            if decision.reason != shown:
                shown = decision.reason
                self.screen.say(f"paceline: waiting for hosts: {shown}")
            if time.monotonic() - began_s > self.wait_s:
                raise UsageError(
                    f"enough hosts should be there within {self.wait_s:g} s", shown, "start hosts, or lower --min-hosts"
                )
            time.sleep(DISCOVER_S)

    def _discover(self, members: Membership) -> Sequence[Host]:
        """Return the hosts that there are now; the known ones if the discovery fails.

        A host on which a rank has failed before is asked over ssh first. Otherwise a dead host that the script still
        lists would be taken again and again, up to its patience. A host of the present generation is not asked: its
        agent's connection says whether it lives.

        Raises:
            UsageError: none is known yet.
        """
        try:
            listed = self.discover()
            in_generation = {host.name for host in members.hosts}
            doubtful = members.failures.keys() - in_generation
            hosts = []
            for host in listed:
                if host.name not in doubtful or self._answers(host):
                    hosts.append(host)
            return hosts
        except PacelineError as error:
            if not members.known:
                raise
            self.screen.say(f"paceline: {error.asked}: {error.found}; the job keeps the hosts that it knows")
            return members.known

    def _listed(self, members: Membership) -> Membership:
        # By the discovery's own list: a host that only can't be reached has not left it, and keeps its failures.
        with contextlib.suppress(PacelineError):
            return members.listed([host.name for host in self.discover()])
        return members

    def _answers(self, host: Host) -> bool:
        """Return True if a host can be reached over ssh at all."""
        # Of an option that is there twice ssh takes the first: this one stands before those of launch/ssh.py.
        quick = dataclasses.replace(self.fleet.ssh, more=(*self.fleet.ssh.more, "-oConnectTimeout=5"))
        command = ssh_command(host.name, ["true"], quick)
        try:
            completed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SCRIPT_S)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return completed.returncode == 0

    def _fitting(self, slots: int) -> Plan:
        """Return the plan for so many slots, or for fewer where the file says that its batch has fewer samples."""
        least = fixed_size(self.plan)
        for ranks in range(slots, least, -1):
            plan = rescaled(self.plan, ranks)
            with contextlib.suppress(WorkloadError):
                read_workload_file(str(self.request.script), plan.data_size)
                return plan
        return rescaled(self.plan, least)

    def _lacking(self, hosts: Sequence[Host]) -> str | None:
        """Return the sentence that these hosts can't hold one copy of the model; None: they can."""
        slots = sum(host.slots for host in hosts)
        least = fixed_size(self.plan)
        if slots >= least:
            return None
        return f"{slots} of at least {least} slots are there, for one copy of the model"

    def _generation(self, members: Membership, start: Start) -> tuple[Ending, Progress, Membership]:
        """Run one generation to its end.

        Raises:
            HostError: a host is not ready; no rank has started.
        """
        run_dir = self.request.run_dir
        # What this generation runs: the plan for its slots, from the newest good checkpoint.
        plan = self._fitting(sum(host.slots for host in start.hosts))
        host_ranks = seat(start.hosts, plan.world_size)
        # Before the checkpoint is chosen: a rank of an older generation that is still somewhere reads the token before
        # it saves, and refuses (train/prepare.py). Else it could add a checkpoint after the choice.
        if self.request.owned is not None:
            self.request.owned.renew()
        directory.write_start(run_dir, plan, self.request.script, self.request.arguments)
        _write_generation(run_dir, start.generation)
        resume = directory.find_resume_point(run_dir, lambda text: None)
        hosts = ", ".join(f"{ranks.host}:{ranks.count}" for ranks in host_ranks)
        origin = f", from {resume.name}" if resume else ""
        self.screen.say(f"paceline: generation {start.generation}: {hosts}{origin}")
        # Agents first: a host that is not ready ends the generation before any rank has started.
        assignments = open_posts(host_ranks, self.request.script, run_dir, self.fleet)
        request = dataclasses.replace(self.request, ranks=plan.world_size, assignments=assignments, resume=resume)
        with _Watch(members, self._discover) as watch:
            supervisor = Supervisor(request, self.screen, should_stop=watch.should_stop)
            try:
                ending, progress = supervisor.run()
            finally:
                supervisor.restore_signals()
        self.progress = progress
        if ending.lost_hosts:  # their ranks may still be there until the agents' leases have ended
            time.sleep(OUTLIVED_S)
        return ending, progress, watch.members


def last_generation(run_dir: Path) -> int:
    """Return the number of a run's newest generation."""
    try:
        return parse_whole(read_text(run_dir / GENERATION, 100).strip()) or 0
    except ReadError:
        return 0


def _write_generation(run_dir: Path, number: int) -> None:
    try:
        write_whole(run_dir / GENERATION, f"{number}\n")
    except OSError as error:
        asked, found = f"can't begin generation {number} in {run_dir}", f"it can't be written ({error.strerror})"
        raise UsageError(asked, found, how_to_write(error)) from None


def fixed_size(plan: Plan) -> int:
    """Return the number of ranks that hold one copy of the model, and of the data axis that does not grow."""
    mesh = Mesh.parse(plan.mesh)
    return mesh.world_size // mesh.size(_growing(mesh))


def _growing(mesh: Mesh) -> str:
    """Return the data axis that grows and shrinks with the number of ranks."""
    # With both axes, `shard` keeps the number of ranks that hold one copy of the model, and `replicate` grows.
    is_only_sharded = mesh.size("shard") > 1 and mesh.size("replicate") == 1
    return "shard" if is_only_sharded else "replicate"


class _Watch:
    """A thread that looks for hosts while a generation runs.

    The discovery script may take up to SCRIPT_S seconds; the supervisor's own loop must not wait for it. Only this
    thread writes `members` until `__exit__` has joined it.
    """

    def __init__(self, members: Membership, discover: Callable[[Membership], Sequence[Host]]) -> None:
        self.members = members
        self.discover = discover
        self.regroup = threading.Event()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(SCRIPT_S)

    def should_stop(self) -> bool:
        """Return True if the ranks are to save and end."""
        return self.regroup.is_set()

    def _look(self) -> None:
        while not self.over.wait(DISCOVER_S):
            self.members, decision = self.members.discovered(self.discover(self.members))
            if isinstance(decision, Regroup):
                self.regroup.set()
                return  # one change ends the generation; further changes are seen between two generations


def _goes_on(ending: Ending) -> bool:
    """Return True if another generation may do better: the user's own error would come again."""
    if ending.status == "failed":
        return ending.is_host_failure
    return ending.status == "stopped" and ending.is_regroup


def _ended_by(error: PacelineError | Interrupted) -> Ending:
    if isinstance(error, Interrupted):
        return Ending("stopped", 128 + error.number)
    return Ending("failed", error.exit_code, refusal(error, time.time_ns() / 1e9))


def rescaled(plan: Plan, ranks: int) -> Plan:
    """Return the plan for at most so many ranks: tensor and pipeline keep their sizes, the data axis takes the rest.

    Raises:
        UsageError: there are too few for one copy of the model.
    """
    mesh = Mesh.parse(plan.mesh)
    sizes = {axis: mesh.size(axis) for axis in AXES}
    fixed = fixed_size(plan)
    if ranks < fixed:
        raise UsageError(
            f"can't run the plan {plan.mesh} on {ranks} ranks",
            f"{fixed} hold one copy of the model",
            "raise --min-hosts or the slots",
        )
    sizes[_growing(mesh)] = ranks // fixed
    line = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    new_mesh = Mesh.parse(line or "replicate=1")
    return dataclasses.replace(plan, mesh=str(new_mesh)).settled()


def script_hosts(script: Path, slots: int = 1) -> Callable[[], tuple[Host, ...]]:
    """Return a function that runs a program which prints a host a line, `h1:4` or `h1`, and ends with 0.

    This is Horovod's protocol for host discovery.

    Args:
        script: the path of the program.
        slots: of a host without a number.

    Raises:
        UsageError: the program failed, or printed a line that names no host.
    """

    def ask() -> tuple[Host, ...]:
        asked = f"the hosts of {script}"
        try:
            completed = subprocess.run(
                [str(script.resolve())], capture_output=True, text=True, errors="replace", timeout=SCRIPT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            fix = "make it a program that prints a host a line"
            if isinstance(error, PermissionError):
                fix = f"make it executable: chmod +x {script}"
            elif isinstance(error, OSError) and error.errno == errno.ENOEXEC:
                fix = "begin it with a line such as #!/bin/sh"
            raise UsageError(asked, f"it did not run ({error})", fix) from None
        if completed.returncode:
            errors = completed.stderr.strip().splitlines() or ["it printed nothing"]
            raise UsageError(asked, f"it ended with {completed.returncode}: {errors[-1]}", "run it by hand")
        words = [line.strip() for line in completed.stdout.splitlines() if line.strip()]
        lines = [word if ":" in word else f"{word}:{slots}" for word in words]
        return parse_hosts(",".join(lines)) if lines else ()

    return ask


def _reason_of(ending: Ending) -> str:
    if ending.status == "stopped":
        return "its hosts change"
    return in_one_line(ending.cause or {"message": "its ranks hung"})
