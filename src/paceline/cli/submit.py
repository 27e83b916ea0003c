"""Send a job to a cluster's scheduler, and return.

`paceline submit slurm --help` and `paceline submit kubernetes --help` list what
each of them takes. `--dry-run` prints what would be sent, and sends nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paceline.cli.flags import check_kubernetes_options
from paceline.cli.plan_flags import (
    OneLineHelp,
    add_checkpoint_arguments,
    add_cluster_argument,
    add_file,
    add_module_argument,
    add_place_arguments,
    add_plan_arguments,
    add_run_arguments,
    add_stall_timeout,
    module_variable,
    plan_request,
    print_notice,
    run_choice,
    stall_timeout,
)
from paceline.cli.run import settings_of
from paceline.launch.cluster_file import TABLES, ClusterSettings
from paceline.launch.command import environment_of, quoted
from paceline.launch.host_choice import Shape, choose_ranks
from paceline.launch.kubernetes import submit as kubernetes
from paceline.launch.kubernetes.job import GANGS, KINDS, POD_GROUP_APIS
from paceline.launch.kubernetes.request import KubernetesOptions, KubernetesRequest, check_no_secret, kubernetes_job
from paceline.launch.plan_choice import says_ranks
from paceline.launch.slurm import SlurmOptions
from paceline.nouns.errors import UsageError
from paceline.run.request import stall_notice_of
from paceline.run.start.slurm import SlurmRequest, send_to_slurm, slurm_script
from paceline.run.supervise.interrupts import interruptible

_SLURM = """Send a job to Slurm with sbatch: a task for each rank. Print the job's number.

Before the time limit the ranks save, and the job goes back to the queue. See
docs/hosts.md. RUNS/JOB must be on a file system that all nodes share.
"""
_KUBERNETES = """Send a job to Kubernetes with kubectl: a pod for each node.

