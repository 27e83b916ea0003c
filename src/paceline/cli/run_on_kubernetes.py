"""`paceline run --on kubernetes`: manifests from arguments, checked, printed or sent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.run_on import environment_of, shape_of
from paceline.launch.command import is_secret, own_arguments
from paceline.launch.kubernetes import submit as kubernetes
from paceline.launch.kubernetes.job import GANGS, KINDS, POD_GROUP_APIS, KubernetesJob
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan

ACCELERATOR = "nvidia.com/gpu"
# A word of KubernetesJob, and its metavar: flags with the job's own default.
_TEXTS = {
    "cpu": "N", "memory": "SIZE", "shm": "SIZE", "server_cpu": "N", "server_memory": "SIZE",
    "queue": "NAME", "namespace": "NAME", "runs_claim": "NAME", "service_account": "NAME",
    "priority_class": "NAME", "runtime": "NAME", "scheduler": "NAME",
}  # fmt: skip
_DEFAULTS = {"cpu": "", "memory": "", "shm": "1Gi", "namespace": "default"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about Kubernetes."""
    group = parser.add_argument_group("Kubernetes", "see docs/kubernetes.md")
    group.add_argument("--image", default="", metavar="IMAGE", help="that has Paceline and FILE")
    group.add_argument("--kind", choices=KINDS, default="jobset", help="of job (default jobset)")
    group.add_argument("--gang", choices=GANGS, default="none", help="who places all pods or none (default none)")
    for name, value in _TEXTS.items():
        group.add_argument("--" + name.replace("_", "-"), default=_DEFAULTS.get(name, ""), metavar=value)
    group.add_argument("--gpus", type=int, default=0, metavar="N", help="accelerators of a node (default 0)")
    group.add_argument("--accelerator", default=ACCELERATOR, metavar="NAME", help=f"(default {ACCELERATOR})")
    group.add_argument("--max-restarts", type=int, default=3, metavar="N", help="of the whole job (default 3)")
    group.add_argument("--placeholder-timeout", type=int, default=600, metavar="S", help="for a gang (default 600)")
    group.add_argument("--pod-group-api", choices=POD_GROUP_APIS, default=POD_GROUP_APIS[0], help="of --gang native")
    group.add_argument("--user", type=int, default=1000, metavar="UID", help="in the pods (default 1000)")
    group.add_argument("--context", default="", metavar="NAME", help="of kubectl's configuration")
    group.add_argument("--node-selector", action="append", default=[], metavar="KEY=VALUE", help="may repeat")
    group.add_argument("--toleration", action="append", default=[], metavar="KEY[=VALUE][:EFFECT]", help="may repeat")
    group.add_argument("--image-pull-secret", action="append", default=[], metavar="NAME", help="may repeat")
    group.add_argument(
        "--egress", action="append", default=[], metavar="CIDR", help="a network that the pods may reach; may repeat"
    )
    group.add_argument("--check", action="store_true", help="FILE contains manifests: check them, and send nothing")


def job_of(arguments: argparse.Namespace, plan: Plan) -> KubernetesJob:
    """Return the job that the arguments ask for.

    Raises:
        UsageError: they leave out what a cluster must know, or contradict each other.
    """
    for flag, value in (("--image", arguments.image), ("--cpu", arguments.cpu), ("--memory", arguments.memory)):
        if not value:
            raise UsageError(
                "can't make a job for Kubernetes", f"{flag} is not given", f"write {flag}, as in docs/kubernetes.md"
            )
    for name in ("server_cpu", "server_memory"):
        if name in arguments.given and not plan.server:
            flag = arguments.given[name]
            raise UsageError(f"the flag {flag}", "the plan has no servers", f"add server=2, or leave {flag} out")
    environment = environment_of(arguments.env)
    for name in environment:
        if is_secret(name):
            raise UsageError(
                f"can't pass -x {name} to Kubernetes",
                "a manifest is plain text",
                "put it into a Secret of the cluster's",
            )
    nodes, ranks = shape_of(arguments.shape) or (1, plan.world_size)
    name_of_file = Path(arguments.workload).stem.replace("_", "-").lower()  # Kubernetes' names have no underscore
    return KubernetesJob(
        name=arguments.job or name_of_file,
        command=[arguments.workload, *own_arguments(arguments.arguments)],
        plan=plan,
        nodes=nodes,
        ranks_per_node=ranks,
        image=arguments.image,
        kind=arguments.kind,
        gang=arguments.gang,
        accelerators=arguments.gpus,
        accelerator=arguments.accelerator,
        max_restarts=arguments.max_restarts,
        placeholder_timeout_s=arguments.placeholder_timeout,
        pod_group_api=arguments.pod_group_api,
        user=arguments.user,
        node_selector=_pairs("--node-selector", arguments.node_selector),
        tolerations=[_toleration(text) for text in arguments.toleration],
        image_pull_secrets=arguments.image_pull_secret,
        egress=arguments.egress,
        environment=environment,
        **{name: getattr(arguments, name) for name in _TEXTS},
    )


def run(arguments: argparse.Namespace, plan: Plan) -> int:
    """Print the manifests, or send them."""
    job = job_of(arguments, plan)
    manifests = kubernetes.render(job)
    remarks = kubernetes.notes(job)
    if arguments.dry_run:
        print(kubernetes.to_text(manifests, remarks), end="")
        return 0
    for remark in remarks:
        print(f"paceline run: {remark}", file=sys.stderr)
    print(kubernetes.send(manifests, arguments.context), end="")
    print(f"paceline run: sent; `kubectl -n {job.namespace} get pods` shows its pods", file=sys.stderr)
    return 0


def check(file: Path) -> int:
    """Hold a file of manifests against the rules.

    Raises:
        PlanError: it breaks some.
    """
    manifests = kubernetes.read_manifests(file)
    kubernetes.check(manifests)
    print(f"{file}: {len(manifests)} manifests pass all checks")
    return 0


def _pairs(flag: str, texts: Sequence[str]) -> Mapping[str, str]:
    for text in texts:
        if not text.partition("=")[2]:
            raise UsageError(f"{flag} {text}", "it is not KEY=VALUE", f"write such as {flag} pool=gpu")
    return dict(text.split("=", 1) for text in texts)


def _toleration(text: str) -> dict[str, Any]:
    key, _, effect = text.partition(":")
    key, equals, value = key.partition("=")
    if not key:
        raise UsageError(f"--toleration {text}", "it has no key", "write such as --toleration gpu=yes:NoSchedule")
    toleration = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        toleration["value"] = value
    if effect:
        toleration["effect"] = effect
    return toleration
