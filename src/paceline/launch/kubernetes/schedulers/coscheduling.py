"""Gangs under the scheduler plugins' Coscheduling: a PodGroup that the pods name in a label."""

from __future__ import annotations

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.pods import Manifest
from paceline.launch.kubernetes.schedulers.pod_group import PodGroups, attach_group

COSCHEDULING = PodGroups(
    "scheduling.x-k8s.io",
    "v1alpha1",
    ("metadata", "labels", "scheduling.x-k8s.io/pod-group"),
    ("spec", "minMember"),
    ("minMember", "minResources", "scheduleTimeoutSeconds"),
    "scheduler-plugins-scheduler",
)


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Make the pods one PodGroup."""
    return attach_group(job, manifests, COSCHEDULING, {"scheduleTimeoutSeconds": job.placeholder_timeout_s})
