"""Gang scheduling of a job's pods: the schedulers, one per file in `schedulers/`, found by their files.

A gang is placed as a whole or not at all: half a job holds its nodes and waits for the other half for ever.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.launch.kubernetes import schedulers
from paceline.launch.kubernetes.gang_scheduler import GangScheduler
from paceline.launch.kubernetes.objects import PodSet, field_of, pod_sets
from paceline.launch.kubernetes.pod_group import size_problems, sum_problems
from paceline.launch.kubernetes.pods import Manifest
from paceline.nouns.errors import did_you_mean

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

NO_GANG = "none"
# The keys of an MPIJob's schedulingPolicy that the MPI operator hands on.
_POLICY_KEYS = ("minAvailable", "queue", "minResources", "priorityClass", "scheduleTimeoutSeconds")


def _find_schedulers() -> dict[str, GangScheduler]:
    """Import every file in `schedulers/`; return their objects `SCHEDULER` by name, the default first."""
    by_name: dict[str, GangScheduler] = {}
    for module in pkgutil.iter_modules(schedulers.__path__, f"{schedulers.__name__}."):
        scheduler = importlib.import_module(module.name).SCHEDULER
        by_name[scheduler.name] = scheduler
    return {NO_GANG: by_name.pop(NO_GANG), **by_name}


SCHEDULERS = _find_schedulers()


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Add what the job's gang scheduler wants to the manifests, and put its own objects before them."""
    before = SCHEDULERS[job.gang].attach(job, manifests)
    if job.scheduler:
        for pod_set in pod_sets(manifests):
            pod_set.template["spec"]["schedulerName"] = job.scheduler
    return [*before, *manifests]


def problems(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield the reasons that a gang scheduler would not place these pods as a whole."""
    sets = pod_sets(manifests)
    for scheduler in SCHEDULERS.values():
        yield from scheduler.problems(manifests, sets)
    yield from _policy_problems(manifests, sets)


def _policy_problems(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield the reasons that the MPI operator would not ask for the whole gang, from an MPIJob's schedulingPolicy."""
    for manifest in manifests:
        policy = field_of(manifest, "spec", "runPolicy", "schedulingPolicy")
        if manifest.get("kind") != "MPIJob" or policy is None:
            continue
        called = "the MPIJob's schedulingPolicy"
        for key in policy:
            if key not in _POLICY_KEYS:
                fix = did_you_mean(key, _POLICY_KEYS, "leave it out")
                yield f"{called} has {key!r}, which is left out ({fix})"
        yield from size_problems(called, "minAvailable", policy.get("minAvailable"), sets)
        yield from sum_problems(called, policy.get("minResources"), sets)
        if field_of(manifest, "spec", "launcherCreationPolicy") == "WaitForWorkersReady":
            yield "the MPIJob waits for its workers before it makes the launcher, so the gang is never whole"
