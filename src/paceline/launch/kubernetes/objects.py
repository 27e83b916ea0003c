"""Render a job as the kinds of object that Kubernetes has for jobs, and find the pods in such manifests again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.launch.kubernetes import pods
from paceline.launch.kubernetes.pods import COORDINATOR, SERVER, WORKER, Manifest

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

MEETS_NOT = 2  # exit code of a request that can't be met: starting it again changes nothing
_JOBS = ("JobSet", "TrainJob", "Job", "MPIJob", "RayJob")
TRAINER_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
TRAINER_JOB = "node"  # the Trainer's name for its replicated job, and for the container in it


@dataclass(frozen=True, slots=True)
class PodSet:
    """The pods that are made of one template.

    Args:
        place: the position in the manifests, for errors, such as `JobSet bert, worker`.
        count: the number of pods.
        template: the pod template, as it stands in the manifest.
        owner: the manifest that has the template.
    """

    place: str
    count: int
    template: Manifest
    owner: Manifest

    @property
    def role(self) -> str:
        """Return the role of the pods: worker unless their label says otherwise."""
        return str(field_of(self.template, "metadata", "labels", pods.ROLE_LABEL) or WORKER)


def field_of(node: object, *path: str) -> Any:
    """Return the value at a path in a manifest that a user may have edited; None where there is none."""
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def job_manifests(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the manifests that start pods, without those that only go with them."""
    return [manifest for manifest in manifests if manifest.get("kind") in _JOBS]


def pod_sets(manifests: Sequence[Manifest]) -> list[PodSet]:
    """Return all pods that controllers will make of these manifests, without those of a foreign runtime."""
    sets = []
    for manifest in manifests:
        for pod_set in _sets_of(manifest, manifests):
            if isinstance(pod_set.template, dict):
                sets.append(pod_set)
    return sets


def _sets_of(manifest: Manifest, manifests: Sequence[Manifest]) -> Iterator[PodSet]:
    kind = manifest.get("kind")
    spec = manifest.get("spec") or {}
    name = f"{kind} {field_of(manifest, 'metadata', 'name')}"
    if kind == "Job":
        yield PodSet(name, _number(spec.get("parallelism")), spec.get("template") or {}, manifest)
    elif kind == "JobSet":
        for part in spec.get("replicatedJobs") or []:
            inner = field_of(part, "template", "spec") or {}
            count = _number(part.get("replicas")) * _number(inner.get("parallelism"))
            yield PodSet(f"{name}, {part.get('name')}", count, inner.get("template") or {}, manifest)
    elif kind == "TrainingRuntime":
        trainers = [candidate for candidate in manifests if candidate.get("kind") == "TrainJob"]
        # The runtime's own manifest does not say how many nodes there are: its TrainJob does.
        nodes = field_of(trainers[0], "spec", "trainer", "numNodes") if trainers else None
        for part in field_of(spec, "template", "spec", "replicatedJobs") or []:
            template = field_of(part, "template", "spec", "template") or {}
            yield PodSet(f"{name}, {part.get('name')}", _number(nodes), template, manifest)
    elif kind == "MPIJob":
        for role, part in (spec.get("mpiReplicaSpecs") or {}).items():
            yield PodSet(f"{name}, {role}", _number(part.get("replicas")), part.get("template") or {}, manifest)
    elif kind == "RayJob":
        cluster = spec.get("rayClusterSpec") or {}
        yield PodSet(f"{name}, head", 1, field_of(cluster, "headGroupSpec", "template") or {}, manifest)
        for part in cluster.get("workerGroupSpecs") or []:
            yield PodSet(
                f"{name}, {part.get('groupName')}", _number(part.get("replicas")), part.get("template"), manifest
            )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 1  # Kubernetes takes 1 where nothing is written


