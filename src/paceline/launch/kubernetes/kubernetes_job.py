"""A job on Kubernetes as a user asks for it, checked before anything is written or sent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.host_choice import check_accelerators
from paceline.launch.kubernetes.gang import SCHEDULERS
from paceline.launch.kubernetes.gang_scheduler import GangScheduler
from paceline.launch.kubernetes.quantities import read_quantity
from paceline.launch.rank_command import check_variable
from paceline.nouns.errors import PlanError, UsageError, did_you_mean
from paceline.nouns.names import LABEL, LABEL_LENGTH, check_name
from paceline.nouns.plan import Plan
from paceline.nouns.reading import shown

# First the default of each: errors propose it.
KINDS = ("jobset", "trainjob", "job", "mpijob", "rayjob")
GANGS = tuple(SCHEDULERS)
POD_GROUP_APIS = ("v1beta1", "v1alpha3", "v1alpha2")  # of scheduling.k8s.io: 1.37 has the first two, 1.36 the last
SERVER_KINDS = ("jobset", "job")
RAY_NAME_LENGTH = 47  # KubeRay's own limit for a RayJob
_SUFFIX = "-abcde"  # five random letters, which the Job controller adds to a pod's name
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """One pod per node with all its accelerators; with parameter servers also pods for those.

    Args:
        name: the name of the job and of every object that is made for it.
        image: the container image that has Paceline, the workload file and the packages that it imports.
        command: the workload file and its arguments.
        plan: the plan, which decides the number of ranks and servers.
        nodes: the number of worker pods, each on a node of its own.
        ranks_per_node: the number of ranks in each pod.
        cpu: the CPU quantity of a pod, as request and as limit; and so `memory`.
        kind: the kind of the job: jobset, trainjob, job, mpijob or rayjob.
        gang: the scheduler that starts all pods together; "none": no scheduler does.
        queue: the queue of the gang's scheduler.
        accelerators: the number of accelerators of a node; 0 for a job on CPUs.
        shm: the size of /dev/shm; its content counts as the pod's memory.
        server_cpu: the CPU quantity of the pods of servers and the coordinator; empty: as a worker's; and so
            `server_memory`.
        runs: the path where the run directory is mounted.
        runs_claim: a PersistentVolumeClaim for the run directory, which all nodes can write.
        max_restarts: the number of restarts of the whole job after a failure.
        placeholder_timeout_s: the seconds that a gang may take to be placed.
        grace_s: the seconds that a pod has to save after SIGTERM, until SIGKILL.
        stall_timeout_s: the seconds without progress until the job is ended; 0: never.
        runtime: a ClusterTrainingRuntime for a TrainJob; empty: a runtime of the job's own is written.
        scheduler: the schedulerName, where the cluster does not use the usual one.
        egress: the networks (CIDR) that pods may reach beside each other and DNS.
    """

    name: str
    image: str
    command: Sequence[str]
    plan: Plan
    nodes: int
    ranks_per_node: int
    cpu: str
    memory: str
    kind: str = "jobset"
    gang: str = "none"
    queue: str = ""
    namespace: str = "default"
    accelerator: str = "nvidia.com/gpu"
    accelerators: int = 0
    shm: str = "1Gi"
    server_cpu: str = ""
    server_memory: str = ""
    runs: str = "/runs"
    runs_claim: str = ""
    max_restarts: int = 3
    placeholder_timeout_s: int = 600
    grace_s: int = 120
    stall_timeout_s: float = 0.0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    service_account: str = ""
    image_pull_secrets: Sequence[str] = ()
    priority_class: str = ""
    user: int = 1000
    egress: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    runtime: str = ""
    scheduler: str = ""
    pod_group_api: str = POD_GROUP_APIS[0]

    def __post_init__(self) -> None:
        # Single values first: later checks compare several, and rely on each being of its kind.
        self._check_words()
        self._check_surroundings()
        self._check_counts()
        self._check_resources()
        self._check_combination()
        self._check_queue()
        self._check_name()

    @property
    def servers(self) -> int:
        """Return the number of parameter servers, without their coordinator."""
        return self.plan.server

    @property
    def gang_scheduler(self) -> GangScheduler:
        """Return the scheduler that `gang` names."""
        return SCHEDULERS[self.gang]

    @property
    def resources(self) -> dict[str, str]:
        """Return the resources that a worker's pod asks for."""
        resources = {"cpu": self.cpu, "memory": self.memory}
        if self.accelerators:
            resources[self.accelerator] = str(self.accelerators)
        return resources

    @property
    def server_resources(self) -> dict[str, str]:
        """Return the resources that a server's pod and the coordinator's ask for, which are in the same gang."""
        return {"cpu": self.server_cpu or self.cpu, "memory": self.server_memory or self.memory}

    def _check_words(self) -> None:
        for setting, word, choices in (
            ("kind", self.kind, KINDS),
            ("gang", self.gang, GANGS),
            ("pod_group_api", self.pod_group_api, POD_GROUP_APIS),
        ):
            if word not in choices:
                fix = did_you_mean(word, choices, "write one of these")
                found = f"the choices are {', '.join(choices)}"
                raise UsageError(f"the {setting} {word!r} on Kubernetes", found, fix, settings=(setting,))
        if not self.image or any(letter.isspace() for letter in self.image):
            fix = "write such as registry/bert:1"
            raise UsageError(f"the image {self.image!r}", "it is no image's name", fix, settings=("image",))
        if not self.command or not self.command[0]:
            raise UsageError(f"the job {self.name}", "it has no workload file", "name the file inside the image")
        if not self.runs.startswith("/"):
            raise UsageError(f"the run directory {self.runs!r}", "it is no absolute path", "write such as /runs")
        check_name("file", self.command[0])
        check_name("path", self.runs)
        for kind, called, setting, name in (
            ("label", "namespace", "namespace", self.namespace),
            ("label", "claim", "runs_claim", self.runs_claim),
            ("label", "runtime", "runtime", self.runtime),
            ("object", "service account", "service_account", self.service_account),
            ("object", "priority class", "priority_class", self.priority_class),
            ("object", "scheduler", "scheduler", self.scheduler),
            *(("object", "image pull secret", "image_pull_secret", secret) for secret in self.image_pull_secrets),
        ):
            if name:
                check_name(kind, name, f"the {called} {shown(name)}", "write its name", settings=(setting,))

    def _check_surroundings(self) -> None:
        for name in self.environment:
            check_variable(name, f"the variable {shown(name)} of the pods", "take another name")
        for network in self.egress:
            _check_network(network)

    def _check_counts(self) -> None:
        for called, setting, count, least in (
            ("nodes", "shape", self.nodes, 1),
            ("ranks_per_node", "shape", self.ranks_per_node, 1),
            ("accelerators", "gpus", self.accelerators, 0),
            ("max_restarts", "max_restarts", self.max_restarts, 0),
            ("placeholder_timeout_s", "placeholder_timeout", self.placeholder_timeout_s, 1),
            ("grace_s", "grace", self.grace_s, 20),
            ("user", "user", self.user, 1),
        ):
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                found = f"it is {count!r} and not a whole number of at least {least}"
                raise UsageError(f"the job's {called}", found, f"write {least}", settings=(setting,))
        ranks = self.nodes * self.ranks_per_node
        world = self.plan.world_size
        if ranks != world:
            raise PlanError(
                f"{self.nodes} nodes with {self.ranks_per_node} ranks each are {ranks} ranks",
                f"the plan {self.plan.line()} has {world}",
                f"write -j NODESxRANKS with a product of {world}, or a plan of {ranks} ranks",
            )
        if self.accelerators:
            fix = f"write at most {self.accelerators} ranks for a node, or 0 accelerators to train on CPUs"
            check_accelerators(self.ranks_per_node, self.accelerators, f"of {self.accelerator}", fix, "gpus")

    def _check_resources(self) -> None:
        for setting, text in (
            ("cpu", self.cpu),
            ("memory", self.memory),
            ("shm", self.shm),
            ("server_cpu", self.server_cpu or self.cpu),
            ("server_memory", self.server_memory or self.memory),
        ):
            value = read_quantity(text)
            if not isinstance(text, str) or value is None or value <= 0:
                fix = "write such as 16, 500m or 200Gi"
                found = "Kubernetes reads no amount above 0 in it"
                raise UsageError(f"the job's {setting}={text!r}", found, fix, settings=(setting,))
        # A memory-backed emptyDir counts against the container's limit: filled, it would get the ranks killed.
        if (read_quantity(self.shm) or 0) >= (read_quantity(self.memory) or 0):
            raise UsageError(
                f"a /dev/shm of {self.shm}",
                f"it counts as the pod's memory, which is {self.memory}",
                "write a smaller --shm, or more memory with --memory",
                settings=("shm", "memory"),
            )
        if not _RESOURCE.fullmatch(self.accelerator):
            asked, found = f"the accelerator {self.accelerator!r}", "it is no resource's name"
            raise UsageError(asked, found, "write such as nvidia.com/gpu", settings=("accelerator",))

    def _check_combination(self) -> None:
        scheduler = self.gang_scheduler
        reason = scheduler.impossible.get(self.kind)
        if reason:
            fix = "write another --gang, or another --kind, such as --kind jobset"
            raise UsageError(f"gang={self.gang} with kind={self.kind}", reason, fix, settings=("gang", "kind"))
        if self.runtime and self.kind != "trainjob":
            asked = f"the runtime {self.runtime!r} of a {self.kind}"
            raise UsageError(asked, "a TrainJob has one", "leave it out", settings=("runtime", "kind"))
        if self.runtime and (scheduler.changes_pods or self.scheduler):
            setting, word = ("scheduler", self.scheduler) if self.scheduler else ("gang", self.gang)
            raise UsageError(
                f"{setting}={word} with the runtime {self.runtime}",
                "a TrainJob can't name a scheduler: its runtime does",
                "leave the runtime out, so that one with the scheduler is written, or set it in that runtime",
                settings=(setting, "runtime"),
            )
        if self.servers and self.kind not in SERVER_KINDS:
            raise PlanError(
                f"the plan {self.plan.line()} as a {self.kind}",
                "it has pods for workers only, and none for servers",
                "write --kind jobset, or leave server out",
                settings=("kind",),
            )
        reason = scheduler.impossible_with_servers.get(self.kind)
        if self.servers and reason:
            raise UsageError(
                f"can't schedule servers and workers of kind={self.kind} with gang={self.gang}",
                reason,
                "write --kind jobset",
                settings=("kind", "gang"),
            )

    def _check_queue(self) -> None:
        scheduler = self.gang_scheduler
        if not self.queue:
            if scheduler.needs_queue:
                fix = "write the queue that the cluster's administrator names, with --queue"
                raise UsageError(f"gang={self.gang} needs a queue", "no queue is named", fix, settings=("gang",))
            return
        if scheduler.queue is None:
            asked, found = f"the queue {self.queue!r}", f"gang={self.gang} has none"
            raise UsageError(asked, found, "leave it out", settings=("queue", "gang"))
        if len(self.queue) > LABEL_LENGTH or not scheduler.queue.fullmatch(self.queue):
            fix = f"write such as {scheduler.queue_example}"
            found = f"{self.gang} has no such names"
            raise UsageError(f"the queue {self.queue!r}", found, fix, settings=("queue", "gang"))

    def _check_name(self) -> None:
        check_job_name(self.name)
        # A longer name may be accepted for the job itself, and then its controller can't make the pods.
        _, longest_name = max((len(name), name) for name in self._names())
        most = LABEL_LENGTH
        if self.kind == "rayjob":
            longest_name = self.name
            most = RAY_NAME_LENGTH
        if len(longest_name) > most:
            raise UsageError(
                f"the job's name {self.name!r}",
                f"it leads to the name {longest_name} of {len(longest_name)} characters, and {most} are allowed",
                f"write a name of at most {len(self.name) - len(longest_name) + most}",
            )

    def _names(self) -> Iterator[str]:
        """Yield the longest names that controllers make of this job's."""
        last = self.nodes - 1
        if self.kind == "mpijob":
            yield from (f"{self.name}-launcher{_SUFFIX}", f"{self.name}-worker-{last}")
        elif self.kind == "job":
            yield f"{self.name}-{last}{_SUFFIX}"
        else:
            role = "node" if self.kind == "trainjob" else "worker"
            yield f"{self.name}-{role}-0-{last}{_SUFFIX}"
        if self.servers:
            between = "-0" if self.kind == "jobset" else ""
            yield f"{self.name}-coordinator{between}-0{_SUFFIX}"
            yield f"{self.name}-server{between}-{self.servers - 1}{_SUFFIX}"


def check_job_name(name: str) -> None:
    """Raise UsageError for a name that no job on Kubernetes has; its length is limited by the names made of it."""
    if not LABEL.fullmatch(name):
        check_name("label", name, f"the job's name {shown(name)}", "write such as --job bert-1")


def _check_network(text: str) -> None:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        found = f"it is no network ({error})"
        raise UsageError(f"egress to {text!r}", found, "write such as 10.0.0.0/8", settings=("egress",)) from None
