"""Gangs under Kueue: a job is suspended until its queue has room for all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.gang_scheduler import EACH_JOB_ALONE, GangScheduler
from paceline.launch.kubernetes.objects import PodSet, field_of, job_manifests
from paceline.launch.kubernetes.pods import Manifest
from paceline.nouns.errors import did_you_mean
from paceline.nouns.names import LABEL

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Kueue(GangScheduler):
    """Kueue suspends a job, and starts it when its queue's quota suffices for all pods."""

    name = "kueue"
    queue = LABEL
    needs_queue = True
    impossible_with_servers: Mapping[str, str] = {"job": EACH_JOB_ALONE}
    changes_pods = False

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Suspend the job and name its queue."""
        for manifest in job_manifests(manifests):
            manifest["metadata"]["labels"][QUEUE] = job.queue
            _suspending(manifest)["suspend"] = True  # Kueue starts it when the queue has room for all of it
        return []

    def problems(self, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
        """Yield the reasons why Kueue would not start this job as a whole."""
        jobs = job_manifests(manifests)
        if not any(_names_kueue(manifest) for manifest in jobs):
            return
        for manifest in jobs:
            called = f"{manifest.get('kind')} {field_of(manifest, 'metadata', 'name')}"
            yield from _label_problems(called, field_of(manifest, "metadata", "labels") or {})
            spec = manifest.get("spec") or {}
            suspending = spec
            if manifest.get("kind") == "MPIJob":
                suspending = spec.get("runPolicy") or {}
            if suspending.get("suspend") is not True:
                yield f"{called}: suspend is not true, so it starts before Kueue has room for it"
            if manifest.get("kind") == "RayJob" and spec.get("shutdownAfterJobFinishes") is not True:
                yield f"{called}: Kueue takes a RayJob only with shutdownAfterJobFinishes"


def _label_problems(called: str, labels: Manifest) -> Iterator[str]:
    queue = labels.get(QUEUE)
    if not queue or not _DNS_LABEL.fullmatch(str(queue)):
        yield f"{called}: the label {QUEUE} must name a queue, and says {queue!r}"
    for key in labels:
        if key.startswith("kueue") and key not in (QUEUE, PRIORITY):
            fix = did_you_mean(key, (QUEUE, PRIORITY), "leave it out")
            yield f"{called}: Kueue knows no label {key} ({fix})"


def _suspending(manifest: Manifest) -> Manifest:
    """Return the part of a job's manifest that says whether it is suspended."""
    spec: Manifest = manifest["spec"]
    if manifest["kind"] != "MPIJob":
        return spec
    policy: Manifest = spec.setdefault("runPolicy", {})
    return policy


def _names_kueue(manifest: Manifest) -> bool:
    return any("kueue" in key for key in field_of(manifest, "metadata", "labels") or {})


SCHEDULER = Kueue()
