"""PodGroups: objects that Volcano, Coscheduling and Kubernetes' own scheduler take for a gang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import PodSet, field_of, pod_sets
from paceline.launch.kubernetes.pods import Manifest, metadata
from paceline.launch.kubernetes.quantities import add_resources, pod_resources, read_quantity, write_quantity
from paceline.nouns.errors import did_you_mean


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


def attach_group(job: KubernetesJob, manifests: list[Manifest], kind: PodGroups, more: Manifest) -> list[Manifest]:
    """Make the pods one PodGroup of `kind`, and return what goes before the manifests; `more` goes into its spec."""
    sets = pod_sets(manifests)
    total = {key: write_quantity(value) for key, value in total_resources(sets).items()}
    count = sum(pod_set.count for pod_set in sets)
    for pod_set in sets:
        pod_set.template["spec"]["schedulerName"] = kind.scheduler
    if job.kind == "mpijob":  # the operator makes the group, and names it on the pods
        policy = {"minAvailable": count, "minResources": total, **more}
        manifests[-1]["spec"]["runPolicy"]["schedulingPolicy"] = policy
        return []
    for pod_set in sets:
        pod_set.template["metadata"].setdefault(kind.reference[1], {})[kind.reference[2]] = job.name
    return [pod_group(job, kind.api, kind.version, {"minMember": count, "minResources": total, **more})]


def pod_group(job: KubernetesJob, api: str, version: str, spec: Manifest) -> Manifest:
    """Render a PodGroup."""
    return {"apiVersion": f"{api}/{version}", "kind": "PodGroup", "metadata": metadata(job), "spec": spec}


def total_resources(sets: Sequence[PodSet]) -> dict[str, Any]:
    """Sum what all pods ask for, by resource."""
    totals: dict[str, Any] = {}
    for pod_set in sets:
        spec = field_of(pod_set.template, "spec") or {}
        for name, amount in pod_resources(spec).items():
            totals[name] = totals.get(name, 0) + pod_set.count * amount
    return totals


def reasons(kind: PodGroups, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield why a scheduler of PodGroups would not place these pods as one gang."""
    groups = {}
    for manifest in manifests:
        if manifest.get("kind") == "PodGroup" and _api(manifest) == kind.api:
            groups[str(field_of(manifest, "metadata", "name"))] = manifest
    # Neither a group nor a pod that names one: this scheduler is not used.
    has_users = any(field_of(pod_set.template, *kind.reference) for pod_set in sets)
    if not has_users and not groups:
        return
    for pod_set in sets:
        name = field_of(pod_set.template, *kind.reference)
        if name not in groups:
            yield f"{pod_set.where}: its {kind.reference[-1]} is {name!r}, and there is no such PodGroup of {kind.api}"
        if kind.scheduler and not field_of(pod_set.template, "spec", "schedulerName"):
            yield f"{pod_set.where}: it has no schedulerName, so {kind.api} is not asked; write {kind.scheduler}"
    for name, group in groups.items():
        members = [pod_set for pod_set in sets if field_of(pod_set.template, *kind.reference) == name]
        yield from _group_reasons(kind, f"the PodGroup {name}", group, members)


def _group_reasons(kind: PodGroups, called: str, group: Manifest, members: Sequence[PodSet]) -> Iterator[str]:
    for key in group.get("spec") or {}:
        if key not in kind.keys:
            fix = did_you_mean(key, kind.keys, "leave it out")
            yield f"{called} has {key!r}, which is left out ({fix})"
    yield from size_reasons(called, kind.count[-1], field_of(group, *kind.count), members)
    if "minResources" in kind.keys:
        yield from sum_reasons(called, field_of(group, "spec", "minResources"), members)
    if "queue" in kind.keys and not field_of(group, "spec", "queue"):
        yield f"{called} names no queue"


def _api(manifest: Manifest) -> str:
    return str(manifest.get("apiVersion", "")).partition("/")[0]


def size_reasons(called: str, key: str, stated: Any, members: Sequence[PodSet]) -> Iterator[str]:
    """Yield what is wrong with a gang's number of pods."""
    count = sum(pod_set.count for pod_set in members)
    if isinstance(stated, bool) or stated != count:
        is_too_large = isinstance(stated, int) and stated > count
        why = "the gang would never be whole" if is_too_large else "a part could start alone"
        yield f"{called} has {key} {stated!r} and {count} pods: {why}"


def sum_reasons(called: str, stated: Any, members: Sequence[PodSet]) -> Iterator[str]:
    """Yield what is wrong with the resources that a gang states in sum."""
    if not isinstance(stated, dict):
        stated = {}
    for key, text in stated.items():
        if read_quantity(text) is None:
            yield f"{called}: minResources {key}={text!r} is no quantity"
    amounts = add_resources([(1, stated)])
    total = total_resources(members)
    for key in sorted({*amounts, *total}):
        if amounts.get(key, 0) != total.get(key, 0):
            asked = write_quantity(total[key]) if key in total else "nothing"
            yield f"{called} has minResources {key}={stated.get(key, 'nothing')}, and its pods ask for {asked} together"