FILE is a path inside the image. The manifests are checked before they are sent.
See docs/kubernetes.md. Give --image, --cpu and --memory here or in --cluster.
"""
# Of each setting: how its value is called, and what it is. Kinds and defaults are those of the cluster file.
_SLURM_HELP = {
    "partition": ("NAME", "passed to sbatch"),
    "account": ("NAME", "passed to sbatch"),
    "qos": ("NAME", "passed to sbatch"),
    "time": ("TIME", "time limit, passed to sbatch: 12:00:00"),
    "gpus_per_node": ("N", "passed to sbatch (default 0)"),
    "cpus_per_task": ("N", "passed to sbatch (default: the cluster's)"),
    "signal": ("S", "seconds before the limit to save (default 120)"),
    "sbatch_option": ("WORD", "an #SBATCH line, as --exclusive; may repeat"),
    "interface": ("IF", "network interface for torch's sockets"),
    "python": ("PATH", "Python on the nodes (default: this one)"),
}
_JOB_HELP = {
    "image": ("IMAGE", "container image with Paceline and FILE"),
    "kind": ("KIND", f"{', '.join(KINDS)} (default {KINDS[0]})"),
    "namespace": ("NAME", "namespace (default: default)"),
    "context": ("NAME", "kubectl's context (default: its current one)"),
    "runs_claim": ("NAME", "PersistentVolumeClaim for run folders"),
    "max_restarts": ("N", "restarts of the whole job (default 3)"),
    "runtime": ("NAME", "ClusterTrainingRuntime of a TrainJob"),
}
_GANG_HELP = {
    "gang": ("WORD", f"{', '.join(GANGS)} (default {GANGS[0]})"),
    "queue": ("NAME", "queue of the gang's scheduler"),
    "placeholder_timeout": ("S", "seconds to place a gang (default 600)"),
    "pod_group_api": ("API", f"of native: {', '.join(POD_GROUP_APIS)}"),
    "priority_class": ("NAME", "PriorityClass of the pods"),
    "scheduler": ("NAME", "schedulerName, if not the usual one"),
}
_POD_HELP = {
    "cpu": ("N", "CPUs of a pod: request and limit"),
    "memory": ("SIZE", "memory of a pod: request and limit"),
    "shm": ("SIZE", "/dev/shm, part of the memory (default 1Gi)"),
    "gpus": ("N", "accelerators of a node (default 0)"),
    "accelerator": ("NAME", "their resource (default nvidia.com/gpu)"),
    "server_cpu": ("N", "CPUs of a server's pod (default: --cpu)"),
    "server_memory": ("SIZE", "memory of a server's pod (as --memory)"),
    "user": ("UID", "user in the pods (default 1000)"),
    "service_account": ("NAME", "ServiceAccount of the pods"),
    "node_selector": ("KEY=VALUE", "label of the nodes; may repeat"),
    "toleration": ("TAINT", "KEY[=VALUE][:EFFECT]; may repeat"),
    "image_pull_secret": ("NAME", "Secret for the registry; may repeat"),
    "egress": ("CIDR", "network that the pods may reach; may repeat"),
}


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
    add_plan_arguments(parser)
    add_checkpoint_arguments(parser)
    add_run_arguments(parser)
    add_stall_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print the job as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the script, and send nothing")
    where = parser.add_argument_group("nodes")
    add_place_arguments(where)
    add_cluster_argument(where)
    _add_settings(parser.add_argument_group("Slurm"), "slurm", _SLURM_HELP)
    add_module_argument(parser)
    add_file(parser)


def _add_kubernetes(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    add_checkpoint_arguments(parser)
    parser.add_argument("--job", metavar="NAME", help="the job's name (default: the file's)")
    add_stall_timeout(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the manifests, and send nothing")
    parser.add_argument("--check", action="store_true", help="check the manifests in FILE, and send nothing")
    add_place_arguments(parser)
    add_cluster_argument(parser)
    for title, helps in (("job", _JOB_HELP), ("gang scheduling", _GANG_HELP), ("pods", _POD_HELP)):
        _add_settings(parser.add_argument_group(title), "kubernetes", helps)
    add_file(parser, "workload file; with --check, the manifests")


def _add_settings(parser: argparse._ArgumentGroup, table: str, helps: dict[str, tuple[str, str]]) -> None:
    """Add a flag for each of some settings; the defaults are those of the cluster file's table."""
    for name, (metavar, text) in helps.items():
        more: dict[str, Any] = {}
        kind = TABLES[table][name].kind
        if kind is tuple:
            more["action"] = "append"
        elif kind is int:
            more["type"] = int
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text, **more)


def run(arguments: argparse.Namespace) -> int:
    """Send the job."""
    sending = _submit_to_slurm if arguments.target == "slurm" else _submit_to_kubernetes
    with interruptible() as interrupted:
        return sending(arguments)
    print("paceline submit: stopped before the job was sent", file=sys.stderr)
    return 128 + interrupted[0]


def _submit_to_slurm(arguments: argparse.Namespace) -> int:
    settings = settings_of(arguments, "slurm")
    with settings.naming_the_file():
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
    with settings.naming_the_file():
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
    check_kubernetes_options(options, settings.names)
    shape = Shape.parse(arguments.shape)
    return KubernetesRequest(
        file=arguments.workload,
        arguments=tuple(arguments.arguments),
        plan=plan_request(arguments, choose_ranks(arguments.n, shape, (), says_ranks(arguments.plan or ""))),
        options=options,
        given=settings.names,
        job=arguments.job,
        shape=shape,
        environment=environment_of(arguments.env),
        # Variables of this process are not those of the pods.
        stall_timeout_s=stall_timeout(arguments, stall_notice_of(None, arguments.env, {})),
    )


def _check(arguments: argparse.Namespace) -> int:
    """Check the manifests in a file."""
    for name, flag in arguments.given.items():
        if name != "check":
            reason = "manifests are checked as they stand in FILE"
            raise UsageError(f"{flag} does not apply with --check", reason, f"leave {flag} out, or --check")
    file = Path(arguments.workload)
    manifests = kubernetes.read_manifests(file)
    kubernetes.check(manifests)
    print(f"{file}: {len(manifests)} manifests pass all checks")
    return 0
