"""Train as planned: start the ranks, show their progress, end them together.

Each rank runs FILE as `python FILE` would. Started by torchrun, mpirun or srun,
or in a pod, this command becomes the rank, or starts the ranks of its node.
`paceline submit` sends a job to Slurm or Kubernetes instead.

RUNS/JOB keeps the job's plan, events, failures, checkpoints and result.

Exit codes: 0 done, or stopped by SIGTERM with a checkpoint; 1 the job failed;
2 the request can't be met; 124 ended by --stall-timeout; 129, 130 stopped by
SIGHUP, Ctrl-C; 143 stopped by SIGTERM without a checkpoint of its last step, or
by one sent to a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

from paceline.cli.flags import check_place, check_rules
from paceline.cli.plan_flags import (
    OneLineHelp,
    add_file,
    add_settings,
    module_variable,
    plan_request,
    print_notice,
    run_choice,
    stall_timeout,
)
from paceline.launch.host_choice import Shape, choose_hosts, choose_ranks
from paceline.launch.mpi import MpiOptions
from paceline.launch.plan_choice import says_ranks
from paceline.launch.rank_command import environment_of
from paceline.launch.ray import RayOptions
from paceline.launch.ssh import SshOptions
from paceline.nouns.errors import UsageError, did_you_mean
from paceline.run.cluster_file import ClusterSettings, read_cluster_file
from paceline.run.job_settings import ELASTIC, GRACE_S, JOB, PLACES, RUN_PLACES
from paceline.run.request import HostLimits, RunRequest, find_launcher, place_of, stall_notice_of
from paceline.run.start.outcome import JobEnd, Outcome
from paceline.run.start.start_job import start
from paceline.run.supervise.interrupts import interruptible
from paceline.train.profile_files import VARIABLE as PROFILE
from paceline.train.profile_files import wanted_steps

USAGE = "paceline run [options] FILE ..."
_SUBMIT_TARGETS = ("slurm", "kubernetes")  # there jobs are sent, and nothing stays to supervise them
_TABLES = {"ssh": "ssh", ELASTIC: "ssh", "mpi": "mpi", "ray": "ray"}  # the table of the cluster file, by place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; those after the file are the file's own."""
    parser.usage = USAGE
    parser.formatter_class = OneLineHelp
    add_settings(parser, [setting for setting in JOB.values() if setting.places & RUN_PLACES])
    add_file(parser)


def run(arguments: argparse.Namespace, change: Callable[[RunRequest], RunRequest] | None = None) -> int:
    """Start the job, or be a part of it.

    Args:
        arguments: the parsed arguments of the command.
        change: a function that returns the request to carry out, for what the command has no flag for.
    """
    # Outside of the supervisor's time a signal unwinds to here. `outcome` tells whether the job had ended by then.
    outcome = Outcome()
    with interruptible() as interrupted:
        request, settings = make_request(arguments)
        if change is not None:
            request = change(request)
        with settings.naming_sources():
            start(request, outcome, print_notice)
        _print(outcome, request.is_json)
    if outcome.exit_code is not None:
        return outcome.exit_code
    print("paceline run: stopped before the job started", file=sys.stderr)
    return 128 + interrupted[0]


