"""Start the job that a request asks for, or be a part of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.checkpoint.owner import Ownership
from paceline.launch.hosts import Host
from paceline.launch.plan_choice import choose_plan
from paceline.launch.rank_command import export_lines
from paceline.launch.ssh import check_ssh
from paceline.launch.workload_file import WorkloadFile, read_workload_file
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.plan import Plan
from paceline.rendezvous.launcher_env import LauncherPosition
from paceline.run import directory
from paceline.run.job_settings import ELASTIC
from paceline.run.request import RunRequest
from paceline.run.start.backends import assignments_of, check_hosts, check_programs, dry_run, fleet_options, job_of
from paceline.run.start.outcome import JobEnd, Outcome
from paceline.run.start.plain_job import plain_request
from paceline.run.start.rank import become_rank
from paceline.run.start.start_node import run_node
from paceline.run.start.start_servers import check_servers
from paceline.run.supervise.elastic import Elastic, script_hosts
from paceline.run.supervise.host_agents import end_watch
from paceline.run.supervise.membership import Rules
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.restarts import Restarts, check_restarts
from paceline.run.supervise.supervised_job import run_job
from paceline.run.supervise.supervisor import JobRequest

Notice = Callable[[str], None]


def start(request: RunRequest, outcome: Outcome, notice: Notice) -> None:
    """Carry out a request, and write the outcome into `outcome`.

    Args:
        request: a request for a job, or for a part of one.
        outcome: the outcome, which is filled in as soon as it is known.
        notice: a function that is called with each message to the user before the job starts.

    Raises:
        PacelineError: the request can't be met.
    """
    if isinstance(request.launcher, LauncherPosition):
        become_rank(request, request.launcher, notice)
    elif request.launcher is not None:
        run_node(request, request.launcher, outcome, notice)
    elif request.place == ELASTIC:
        _run_elastic(request, outcome, notice)
    else:
        _run_fixed(request, outcome, notice)


def screen_of(request: RunRequest) -> Screen:
    """Return the screen that shows the job; with --json standard output has only the result."""
    return Screen(sys.stderr if request.is_json else sys.stdout, sys.stderr)


def _run_fixed(request: RunRequest, outcome: Outcome, notice: Notice) -> None:
    """Run the job on hosts that stay."""
    check_restarts(request.max_restarts)
    plan = choose_plan(request.plan, notice)
    check_hosts(request, plan, notice)
    file = read_workload_file(request.file, plan.data_size, plan, request.module)
    file.check_flags(request.flags)
    request = plain_request(request, file.path, file.plain, plan.world_size, notice)
    _report_plain_file(file, notice)
    if request.is_dry_run:
        outcome.dry_run = dry_run(request, plan, request.run.planned_folder(file.path), file.path)
        return
    check_programs(request, plan)  # before the run directory is made
    screen = screen_of(request)
    if request.place == "local" and plan.world_size > (os.cpu_count() or 1):
        screen.say(f"paceline: {plan.world_size} ranks share {os.cpu_count()} cores: they will take turns")
    owned, resume = directory.choose_run(
        request.run, file.path, lambda text: screen.say(f"paceline: {text}"), plan.copy_to
    )
    with owned:
        job = _job_request(request, plan, file, owned, resume)
        try:
            assign = partial(assignments_of, request, plan, job.run_dir, file.path)
            ending, progress, result = run_job(plan, job, screen, Restarts(request.max_restarts, assign))
            outcome.end = JobEnd(job.run_dir, ending, progress, result, job.is_plain)
        except PacelineError:
            directory.remove_unbegun(job.run_dir)
            raise
        finally:  # the certificates for `paceline server top`, also when the job failed
            if job.assignments and job.servers:
                end_watch(job.run_dir)


def _report_plain_file(file: WorkloadFile, notice: Notice) -> None:
    """Print for the user that a file may train without Paceline: its ranks are then no job."""
    if file.names_paceline or file.plain is not None:
        return
    notice(
        f"note: {file.path} does not import paceline, nor do the files of its folder that it imports; if no installed "
        "package that it imports does, every rank runs it by itself"
    )


def _job_request(
    request: RunRequest, plan: Plan, file: WorkloadFile, owned: Ownership, resume: Path | None
) -> JobRequest:
    """Reach the hosts, and return the job to supervise."""
    folder = owned.folder
    try:
        assignments = assignments_of(request, plan, folder, file.path)
    except BaseException:  # Ctrl-C too: a run that did not begin leaves no folder, and its name stays free
        directory.remove_unbegun(folder)
        raise
    # Elsewhere the variables are in what starts the ranks.
    environment = dict(request.environment) if request.place == "local" or file.plain is not None else {}
    job = job_of(request, plan, file, folder, owned)
    return replace(job, resume=resume, servers=plan.server, assignments=assignments, environment=environment)


def _run_elastic(request: RunRequest, outcome: Outcome, notice: Notice) -> None:
    """Run the job on the hosts that there are, generation after generation."""
    rules, discover = elastic_rules(request)
    plan = choose_plan(request.plan, notice, grows=True)
    check_servers(plan, "elastic")
    # How many ranks there are is only known in each generation.
    file = read_workload_file(request.file, 1, module=request.module)
    file.check_flags(request.flags)
    request = plain_request(request, file.path, file.plain, 1, notice)
    _report_plain_file(file, notice)
    now = ", ".join(host.name for host in discover())  # asked before anything is written, too
    if request.is_dry_run:
        hosts = f"# between {rules.least} and {rules.most} hosts; now: {now}"
        outcome.dry_run = "\n".join([hosts, *export_lines(request.environment)])
        return
    check_ssh(request.ssh)
    screen = screen_of(request)
    owned, _ = directory.choose_run(request.run, file.path, lambda text: screen.say(f"paceline: {text}"), plan.copy_to)
    job = job_of(request, plan, file, owned.folder, owned)
    elastic = Elastic(rules, discover, fleet_options(request), plan, job, screen, request.limits.wait_s)
    with owned:
        try:
            ending, progress, result = elastic.run()
            outcome.end = JobEnd(owned.folder, ending, progress, result)
        except BaseException:
            directory.remove_unbegun(owned.folder)
            raise


def elastic_rules(request: RunRequest) -> tuple[Rules, Callable[[], Sequence[Host]]]:
    """Return the limits on the number of hosts, and a function that lists the hosts that there are now.

    Raises:
        UsageError: the numbers contradict each other, or nothing names hosts.
    """
    hosts = request.hosts
    limits = request.limits
    if hosts and limits.script:
        raise UsageError(
            "the job's hosts should be named once", "they are named, and there is a script", "leave one out"
        )
    if not hosts and limits.script is None:
        raise UsageError(
            "--min-hosts and --max-hosts need hosts",
            "no host is named",
            "write --on ssh, and -H, --hostfile or --host-discovery-script",
        )
    if request.plan.ranks is not None or request.shape is not None:
        raise UsageError(
            "-n and -j do not apply to hosts that come and go", "the ranks are as many as their slots", "leave it out"
        )
    least = 1 if limits.least is None else limits.least
    most = limits.most
    if most is None:
        most = max(least, len(hosts) or sys.maxsize)  # a script may name any number of hosts
    if not 1 <= least <= most:
        raise UsageError(
            "--min-hosts should be at least 1 and not above --max-hosts",
            f"they are {least} and {most}",
            "let 1 <= min <= max",
        )
    rules = Rules(least, most, limits.restarts)
    if limits.script is None:
        return rules, lambda: hosts
    return rules, script_hosts(limits.script, limits.slots)
