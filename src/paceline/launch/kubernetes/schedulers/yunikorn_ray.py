"""Gangs of a RayJob under YuniKorn: KubeRay writes the task groups by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import PodSet, field_of
from paceline.launch.kubernetes.pods import Manifest
from paceline.launch.kubernetes.schedulers import yunikorn

GANG = "ray.io/gang-scheduling-enabled"


def attach(job: KubernetesJob, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> None:
    """Ask KubeRay for a gang; it writes the groups, and which pod is in which."""
    manifests[-1]["metadata"]["labels"] |= {GANG: "true", yunikorn.APP: job.name, yunikorn.QUEUE: job.queue}
    for pod_set in sets:
        for key in (yunikorn.GROUP, yunikorn.GROUPS):
            del pod_set.template["metadata"]["annotations"][key]


def reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield why KubeRay would not ask YuniKorn for a gang."""
    for manifest in manifests:
        if manifest.get("kind") != "RayJob":
            continue
        for key in (GANG, yunikorn.APP, yunikorn.QUEUE):
            if not field_of(manifest, "metadata", "labels", key):
                yield f"the RayJob has no label {key}, without which KubeRay asks for no gang"
    for pod_set in sets:
        for reason in yunikorn.pod_reasons(pod_set):
            if not reason.endswith("is missing"):  # KubeRay writes these
                yield reason