def make_request(arguments: argparse.Namespace) -> tuple[RunRequest, ClusterSettings]:
    """Make the request, and return it with the settings of the launcher.

    Raises:
        UsageError: a flag does not apply to such a job, or an argument or the cluster file can't be read.
    """
    _check_on(arguments.on)
    _check_grace(arguments.grace)
    notice_s = stall_notice_of(arguments.stall_notice, arguments.env)
    timeout_s = stall_timeout(arguments, notice_s)
    # First the role of this process (a rank, a node, or the starter of a job), then the launcher. Flags are checked
    # as soon as that is known: each applies in some places only.
    launcher = find_launcher(arguments.on, os.environ)
    limits = host_limits(arguments)
    place = place_of(launcher, arguments.on, arguments.job, limits)
    check_place(arguments.flags, place, launcher.source if launcher else "")
    check_rules("run", arguments)
    settings = settings_of(arguments, _TABLES.get(place, "ssh"))
    shape = Shape.parse(arguments.shape)
    hosts = choose_hosts(arguments.hosts, arguments.hostfile, shape)
    ranks = arguments.n
    if place in PLACES:  # elsewhere the launcher, or the hosts that there will be, say how many
        ranks = choose_ranks(ranks, shape, hosts, says_ranks(arguments.plan or ""))
    with settings.naming_sources():
        ssh, mpi, ray = _options(settings)
        request = RunRequest(
            file=arguments.workload,
            arguments=tuple(arguments.arguments),
            place=place,
            launcher=launcher,
            plan=plan_request(arguments, ranks),
            run=run_choice(arguments),
            hosts=hosts,
            shape=shape,
            limits=limits,
            environment=_variables(arguments),
            interface=settings.values.get("interface", arguments.interface),
            python=settings.values.get("python", arguments.python),
            ssh=ssh,
            mpi=mpi,
            ray=ray,
            grace_s=arguments.grace,
            stall_notice_s=notice_s,
            stall_timeout_s=timeout_s,
            max_restarts=arguments.max_restarts,
            is_json=arguments.json,
            is_dry_run=arguments.dry_run,
            flags=arguments.flags,
        )
    return request, settings


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables for the ranks by -x, --profile and -m."""
    profile = []
    if arguments.profile is not None:
        wanted_steps(arguments.profile, "--profile")
        profile = [f"{PROFILE}={arguments.profile}"]
    return {**environment_of([*arguments.env, *profile]), **module_variable(arguments)}


def _check_grace(seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"--grace {seconds:g}", "it is no number of seconds", f"write --grace {GRACE_S:g}")


def _check_on(on: str | None) -> None:
    if on is None or on in PLACES:
        return
    if on in _SUBMIT_TARGETS:
        found = "`paceline run` stays with the ranks until they end, and there nothing stays"
        raise UsageError(f"can't run a job --on {on}", found, f"write `paceline submit {on}`, which sends it")
    choices = (*PLACES, *_SUBMIT_TARGETS)
    raise UsageError(
        f"can't run a job --on {on}",
        f"the choices are {', '.join(PLACES)}",
        did_you_mean(on, choices, "write one of these"),
    )


def host_limits(arguments: argparse.Namespace) -> HostLimits:
    """Make the limits on hosts that come and go."""
    return HostLimits(least=arguments.min_hosts, most=arguments.max_hosts, script=arguments.host_discovery_script)


def settings_of(arguments: argparse.Namespace, table: str) -> ClusterSettings:
    """Return the settings of one launcher, from the flags and the cluster file."""
    flags = {name: (flag, getattr(arguments, name)) for name, flag in arguments.flags.items()}
    return read_cluster_file(arguments.cluster).settings(table, flags)


def _options(settings: ClusterSettings) -> tuple[SshOptions, MpiOptions, RayOptions]:
    """Return the options of all launchers; only those of the job's launcher differ from the defaults."""
    values = settings.values
    ssh, mpi, ray = SshOptions(), MpiOptions(), RayOptions()
    if settings.table == "ssh":
        ssh = SshOptions(values["program"], values["options"])
    elif settings.table == "mpi":
        mpi = MpiOptions(values["mpirun"], values["options"])
    else:
        ray = RayOptions(values["address"], values["cpus_per_rank"], values["gpus_per_rank"], values["strategy"])
    return ssh, mpi, ray


def _print(outcome: Outcome, is_json: bool) -> None:
    if outcome.dry_run is not None:
        print(outcome.dry_run)
    if outcome.end is not None:
        _print_end(outcome.end)
        if is_json and outcome.end.result is not None:
            print(json.dumps(outcome.end.result))


def _print_end(end: JobEnd) -> None:
    print(f"paceline run: {end.text()}", file=sys.stderr)
