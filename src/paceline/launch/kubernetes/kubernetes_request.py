"""Make a job on Kubernetes of the settings of `paceline submit kubernetes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.host_choice import Shape
from paceline.launch.kubernetes.kubernetes_job import KubernetesJob, check_job_name
from paceline.launch.kubernetes.pods import check_pods_of_servers
from paceline.launch.plan_choice import PlanRequest, choose_plan
from paceline.launch.rank_command import is_secret, own_arguments
from paceline.nouns.errors import UsageError, did_you_mean
from paceline.nouns.names import check_name

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """The settings of a job on Kubernetes, by the names of their flags; see `KubernetesJob`."""

    image: str
    kind: str
    gang: str
    cpu: str
    memory: str
    shm: str
    server_cpu: str
    server_memory: str
    queue: str
    namespace: str
    runs_claim: str
    service_account: str
    priority_class: str
    runtime: str
    scheduler: str
    gpus: int
    accelerator: str
    max_restarts: int
    placeholder_timeout: int
    pod_group_api: str
    user: int
    context: str
    node_selector: Sequence[str]
    toleration: Sequence[str]
    image_pull_secret: Sequence[str]
    egress: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """A job to send to Kubernetes.

    Args:
        file, arguments: the path of the user's file inside the image, and its arguments.
        plan: the plan that is asked for.
        options: the settings of the manifests.
        subjects: the names of the options that are not the default, as the subjects of errors.
        job: the name of the job; None: it is made of the file's name.
        shape: the number of nodes, and of ranks on each; None: one node.
        environment: the variables for the ranks.
        stall_timeout_s: the seconds without progress until the job is ended; 0: never.
    """

    file: str
    arguments: tuple[str, ...]
    plan: PlanRequest
    options: KubernetesOptions
    subjects: Mapping[str, str]
    job: str | None = None
    shape: Shape | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    stall_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        check_name("file", self.file)
        if self.job is not None:
            check_job_name(self.job)


def kubernetes_job(request: KubernetesRequest, notice: Callable[[str], None]) -> KubernetesJob:
    """Return the job that is asked for.

    Raises:
        UsageError: the request leaves out what a cluster must know, or contradicts itself.
        PlanError, MeshError: the plan can't be, or does not fit the nodes.
    """
    plan = choose_plan(request.plan, notice)
    options = request.options
    check_pods_of_servers(plan, request.subjects)
    for name, value in (("image", options.image), ("cpu", options.cpu), ("memory", options.memory)):
        if not value:
            fix = f"write --{name}, or {name} under [kubernetes] in the cluster file; see docs/kubernetes.md"
            raise UsageError("can't make a job for Kubernetes", f"--{name} is not given", fix)
    check_no_secret(request.environment)
    shape = request.shape or Shape(1, plan.world_size)
    return KubernetesJob(
        name=name_of_job(request.file) if request.job is None else request.job,
        command=[request.file, *own_arguments(request.arguments)],
        plan=plan,
        nodes=shape.nodes,
        ranks_per_node=shape.ranks_per_node,
        environment=dict(request.environment),
        stall_timeout_s=request.stall_timeout_s,
        **_fields(options),
    )


def check_no_secret(definitions: Iterable[str]) -> None:
    """Raise UsageError for variables that look like secrets: who may read the job may read its manifests.

    Args:
        definitions: the variables, each as NAME or NAME=VALUE.

    Raises:
        UsageError: one looks like a secret.
    """
    for name in (definition.partition("=")[0] for definition in definitions):
        if is_secret(name):
            raise UsageError(
                f"can't pass -x {name} to Kubernetes",
                "a manifest is plain text",
                "put it into a Secret of the cluster's, and refer to that under env in what --dry-run prints",
            )


def name_of_job(file: str) -> str:
    """Return the name of a job for which the user gave none."""
    return Path(file).stem.replace("_", "-").lower()  # Kubernetes' names have no underscore


def _fields(options: KubernetesOptions) -> dict[str, Any]:
    """Return the fields of `KubernetesJob` that are options."""
    return {
        "image": options.image,
        "kind": options.kind,
        "gang": options.gang,
        "cpu": options.cpu,
        "memory": options.memory,
        "shm": options.shm,
        "server_cpu": options.server_cpu,
        "server_memory": options.server_memory,
        "queue": options.queue,
        "namespace": options.namespace,
        "runs_claim": options.runs_claim,
        "service_account": options.service_account,
        "priority_class": options.priority_class,
        "runtime": options.runtime,
        "scheduler": options.scheduler,
        "accelerators": options.gpus,
        "accelerator": options.accelerator,
        "max_restarts": options.max_restarts,
        "placeholder_timeout_s": options.placeholder_timeout,
        "pod_group_api": options.pod_group_api,
        "user": options.user,
        "node_selector": _pairs(options.node_selector),
        "tolerations": [_toleration(text) for text in options.toleration],
        "image_pull_secrets": list(options.image_pull_secret),
        "egress": list(options.egress),
    }


def _pairs(texts: Sequence[str]) -> Mapping[str, str]:
    for text in texts:
        if not text.partition("=")[2]:
            fix = "write such as --node-selector pool=gpu"
            raise UsageError(f"--node-selector {text}", "it is not KEY=VALUE", fix, settings=("node_selector",))
    return dict(text.split("=", 1) for text in texts)


def _toleration(text: str) -> dict[str, Any]:
    key, _, effect = text.partition(":")
    key, equals, value = key.partition("=")
    if not key:
        fix = "write such as --toleration gpu=yes:NoSchedule"
        raise UsageError(f"--toleration {text}", "it has no key", fix, settings=("toleration",))
    toleration = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        toleration["value"] = value
    if effect and effect not in _EFFECTS:
        found = f"the effects are {', '.join(_EFFECTS)}"
        fix = did_you_mean(effect, _EFFECTS, "write one of these")
        raise UsageError(f"--toleration {text}", found, fix, settings=("toleration",))
    if effect:
        toleration["effect"] = effect
    return toleration
