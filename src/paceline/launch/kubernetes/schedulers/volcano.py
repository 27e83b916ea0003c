"""Gangs under Volcano: a PodGroup of its own, or one that an operator makes."""

from __future__ import annotations

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.pods import Manifest
from paceline.launch.kubernetes.schedulers.pod_group import PodGroups, attach_group

RAY_QUEUE = "volcano.sh/queue-name"
VOLCANO = PodGroups(
    "scheduling.volcano.sh",
    "v1beta1",
    ("metadata", "annotations", "scheduling.k8s.io/group-name"),
    ("spec", "minMember"),
    ("minMember", "minTaskMember", "minResources", "queue", "priorityClassName", "networkTopology"),
    "volcano",
)


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Make the pods one PodGroup of Volcano; KubeRay makes that of a RayJob by itself."""
    queue = job.queue or "default"
    if job.kind == "rayjob":
        manifests[-1]["metadata"]["labels"][RAY_QUEUE] = queue
        for pod_set in pod_sets(manifests):
            pod_set.template["spec"]["schedulerName"] = VOLCANO.scheduler
        return []
    return attach_group(job, manifests, VOLCANO, {"queue": queue})
