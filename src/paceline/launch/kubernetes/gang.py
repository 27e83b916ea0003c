"""Gang scheduling of a job's pods: ask the scheduler that the job names, and check manifests against every scheduler.

A gang is placed as a whole or not at all: half a job holds its nodes and waits for the other half for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.pods import Manifest
from paceline.launch.kubernetes.schedulers import (
    coscheduling,
    kai,
    kueue,
    mpijob,
    native,
    pod_group,
    volcano,
    yunikorn,
    yunikorn_ray,
)


def _attach_yunikorn(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    sets = pod_sets(manifests)
    yunikorn.attach(job, sets)
    if job.kind == "rayjob":
        yunikorn_ray.attach(job, manifests, sets)
    return []


# By the gang's name: change the manifests, and return those that go before them.
_ATTACH: dict[str, Callable[[KubernetesJob, list[Manifest]], list[Manifest]]] = {
    "none": lambda _job, _manifests: [],
    "yunikorn": _attach_yunikorn,
    "kueue": kueue.attach,
    "volcano": volcano.attach,
    "coscheduling": coscheduling.attach,
    "kai": kai.attach,
    "native": native.attach,
}


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Add what the job's gang scheduler wants to the manifests, and put its own objects before them."""
    before = _ATTACH[job.gang](job, manifests)
    if job.scheduler:
        for pod_set in pod_sets(manifests):
            pod_set.template["spec"]["schedulerName"] = job.scheduler
    return [*before, *manifests]


def reasons(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield why a gang scheduler would not place these pods as a whole."""
    sets = pod_sets(manifests)
    if yunikorn.is_used(sets):
        is_ray = any(manifest.get("kind") == "RayJob" for manifest in manifests)
        if is_ray:
            yield from yunikorn_ray.reasons(manifests, sets)
        else:
            yield from yunikorn.reasons(sets)
    yield from kueue.reasons(manifests)
    yield from kai.reasons(manifests, sets)
    for kind in (volcano.VOLCANO, coscheduling.COSCHEDULING, native.NATIVE):
        yield from pod_group.reasons(kind, manifests, sets)
    yield from mpijob.reasons(manifests, sets)
