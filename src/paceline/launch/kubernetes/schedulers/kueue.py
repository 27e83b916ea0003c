"""Gangs under Kueue: a job is suspended until its queue has room for all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import field_of, job_manifests
from paceline.launch.kubernetes.pods import Manifest
from paceline.nouns.errors import did_you_mean

QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Suspend the job and name its queue."""
    for one in job_manifests(manifests):
        one["metadata"]["labels"][QUEUE] = job.queue
        _suspending(one)["suspend"] = True  # Kueue starts it when the queue has room for all of it
    return []


def _suspending(one: Manifest) -> Manifest:
    spec: Manifest = one["spec"]
    return spec.setdefault("runPolicy", {}) if one["kind"] == "MPIJob" else spec


def reasons(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield why Kueue would not start this job as a whole."""
    jobs = job_manifests(manifests)
    marked = [one for one in jobs if any("kueue" in key for key in field_of(one, "metadata", "labels") or {})]
    for one in jobs if marked else ():
        called = f"{one.get('kind')} {field_of(one, 'metadata', 'name')}"
        labels = field_of(one, "metadata", "labels") or {}
        queue = labels.get(QUEUE)
        if not queue or not _DNS_LABEL.fullmatch(str(queue)):
            yield f"{called}: the label {QUEUE} must name a queue, and says {queue!r}"
        for key in labels:
            if key.startswith("kueue") and key not in (QUEUE, PRIORITY):
                fix = did_you_mean(key, (QUEUE, PRIORITY), "leave it out")
                yield f"{called}: Kueue knows no label {key} ({fix})"
        spec = one.get("spec") or {}
        if (spec.get("runPolicy") or {} if one.get("kind") == "MPIJob" else spec).get("suspend") is not True:
            yield f"{called}: suspend is not true, so it starts before Kueue has room for it"
        if one.get("kind") == "RayJob" and spec.get("shutdownAfterJobFinishes") is not True:
            yield f"{called}: Kueue takes a RayJob only with shutdownAfterJobFinishes"
