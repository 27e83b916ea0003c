"""Gangs under the scheduler plugins' Coscheduling: a PodGroup that the pods name in a label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.pod_group import PodGroupScheduler, mpi_operator_note
from paceline.launch.kubernetes.pods import Manifest

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob


class Coscheduling(PodGroupScheduler):
    """Coscheduling of the project scheduler-plugins."""

    name = "coscheduling"
    impossible: Mapping[str, str] = {"rayjob": "KubeRay makes these pod groups for a RayCluster, and refuses a RayJob"}
    api = "scheduling.x-k8s.io"
    version = "v1alpha1"
    reference = ("metadata", "labels", "scheduling.x-k8s.io/pod-group")
    count = ("spec", "minMember")
    keys = ("minMember", "minResources", "scheduleTimeoutSeconds")
    scheduler_name = "scheduler-plugins-scheduler"

    def group_spec(self, job: KubernetesJob) -> Manifest:
        """Return how long a gang may take to be placed."""
        return {"scheduleTimeoutSeconds": job.placeholder_timeout_s}

    def notes(self, job: KubernetesJob) -> Iterator[str]:
        """Yield what the MPI Operator needs."""
        yield from mpi_operator_note(job)


SCHEDULER = Coscheduling()
