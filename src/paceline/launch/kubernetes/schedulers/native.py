"""Gangs under Kubernetes' own scheduler: a PodGroup of scheduling.k8s.io."""

from __future__ import annotations

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.pods import Manifest
from paceline.launch.kubernetes.schedulers.pod_group import PodGroups, pod_group

NATIVE = PodGroups(
    "scheduling.k8s.io",
    "v1beta1",
    ("spec", "schedulingGroup", "podGroupName"),
    ("spec", "schedulingPolicy", "gang", "minCount"),
    ("schedulingPolicy", "priority", "priorityClassName", "disruptionMode", "schedulingConstraints"),
    "",
)


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Make the pods one PodGroup of Kubernetes itself."""
    sets = pod_sets(manifests)
    for pod_set in sets:
        pod_set.template["spec"]["schedulingGroup"] = {"podGroupName": job.name}
    spec = {"schedulingPolicy": {"gang": {"minCount": sum(pod_set.count for pod_set in sets)}}}
    return [pod_group(job, NATIVE.api, job.pod_group_api, spec)]
