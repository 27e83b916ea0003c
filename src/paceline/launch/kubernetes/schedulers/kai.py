"""Gangs under NVIDIA's KAI scheduler: the number of pods as an annotation of their owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.gang_scheduler import EACH_JOB_ALONE, GangScheduler
from paceline.launch.kubernetes.objects import PodSet, field_of, job_manifests, pod_sets
from paceline.launch.kubernetes.pods import Manifest
from paceline.nouns.names import LABEL_VALUE

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

SCHEDULER_NAME = "kai-scheduler"
QUEUE = "kai.scheduler/queue"
MEMBERS = "kai.scheduler/batch-min-member"


class Kai(GangScheduler):
    """KAI takes all pods of one owner for a gang if an annotation of the owner has their number."""

    name = "kai"
    queue = LABEL_VALUE
    needs_queue = True
    impossible_with_servers: Mapping[str, str] = {"job": EACH_JOB_ALONE}

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Name the queue and the number of pods where KAI looks for them."""
        sets = pod_sets(manifests)
        members = {MEMBERS: str(sum(pod_set.count for pod_set in sets))}
        for pod_set in sets:
            pod_set.template["metadata"]["labels"][QUEUE] = job.queue
            pod_set.template["spec"]["schedulerName"] = SCHEDULER_NAME
        for manifest in job_manifests(manifests):
            manifest["metadata"]["labels"][QUEUE] = job.queue
            # KAI counts the pods of these two kinds; of others it takes one for a gang.
            if manifest["kind"] not in ("MPIJob", "RayJob"):
                manifest["metadata"]["annotations"] = dict(members)
            if manifest["kind"] == "JobSet":
                # Otherwise KAI makes a gang of each role.
                manifest["spec"]["startupPolicy"] = {"startupPolicyOrder": "AnyOrder"}
        # Of a runtime the Trainer makes a JobSet, which takes over the annotations of this template.
        for manifest in manifests:
            if manifest["kind"] == "TrainingRuntime":
                manifest["spec"]["template"]["metadata"] = {"annotations": dict(members)}
        return []

    def notes(self, job: KubernetesJob) -> Iterator[str]:
        """Yield the condition under which KubeRay's operator uses KAI."""
        if job.kind == "rayjob":
            yield "KubeRay's operator must run with this scheduler as its batch scheduler"

    def problems(self, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
        """Yield the reasons why KAI would not place these pods as one gang."""
        if not any(field_of(pod_set.template, "spec", "schedulerName") == SCHEDULER_NAME for pod_set in sets):
            return
        for pod_set in sets:
            if field_of(pod_set.template, "spec", "schedulerName") != SCHEDULER_NAME:
                yield f"{pod_set.place}: its schedulerName is not {SCHEDULER_NAME}, and that of others is"
            if not field_of(pod_set.template, "metadata", "labels", QUEUE):
                yield f"{pod_set.place}: the label {QUEUE} is missing: no queue is named"
        owners = _annotated_owners(manifests)
        if len(owners) > 1:
            yield "KAI makes a gang of each Job by itself: write one JobSet"
        count = str(sum(pod_set.count for pod_set in sets))
        for owner in owners:
            stated = field_of(owner, "metadata", "annotations", MEMBERS)
            if stated != count:
                yield f"{owner['kind']}: the annotation {MEMBERS} says {stated!r} and there are {count} pods"
            order = field_of(owner, "spec", "startupPolicy", "startupPolicyOrder")
            if owner.get("kind") == "JobSet" and order != "AnyOrder":
                yield f"{owner['kind']}: without startupPolicyOrder AnyOrder KAI makes a gang of each role by itself"


def _annotated_owners(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the jobs whose pods KAI counts by an annotation; of the others it knows the pods."""
    return [manifest for manifest in job_manifests(manifests) if manifest.get("kind") not in ("MPIJob", "RayJob")]


SCHEDULER = Kai()
