"""Send a job to a cluster's scheduler, and return.

`paceline submit slurm --help` and `paceline submit kubernetes --help` list what
each of them takes. `--dry-run` prints what would be sent, and sends nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline.cli.flags import check_kubernetes_options
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
from paceline.cli.run_command import settings_of
from paceline.launch.host_choice import Shape, choose_ranks
from paceline.launch.kubernetes import submit as kubernetes
from paceline.launch.kubernetes.kubernetes_request import (
    KubernetesOptions,
    KubernetesRequest,
    check_no_secret,
    kubernetes_job,
)
from paceline.launch.plan_choice import says_ranks
from paceline.launch.rank_command import environment_of, quoted
from paceline.launch.slurm import SlurmOptions
from paceline.nouns.errors import UsageError
from paceline.run.cluster_file import ClusterSettings
from paceline.run.job_settings import JOB, KUBERNETES, SLURM, TABLES, Setting
from paceline.run.request import stall_notice_of
from paceline.run.start.send_to_slurm import SlurmRequest, send_to_slurm, slurm_script
from paceline.run.supervise.interrupts import interruptible

_SLURM = """Send a job to Slurm with sbatch: a task for each rank. Print the job's number.

Before the time limit the ranks save, and the job goes back to the queue. See
docs/hosts.md. RUNS/JOB must be on a file system that all nodes share.
"""
_KUBERNETES = """Send a job to Kubernetes with kubectl: a pod for each node.

FILE is a path inside the image. The manifests are checked before they are sent.
See docs/kubernetes.md. Give --image, --cpu and --memory here or in --cluster.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, those of each target."""
    parser.usage = "paceline submit {slurm,kubernetes} [options] FILE ..."
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    slurm = targets.add_parser(
        "slurm",
        prog="paceline submit slurm",
        help="with sbatch",
        allow_abbrev=False,
        usage="paceline submit slurm [options] FILE ...",
        description=_SLURM,
        formatter_class=OneLineHelp,
    )
    _add_slurm(slurm)
    pods = targets.add_parser(
        "kubernetes",
        prog="paceline submit kubernetes",
        help="with kubectl",
        allow_abbrev=False,
        usage="paceline submit kubernetes [options] FILE ...",
        description=_KUBERNETES,
        formatter_class=OneLineHelp,
    )
    _add_kubernetes(pods)


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, _settings(SLURM), SLURM, {"hosts": "nodes"})
    add_file(parser)


def _add_kubernetes(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, _settings(KUBERNETES), KUBERNETES, {"hosts": ""})
    add_file(parser, "workload file; with --check, the manifests")


def _settings(target: str) -> list[Setting]:
    """Return the settings that a target's command has flags for."""
    return [*(setting for setting in JOB.values() if target in setting.places), *TABLES[target].values()]


def run(arguments: argparse.Namespace) -> int:
    """Send the job."""
    sending = _submit_to_slurm if arguments.target == "slurm" else _submit_to_kubernetes
    with interruptible() as interrupted:
        return sending(arguments)
    print("paceline submit: stopped before the job was sent", file=sys.stderr)
    return 128 + interrupted[0]


def _submit_to_slurm(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments, "slurm")
    with settings.naming_sources():
        request = slurm_request(arguments, settings)
        if arguments.dry_run:
            print(slurm_script(request, print_notice))
            return 0
        job = send_to_slurm(request, print_notice)
    if arguments.json:
        print(json.dumps({"job": job.run_dir.name, "run_dir": str(job.run_dir), "slurm_job": job.number}))
    else:
        print(job.number)
    log = quoted([str(job.log)])
    print_notice(f"paceline submit: sent as job {job.number}; look with `squeue -j {job.number}` and `tail -f {log}`")
    return 0


def slurm_request(arguments: argparse.Namespace, settings: ClusterSettings) -> SlurmRequest:
    """Make the request of a job for Slurm."""
    values = settings.values
    shape = Shape.parse(arguments.shape)
    return SlurmRequest(
        file=arguments.workload,
        arguments=tuple(arguments.arguments),
        plan=plan_request(arguments, choose_ranks(arguments.n, shape, (), says_ranks(arguments.plan or ""))),
        run=run_choice(arguments),
        options=SlurmOptions(
            values["partition"],
            values["account"],
            values["qos"],
            values["time"],
            values["gpus_per_node"],
            values["cpus_per_task"],
            values["signal"],
            more=values["sbatch_option"],
        ),
        shape=shape,
        environment={**environment_of(arguments.env), **module_variable(arguments)},
        interface=values["interface"],
        python=values["python"],
        stall_timeout_s=stall_timeout(arguments, stall_notice_of(None, arguments.env)),
    )


def _submit_to_kubernetes(arguments: argparse.Namespace) -> int:
    if arguments.check:
        return _check(arguments)
    settings = settings_of(arguments, "kubernetes")
    with settings.naming_sources():
        job = kubernetes_job(kubernetes_request(arguments, settings), print_notice)
        manifests = kubernetes.render(job)
    remarks = kubernetes.notes(job)
    if arguments.dry_run:
        print(kubernetes.to_text(manifests, remarks), end="")
        return 0
    for remark in remarks:
        print_notice(f"paceline submit: {remark}")
    print(kubernetes.send(manifests, settings.values["context"]), end="")
    print_notice(f"paceline submit: sent; `kubectl -n {job.namespace} get pods` shows its pods")
    return 0


def kubernetes_request(arguments: argparse.Namespace, settings: ClusterSettings) -> KubernetesRequest:
    """Make the request of a job for Kubernetes."""
    check_no_secret(arguments.env)  # before `environment_of` asks to set one
    options = KubernetesOptions(**settings.values)
    check_kubernetes_options(options, settings.subjects)
    shape = Shape.parse(arguments.shape)
    return KubernetesRequest(
        file=arguments.workload,
        arguments=tuple(arguments.arguments),
        plan=plan_request(arguments, choose_ranks(arguments.n, shape, (), says_ranks(arguments.plan or ""))),
        options=options,
        subjects=settings.subjects,
        job=arguments.job,
        shape=shape,
        environment=environment_of(arguments.env),
        # Variables of this process are not those of the pods.
        stall_timeout_s=stall_timeout(arguments, stall_notice_of(None, arguments.env, {})),
    )


def _check(arguments: argparse.Namespace) -> int:
    """Check the manifests in a file."""
    for name, flag in arguments.flags.items():
        if name != "check":
            reason = "manifests are checked as they stand in FILE"
            raise UsageError(f"{flag} does not apply with --check", reason, f"leave {flag} out, or --check")
    file = Path(arguments.workload)
    manifests = kubernetes.read_manifests(file)
    kubernetes.check(manifests)
    print(f"{file}: {len(manifests)} manifests pass all checks")
    return 0
