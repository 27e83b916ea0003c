"""Gangs under Volcano: a PodGroup of its own, or one that an operator makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.pod_group import PodGroupScheduler, mpi_operator_note
from paceline.launch.kubernetes.pods import Manifest
from paceline.nouns.names import LABEL

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

RAY_QUEUE = "volcano.sh/queue-name"
DEFAULT_QUEUE = "default"  # which Volcano itself makes


class Volcano(PodGroupScheduler):
    """Volcano, with its queues."""

    name = "volcano"
    queue = LABEL
    api = "scheduling.volcano.sh"
    version = "v1beta1"
    reference = ("metadata", "annotations", "scheduling.k8s.io/group-name")
    count = ("spec", "minMember")
    keys = ("minMember", "minTaskMember", "minResources", "queue", "priorityClassName", "networkTopology")
    scheduler_name = "volcano"

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Make the pods one PodGroup of Volcano; KubeRay makes that of a RayJob by itself."""
        if job.kind != "rayjob":
            return super().attach(job, manifests)
        manifests[-1]["metadata"]["labels"][RAY_QUEUE] = job.queue or DEFAULT_QUEUE
        for pod_set in pod_sets(manifests):
            pod_set.template["spec"]["schedulerName"] = self.scheduler_name
        return []

    def group_spec(self, job: KubernetesJob) -> Manifest:
        """Return the queue."""
        return {"queue": job.queue or DEFAULT_QUEUE}

    def notes(self, job: KubernetesJob) -> Iterator[str]:
        """Yield what the operators of an MPIJob and a RayJob need."""
        yield from mpi_operator_note(job)
        if job.kind == "rayjob":
            yield "KubeRay's operator must run with this scheduler as its batch scheduler"


SCHEDULER = Volcano()
