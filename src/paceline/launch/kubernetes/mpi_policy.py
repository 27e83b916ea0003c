"""Check what the MPI operator hands on to a gang scheduler: the MPIJob's schedulingPolicy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.launch.kubernetes.objects import PodSet, field_of
from paceline.launch.kubernetes.pod_group import size_problems, sum_problems
from paceline.launch.kubernetes.pods import Manifest
from paceline.nouns.errors import did_you_mean

_POLICY = ("minAvailable", "queue", "minResources", "priorityClass", "scheduleTimeoutSeconds")


def problems(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield why the MPI operator would not ask for the whole gang."""
    for manifest in manifests:
        policy = field_of(manifest, "spec", "runPolicy", "schedulingPolicy")
        if manifest.get("kind") != "MPIJob" or policy is None:
            continue
        called = "the MPIJob's schedulingPolicy"
        for key in policy:
            if key not in _POLICY:
                fix = did_you_mean(key, _POLICY, "leave it out")
                yield f"{called} has {key!r}, which is left out ({fix})"
        yield from size_problems(called, "minAvailable", policy.get("minAvailable"), sets)
        yield from sum_problems(called, policy.get("minResources"), sets)
        if field_of(manifest, "spec", "launcherCreationPolicy") == "WaitForWorkersReady":
            yield "the MPIJob waits for its workers before it makes the launcher, so the gang is never whole"
