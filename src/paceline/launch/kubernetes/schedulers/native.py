"""Gangs under Kubernetes' own scheduler: a PodGroup of scheduling.k8s.io."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.pod_group import PodGroupScheduler, pod_group
from paceline.launch.kubernetes.pods import Manifest

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob


class Native(PodGroupScheduler):
    """Kubernetes' own scheduler, since 1.36."""

    name = "native"
    impossible: Mapping[str, str] = {
        "mpijob": "the MPI Operator's schema has no schedulingGroup and silently drops it",
        "rayjob": "KubeRay's schema has no schedulingGroup and silently drops it",
    }
    api = "scheduling.k8s.io"
    reference = ("spec", "schedulingGroup", "podGroupName")
    count = ("spec", "schedulingPolicy", "gang", "minCount")
    keys = ("schedulingPolicy", "priority", "priorityClassName", "disruptionMode", "schedulingConstraints")

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Make the pods one PodGroup of Kubernetes itself."""
        sets = pod_sets(manifests)
        for pod_set in sets:
            pod_set.template["spec"]["schedulingGroup"] = {"podGroupName": job.name}
        spec = {"schedulingPolicy": {"gang": {"minCount": sum(pod_set.count for pod_set in sets)}}}
        return [pod_group(job, self.api, job.pod_group_api, spec)]


SCHEDULER = Native()
