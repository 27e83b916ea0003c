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
    count = sum(one.count for one in sets)
    for one in sets:
        one.template["spec"]["schedulerName"] = kind.scheduler
    if job.kind == "mpijob":  # the operator makes the group, and names it on the pods
        policy = {"minAvailable": count, "minResources": total, **more}
        manifests[-1]["spec"]["runPolicy"]["schedulingPolicy"] = policy
        return []
    for one in sets:
        one.template["metadata"].setdefault(kind.reference[1], {})[kind.reference[2]] = job.name
    return [pod_group(job, kind.api, kind.version, {"minMember": count, "minResources": total, **more})]


def pod_group(job: KubernetesJob, api: str, version: str, spec: Manifest) -> Manifest:
    """Render a PodGroup."""
    return {"apiVersion": f"{api}/{version}", "kind": "PodGroup", "metadata": metadata(job), "spec": spec}


def total_resources(sets: Sequence[PodSet]) -> dict[str, Any]:
    """Sum what all pods ask for, by resource."""
    parts = [(one.count, pod_resources(field_of(one.template, "spec") or {})) for one in sets]
    return {
        name: sum(count * resources.get(name, 0) for count, resources in parts)
        for name in {name: None for _, resources in parts for name in resources}
    }


def reasons(kind: PodGroups, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield why a scheduler of PodGroups would not place these pods as one gang."""
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
        yield from size_reasons(f"the PodGroup {name}", kind.count[-1], field_of(group, *kind.count), members)
        if "minResources" in kind.keys:
            yield from sum_reasons(f"the PodGroup {name}", field_of(group, "spec", "minResources"), members)
        if "queue" in kind.keys and not field_of(group, "spec", "queue"):
            yield f"the PodGroup {name} names no queue"


def _api(one: Manifest) -> str:
    return str(one.get("apiVersion", "")).partition("/")[0]


def size_reasons(called: str, key: str, said: Any, members: Sequence[PodSet]) -> Iterator[str]:
    """Yield what is wrong with a gang's number of pods."""
    count = sum(one.count for one in members)
    if isinstance(said, bool) or said != count:
        why = "the gang would never be whole" if isinstance(said, int) and said > count else "a part could start alone"
        yield f"{called} has {key} {said!r} and {count} pods: {why}"


def sum_reasons(called: str, said: Any, members: Sequence[PodSet]) -> Iterator[str]:
    """Yield what is wrong with the resources that a gang states in sum."""
    said = said if isinstance(said, dict) else {}
    for key, text in said.items():
        if read_quantity(text) is None:
            yield f"{called}: minResources {key}={text!r} is no quantity"
    stated, total = add_resources([(1, said)]), total_resources(members)
    for key in sorted({*stated, *total}):
        if stated.get(key, 0) != total.get(key, 0):
            asked = write_quantity(total[key]) if key in total else "nothing"
            yield f"{called} has minResources {key}={said.get(key, 'nothing')}, and its pods ask for {asked} together"