def jobset(job: KubernetesJob) -> list[Manifest]:
    """Render a JobSet: when a worker fails, the whole set starts again and goes on from the last checkpoint."""
    coordinator = f"{job.name}-{COORDINATOR}-0-0.{job.name}:{pods.COORDINATOR_PORT}"
    workers = pods.worker_pod(job, f"{job.name}-{WORKER}-0-0.{job.name}")
    replicated_jobs = []
    if job.servers:
        server, coordinator_pod = pods.server_pods(job, coordinator)
        workers = pods.with_coordinator(workers, coordinator)
        replicated_jobs = [
            _replicated(job, COORDINATOR, 1, coordinator_pod),
            _replicated(job, SERVER, job.servers, server),
        ]
    replicated_jobs += [_replicated(job, WORKER, job.nodes, workers)]
    spec = {
        # Ranks look for rank 0's name while its pod is starting: DNS must have it before the pod is ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [WORKER]},  # whatever servers do
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": replicated_jobs,
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(job),
        "spec": spec,
    }
    return [manifest]


def _failure_policy(job: KubernetesJob) -> Manifest:
    # The Job gives up on exit code 2 (`podFailurePolicy` below), and this rule keeps the set from starting again.
    rule = {"name": "request_cant_be_met", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": job.max_restarts, "rules": [rule]}


def _replicated(job: KubernetesJob, role: str, count: int, template: Manifest) -> Manifest:
    return {"name": role, "replicas": 1, "template": {"spec": _indexed(job, role, count, template)}}


def _indexed(job: KubernetesJob, role: str, count: int, template: Manifest) -> Manifest:
    """Render the spec of an indexed Job, whose pods know their number."""
    # Workers of a JobSet start again all together; a server is replaced by itself, its replica goes on meanwhile.
    restarts_single_pods = job.kind == "job" or role != WORKER
    return {
        "completionMode": "Indexed",
        "parallelism": count,
        "completions": count,
        "backoffLimit": job.max_restarts * count if restarts_single_pods else 0,
        "podReplacementPolicy": "Failed",  # a new pod only when the old one has let go of its node
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [MEETS_NOT]}}]
        },
        "template": template,
    }


def indexed_job(job: KubernetesJob) -> list[Manifest]:
    """Render plain indexed Jobs, one for each role, and the Service that names their pods."""
    coordinator = f"{job.name}-{COORDINATOR}-0.{job.name}:{pods.COORDINATOR_PORT}"
    workers = pods.worker_pod(job, f"{job.name}-0.{job.name}")
    roles = [("", WORKER, job.nodes, workers)]
    if job.servers:
        server, coordinator_pod = pods.server_pods(job, coordinator)
        pods.with_coordinator(workers, coordinator)
        roles = [
            (f"{job.name}-{COORDINATOR}", COORDINATOR, 1, coordinator_pod),
            (f"{job.name}-{SERVER}", SERVER, job.servers, server),
            *roles,
        ]
    manifests = [pods.headless_service(job)]
    for name, role, count, template in roles:
        template["spec"]["subdomain"] = job.name
        spec = _indexed(job, role, count, template)
        metadata = pods.metadata(job, name, role)
        manifests += [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]
    return manifests


def train_job(job: KubernetesJob) -> list[Manifest]:
    """Render a TrainJob of Kubeflow's Trainer, with the runtime that has its pods unless one is named."""
    trainer: Manifest = {"numNodes": job.nodes, "numProcPerNode": job.ranks_per_node}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    spec: Manifest = {"runtimeRef": reference, "trainer": trainer}
    before = []
    template = pods.worker_pod(job, head="")  # the Trainer says PET_*, and refuses them from others
    if job.runtime:
        reference |= {"kind": "ClusterTrainingRuntime", "name": job.runtime}
        container = template["spec"]["containers"][0]
        trainer |= {"resourcesPerNode": container["resources"]}
        trainer |= {key: container[key] for key in ("image", "command", "env")}
        spec["runtimePatches"] = [_patch(template)]
    else:
        template["spec"]["containers"][0]["name"] = TRAINER_JOB
        before = [_runtime(job, template)]
    manifest = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": pods.metadata(job)}
    return [*before, {**manifest, "spec": spec}]


