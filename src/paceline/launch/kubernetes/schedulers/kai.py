"""Gangs under NVIDIA's KAI scheduler: the number of pods as an annotation of what owns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import PodSet, field_of, job_manifests, pod_sets
from paceline.launch.kubernetes.pods import Manifest

SCHEDULER, QUEUE, MEMBERS = "kai-scheduler", "kai.scheduler/queue", "kai.scheduler/batch-min-member"


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Name the queue and the number of pods where KAI looks for them."""
    sets = pod_sets(manifests)
    members = {MEMBERS: str(sum(one.count for one in sets))}
    for one in sets:
        one.template["metadata"]["labels"][QUEUE] = job.queue
        one.template["spec"]["schedulerName"] = SCHEDULER
    for own in job_manifests(manifests):
        own["metadata"]["labels"][QUEUE] = job.queue
        if own["kind"] not in ("MPIJob", "RayJob"):  # of those KAI counts the pods, of others it takes one for a gang
            own["metadata"]["annotations"] = dict(members)
        if own["kind"] == "JobSet":
            own["spec"]["startupPolicy"] = {"startupPolicyOrder": "AnyOrder"}  # else KAI makes a gang of each role
    for own in manifests:
        if own["kind"] == "TrainingRuntime":
            own["spec"]["template"]["metadata"] = {"annotations": dict(members)}
    return []


def reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield why KAI would not place these pods as one gang."""
    if not any(field_of(one.template, "spec", "schedulerName") == SCHEDULER for one in sets):
        return
    for one in sets:
        if field_of(one.template, "spec", "schedulerName") != SCHEDULER:
            yield f"{one.where}: its schedulerName is not {SCHEDULER}, and that of others is"
        if not field_of(one.template, "metadata", "labels", QUEUE):
            yield f"{one.where}: the label {QUEUE} is missing: no queue is named"
    owners = [one for one in job_manifests(manifests) if one.get("kind") not in ("MPIJob", "RayJob")]
    if len(owners) > 1:
        yield "KAI makes a gang of each Job by itself: write one JobSet"
    count = str(sum(one.count for one in sets))
    for own in owners:
        said = field_of(own, "metadata", "annotations", MEMBERS)
        if said != count:
            yield f"{own['kind']}: the annotation {MEMBERS} says {said!r} and there are {count} pods"
        order = field_of(own, "spec", "startupPolicy", "startupPolicyOrder")
        if own.get("kind") == "JobSet" and order != "AnyOrder":
            yield f"{own['kind']}: without startupPolicyOrder AnyOrder KAI makes a gang of each role by itself"
