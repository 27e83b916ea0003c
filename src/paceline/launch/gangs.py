"""What each gang scheduler wants to see on a job's manifests, and its rules without a scheduler.

A gang is placed as a whole or not at all: half a job holds its nodes and waits for the other half for ever.
YuniKorn has a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch import yunikorn
from paceline.launch.kubernetes_job import KubernetesJob
from paceline.launch.manifest_kinds import PodSet, field_of, job_manifests, pod_sets
from paceline.launch.pods import Manifest, metadata
from paceline.launch.quantities import add_resources, pod_resources, read_quantity, write_quantity
from paceline.nouns.errors import did_you_mean

KUEUE_QUEUE, KUEUE_PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
KAI, KAI_QUEUE, KAI_MEMBERS = "kai-scheduler", "kai.scheduler/queue", "kai.scheduler/batch-min-member"
RAY_GANG, RAY_VOLCANO_QUEUE = "ray.io/gang-scheduling-enabled", "volcano.sh/queue-name"
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MPI_POLICY = ("minAvailable", "queue", "minResources", "priorityClass", "scheduleTimeoutSeconds")


@dataclass(frozen=True, slots=True)
class PodGroups:
    """A scheduler whose gangs are objects of their own.

    Args:
        api: of the object, without the version.
        version: of it.
        reference: where a pod names its group.
        count: where the group says how many pods it has.
        keys: of the group's spec; others are dropped without a word.
        scheduler: the usual schedulerName; empty: the cluster's own.
    """

    api: str
    version: str
    reference: tuple[str, ...]
    count: tuple[str, ...]
    keys: tuple[str, ...]
    scheduler: str


VOLCANO = PodGroups(
    "scheduling.volcano.sh",
    "v1beta1",
    ("metadata", "annotations", "scheduling.k8s.io/group-name"),
    ("spec", "minMember"),
    ("minMember", "minTaskMember", "minResources", "queue", "priorityClassName", "networkTopology"),
    "volcano",
)
COSCHEDULING = PodGroups(
    "scheduling.x-k8s.io",
    "v1alpha1",
    ("metadata", "labels", "scheduling.x-k8s.io/pod-group"),
    ("spec", "minMember"),
    ("minMember", "minResources", "scheduleTimeoutSeconds"),
    "scheduler-plugins-scheduler",
)
NATIVE = PodGroups(
    "scheduling.k8s.io",
    "v1beta1",
    ("spec", "schedulingGroup", "podGroupName"),
    ("spec", "schedulingPolicy", "gang", "minCount"),
    ("schedulingPolicy", "priority", "priorityClassName", "disruptionMode", "schedulingConstraints"),
    "",
)


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """The manifests with what the job's gang scheduler wants, and what goes before them."""
    acts: dict[str, Callable[[KubernetesJob, list[Manifest]], list[Manifest]]] = {
        "none": lambda _job, _manifests: [],
        "yunikorn": _attach_yunikorn,
        "kueue": _attach_kueue,
        "volcano": _attach_volcano,
        "coscheduling": _attach_coscheduling,
        "kai": _attach_kai,
        "native": _attach_native,
    }
    before = acts[job.gang](job, manifests)
    if job.scheduler:
        for one in pod_sets(manifests):
            one.template["spec"]["schedulerName"] = job.scheduler
    return [*before, *manifests]