def _runtime(job: KubernetesJob, template: Manifest) -> Manifest:
    inner = _replicated(job, TRAINER_JOB, job.nodes, template)
    inner["template"] = {"metadata": {"labels": dict(TRAINER_STEP)}, **inner["template"]}
    failing = inner["template"]["spec"]
    # The Trainer sets how many there are; it has no say in when the set starts again.
    inner["template"]["spec"] = {key: failing[key] for key in ("backoffLimit", "podFailurePolicy", "template")}
    inner["template"]["spec"]["backoffLimit"] = 0
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**pods.metadata(job), "labels": {**pods.labels(job), "trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": {"failurePolicy": _failure_policy(job), "replicatedJobs": [inner]}},
        },
    }


def _patch(template: Manifest) -> Manifest:
    """Render the settings of a foreign runtime's pods that a TrainJob may change."""
    spec = template["spec"]
    allowed = [
        *("terminationGracePeriodSeconds", "securityContext", "affinity", "nodeSelector", "tolerations"),
        *("serviceAccountName", "imagePullSecrets", "volumes"),
    ]
    container = spec["containers"][0]
    inner = {
        "name": TRAINER_JOB,
        "securityContext": container["securityContext"],
        "volumeMounts": container["volumeMounts"],
    }
    patched = {key: spec[key] for key in allowed if key in spec}
    patched["containers"] = [inner]
    pod = {"metadata": template["metadata"], "spec": patched}
    node = {"name": TRAINER_JOB, "template": {"spec": {"template": pod}}}
    return {"manager": "paceline", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}


def mpi_job(job: KubernetesJob) -> list[Manifest]:
    """Render an MPIJob: the launcher's pod is the first node, the others wait for it with sshd."""
    launcher = pods.pod(job, WORKER, pods.mpi_command(job))
    waiting = pods.pod(job, WORKER, ["/usr/sbin/sshd", "-De", "-f", f"{SSH_HOME}/.sshd_config"])
    waiting["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": pods.SSH_PORT}}
    # With a gang the launcher must be there from the start, or the gang is never whole (mpi-operator#608).
    policy = "AtStartup" if job.gang_scheduler.is_gang else "WaitForWorkersReady"
    replicas = {"Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, "restartPolicy": "Never", "template": waiting}
    spec = {
        "mpiImplementation": "OpenMPI",
        "slotsPerWorker": job.ranks_per_node,
        "runLauncherAsWorker": True,  # the first node: all pods are alike, and one gang
        "launcherCreationPolicy": policy,
        "sshAuthMountPath": pods.SSH_FOLDER,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts},
        "mpiReplicaSpecs": replicas,
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": pods.metadata(job), "spec": spec}]


SSH_HOME = pods.SSH_FOLDER.rpartition("/")[0]


def ray_job(job: KubernetesJob) -> list[Manifest]:
    """Render a RayJob: the head's pod is the first node; the operator asks it to start the job, no pod has to."""
    cluster: Manifest = {
        "headGroupSpec": {"rayStartParams": {}, "template": pods.pod(job, WORKER, [])},
    }
    if job.nodes > 1:
        count = job.nodes - 1
        group = {"groupName": WORKER, "replicas": count, "minReplicas": count, "maxReplicas": count}
        cluster["workerGroupSpecs"] = [{**group, "rayStartParams": {}, "template": pods.pod(job, WORKER, [])}]
    spec = {
        "entrypoint": pods.ray_entrypoint(job),
        "submissionMode": "HTTPMode",  # no other pod only for the submission
        "backoffLimit": job.max_restarts,
        "shutdownAfterJobFinishes": True,  # Kueue wants it
        "rayClusterSpec": cluster,
    }
    return [{"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": pods.metadata(job), "spec": spec}]


KINDS = {"jobset": jobset, "trainjob": train_job, "job": indexed_job, "mpijob": mpi_job, "rayjob": ray_job}