def _attach_yunikorn(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    sets = pod_sets(manifests)
    yunikorn.attach(job, sets)
    if job.kind == "rayjob":  # KubeRay writes the groups by itself, and which pod is in which
        manifests[-1]["metadata"]["labels"] |= {RAY_GANG: "true", yunikorn.APP: job.name, yunikorn.QUEUE: job.queue}
        for one in sets:
            for key in (yunikorn.GROUP, yunikorn.GROUPS):
                del one.template["metadata"]["annotations"][key]
    return []


def _attach_kueue(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    for one in job_manifests(manifests):
        one["metadata"]["labels"][KUEUE_QUEUE] = job.queue
        _suspending(one)["suspend"] = True  # Kueue starts it when the queue has room for all of it
    return []


def _suspending(one: Manifest) -> Manifest:
    spec: Manifest = one["spec"]
    return spec.setdefault("runPolicy", {}) if one["kind"] == "MPIJob" else spec


def _attach_volcano(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    queue = job.queue or "default"
    if job.kind == "rayjob":
        manifests[-1]["metadata"]["labels"][RAY_VOLCANO_QUEUE] = queue
        for one in pod_sets(manifests):
            one.template["spec"]["schedulerName"] = VOLCANO.scheduler
        return []
    return _attach_group(job, manifests, VOLCANO, {"queue": queue})


def _attach_coscheduling(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    return _attach_group(job, manifests, COSCHEDULING, {"scheduleTimeoutSeconds": job.placeholder_timeout_s})


def _attach_native(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    sets = pod_sets(manifests)
    for one in sets:
        one.template["spec"]["schedulingGroup"] = {"podGroupName": job.name}
    spec = {"schedulingPolicy": {"gang": {"minCount": sum(one.count for one in sets)}}}
    return [_group(job, NATIVE.api, job.pod_group_api, spec)]


def _attach_group(job: KubernetesJob, manifests: list[Manifest], kind: PodGroups, more: Manifest) -> list[Manifest]:
    sets = pod_sets(manifests)
    total = {key: write_quantity(value) for key, value in _total(sets).items()}
    count = sum(one.count for one in sets)
    for one in sets:
        one.template["spec"]["schedulerName"] = kind.scheduler
    if job.kind == "mpijob":  # the operator makes the group, and names it on the pods
        policy = {"minAvailable": count, "minResources": total, **more}
        manifests[-1]["spec"]["runPolicy"]["schedulingPolicy"] = policy
        return []
    for one in sets:
        one.template["metadata"].setdefault(kind.reference[1], {})[kind.reference[2]] = job.name
    return [_group(job, kind.api, kind.version, {"minMember": count, "minResources": total, **more})]


def _group(job: KubernetesJob, api: str, version: str, spec: Manifest) -> Manifest:
    return {"apiVersion": f"{api}/{version}", "kind": "PodGroup", "metadata": metadata(job), "spec": spec}


def _attach_kai(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    sets = pod_sets(manifests)
    members = {KAI_MEMBERS: str(sum(one.count for one in sets))}
    for one in sets:
        one.template["metadata"]["labels"][KAI_QUEUE] = job.queue
        one.template["spec"]["schedulerName"] = KAI
    for own in job_manifests(manifests):
        own["metadata"]["labels"][KAI_QUEUE] = job.queue
        if own["kind"] not in ("MPIJob", "RayJob"):  # of those KAI counts the pods, of others it takes one for a gang
            own["metadata"]["annotations"] = dict(members)
        if own["kind"] == "JobSet":
            own["spec"]["startupPolicy"] = {"startupPolicyOrder": "AnyOrder"}  # else KAI makes a gang of each role
    for own in manifests:
        if own["kind"] == "TrainingRuntime":
            own["spec"]["template"]["metadata"] = {"annotations": dict(members)}
    return []


def _total(sets: Sequence[PodSet]) -> dict[str, Any]:
    parts = [(one.count, pod_resources(field_of(one.template, "spec") or {})) for one in sets]
    return {
        name: sum(count * resources.get(name, 0) for count, resources in parts)
        for name in {name: None for _, resources in parts for name in resources}
    }


def reasons(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Why a gang scheduler would not place these pods as a whole."""
    sets = pod_sets(manifests)
    if yunikorn.is_used(sets):
        is_ray = any(one.get("kind") == "RayJob" for one in manifests)
        yield from _ray_yunikorn_reasons(manifests, sets) if is_ray else yunikorn.reasons(sets)
    yield from _kueue_reasons(job_manifests(manifests))
    yield from _kai_reasons(manifests, sets)
    for kind in (VOLCANO, COSCHEDULING, NATIVE):
        yield from _pod_group_reasons(kind, manifests, sets)
    yield from _mpi_reasons(manifests, sets)


def _ray_yunikorn_reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    for one in manifests:
        if one.get("kind") != "RayJob":
            continue
        for key in (RAY_GANG, yunikorn.APP, yunikorn.QUEUE):
            if not field_of(one, "metadata", "labels", key):
                yield f"the RayJob has no label {key}, without which KubeRay asks for no gang"
    for reason in (reason for one in sets for reason in yunikorn.pod_reasons(one)):
        if not reason.endswith("is missing"):  # KubeRay writes these
            yield reason


def _kueue_reasons(jobs: Sequence[Manifest]) -> Iterator[str]:
    marked = [one for one in jobs if any("kueue" in key for key in field_of(one, "metadata", "labels") or {})]
    for one in jobs if marked else ():
        called = f"{one.get('kind')} {field_of(one, 'metadata', 'name')}"
        labels = field_of(one, "metadata", "labels") or {}
        queue = labels.get(KUEUE_QUEUE)
        if not queue or not _DNS_LABEL.fullmatch(str(queue)):
            yield f"{called}: the label {KUEUE_QUEUE} must name a queue, and says {queue!r}"
        for key in labels:
            if key.startswith("kueue") and key not in (KUEUE_QUEUE, KUEUE_PRIORITY):
                fix = did_you_mean(key, (KUEUE_QUEUE, KUEUE_PRIORITY), "leave it out")
                yield f"{called}: Kueue knows no label {key} ({fix})"
        spec = one.get("spec") or {}
        if (spec.get("runPolicy") or {} if one.get("kind") == "MPIJob" else spec).get("suspend") is not True:
            yield f"{called}: suspend is not true, so it starts before Kueue has room for it"
        if one.get("kind") == "RayJob" and spec.get("shutdownAfterJobFinishes") is not True:
            yield f"{called}: Kueue takes a RayJob only with shutdownAfterJobFinishes"


def _kai_reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    if not any(field_of(one.template, "spec", "schedulerName") == KAI for one in sets):
        return
    for one in sets:
        if field_of(one.template, "spec", "schedulerName") != KAI:
            yield f"{one.where}: its schedulerName is not {KAI}, and that of others is"
        if not field_of(one.template, "metadata", "labels", KAI_QUEUE):
            yield f"{one.where}: the label {KAI_QUEUE} is missing: no queue is named"
    owners = [one for one in job_manifests(manifests) if one.get("kind") not in ("MPIJob", "RayJob")]
    if len(owners) > 1:
        yield "KAI makes a gang of each Job by itself: write one JobSet"
    count = str(sum(one.count for one in sets))
    for own in owners:
        said = field_of(own, "metadata", "annotations", KAI_MEMBERS)
        if said != count:
            yield f"{own['kind']}: the annotation {KAI_MEMBERS} says {said!r} and there are {count} pods"
        order = field_of(own, "spec", "startupPolicy", "startupPolicyOrder")
        if own.get("kind") == "JobSet" and order != "AnyOrder":
            yield f"{own['kind']}: without startupPolicyOrder AnyOrder KAI makes a gang of each role by itself"


def _pod_group_reasons(kind: PodGroups, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    groups = [one for one in manifests if one.get("kind") == "PodGroup" and _api(one) == kind.api]
    named = {str(field_of(one, "metadata", "name")): one for one in groups}
    users = [one for one in sets if field_of(one.template, *kind.reference)]
    if not users and not groups:
        return
    for one in sets:
        name = field_of(one.template, *kind.reference)
        if name not in named:
            yield f"{one.where}: its {kind.reference[-1]} is {name!r}, and there is no such PodGroup of {kind.api}"
        if kind.scheduler and not field_of(one.template, "spec", "schedulerName"):
            yield f"{one.where}: it has no schedulerName, so {kind.api} is not asked; write {kind.scheduler}"
    for name, group in named.items():
        members = [one for one in sets if field_of(one.template, *kind.reference) == name]
        for key in group.get("spec") or {}:
            if key not in kind.keys:
                fix = did_you_mean(key, kind.keys, "leave it out")
                yield f"the PodGroup {name} has {key!r}, which is left out ({fix})"
        yield from _size_reasons(f"the PodGroup {name}", kind.count[-1], field_of(group, *kind.count), members)
        if kind is not NATIVE:
            yield from _sum_reasons(f"the PodGroup {name}", field_of(group, "spec", "minResources"), members)
        if kind is VOLCANO and not field_of(group, "spec", "queue"):
            yield f"the PodGroup {name} names no queue"


def _api(one: Manifest) -> str:
    return str(one.get("apiVersion", "")).partition("/")[0]


def _size_reasons(called: str, key: str, said: Any, members: Sequence[PodSet]) -> Iterator[str]:
    count = sum(one.count for one in members)
    if isinstance(said, bool) or said != count:
        why = "the gang would never be whole" if isinstance(said, int) and said > count else "a part could start alone"
        yield f"{called} has {key} {said!r} and {count} pods: {why}"


def _sum_reasons(called: str, said: Any, members: Sequence[PodSet]) -> Iterator[str]:
    said = said if isinstance(said, dict) else {}
    for key, text in said.items():
        if read_quantity(text) is None:
            yield f"{called}: minResources {key}={text!r} is no quantity"
    stated, total = add_resources([(1, said)]), _total(members)
    for key in sorted({*stated, *total}):
        if stated.get(key, 0) != total.get(key, 0):
            asked = write_quantity(total[key]) if key in total else "nothing"
            yield f"{called} has minResources {key}={said.get(key, 'nothing')}, and its pods ask for {asked} together"


def _mpi_reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    for own in manifests:
        policy = field_of(own, "spec", "runPolicy", "schedulingPolicy")
        if own.get("kind") != "MPIJob" or policy is None:
            continue
        called = "the MPIJob's schedulingPolicy"
        for key in policy:
            if key not in _MPI_POLICY:
                fix = did_you_mean(key, _MPI_POLICY, "leave it out")
                yield f"{called} has {key!r}, which is left out ({fix})"
        yield from _size_reasons(called, "minAvailable", policy.get("minAvailable"), sets)
        yield from _sum_reasons(called, policy.get("minResources"), sets)
        if field_of(own, "spec", "launcherCreationPolicy") == "WaitForWorkersReady":
            yield "the MPIJob waits for its workers before it makes the launcher, so the gang is never whole"
