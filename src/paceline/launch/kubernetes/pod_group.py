"""PodGroups: objects that Volcano, Coscheduling and Kubernetes' own scheduler take for a gang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.launch.kubernetes.gang_scheduler import GangScheduler
from paceline.launch.kubernetes.objects import PodSet, field_of, pod_sets
from paceline.launch.kubernetes.pods import Manifest, metadata
from paceline.launch.kubernetes.quantities import add_resources, pod_resources, read_quantity, write_quantity
from paceline.nouns.errors import did_you_mean

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob


class PodGroupScheduler(GangScheduler):
    """A scheduler whose gangs are objects of their own.

    Attributes:
        api: the API group of the object, without the version.
        version: the version of the API group.
        reference: the path at which a pod names its group.
        count: the path at which the group has its number of pods.
        keys: the keys of the group's spec that the scheduler reads; it drops others silently.
        scheduler_name: the usual schedulerName; empty: the cluster's own.
    """

    api: str
    version: str
    reference: tuple[str, ...]
    count: tuple[str, ...]
    keys: tuple[str, ...]
    scheduler_name: str = ""

    def group_spec(self, job: KubernetesJob) -> Manifest:
        """Return the fields of the group's spec beside the number of pods and the sum of their requests."""
        return {}

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Make the pods one PodGroup."""
        sets = pod_sets(manifests)
        total = {key: write_quantity(value) for key, value in total_resources(sets).items()}
        count = sum(pod_set.count for pod_set in sets)
        more = self.group_spec(job)
        for pod_set in sets:
            pod_set.template["spec"]["schedulerName"] = self.scheduler_name
        if job.kind == "mpijob":  # the operator makes the group, and names it on the pods
            policy = {"minAvailable": count, "minResources": total, **more}
            manifests[-1]["spec"]["runPolicy"]["schedulingPolicy"] = policy
            return []
        for pod_set in sets:
            pod_set.template["metadata"].setdefault(self.reference[1], {})[self.reference[2]] = job.name
        return [pod_group(job, self.api, self.version, {"minMember": count, "minResources": total, **more})]

    def problems(self, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
        """Yield the reasons why the scheduler would not place these pods as one gang."""
        groups = {}
        for manifest in manifests:
            if manifest.get("kind") == "PodGroup" and _api(manifest) == self.api:
                groups[str(field_of(manifest, "metadata", "name"))] = manifest
        # Neither a group nor a pod that names one: this scheduler is not used.
        has_users = any(field_of(pod_set.template, *self.reference) for pod_set in sets)
        if not has_users and not groups:
            return
        for pod_set in sets:
            name = field_of(pod_set.template, *self.reference)
            if name not in groups:
                key = self.reference[-1]
                yield f"{pod_set.place}: its {key} is {name!r}, and there is no such PodGroup of {self.api}"
            if self.scheduler_name and not field_of(pod_set.template, "spec", "schedulerName"):
                fix = f"write {self.scheduler_name}"
                yield f"{pod_set.place}: it has no schedulerName, so {self.api} is not asked; {fix}"
        for name, group in groups.items():
            members = [pod_set for pod_set in sets if field_of(pod_set.template, *self.reference) == name]
            yield from _group_problems(self, f"the PodGroup {name}", group, members)


def mpi_operator_note(job: KubernetesJob) -> Iterator[str]:
    """Yield the condition under which the MPI Operator makes the pod group of an MPIJob."""
    if job.kind == "mpijob":
        yield "the MPI Operator must run with --gang-scheduling, or it makes no pod group"


def pod_group(job: KubernetesJob, api: str, version: str, spec: Manifest) -> Manifest:
    """Render a PodGroup."""
    return {"apiVersion": f"{api}/{version}", "kind": "PodGroup", "metadata": metadata(job), "spec": spec}


def total_resources(sets: Sequence[PodSet]) -> dict[str, Any]:
    """Return the sum of all pods' requests, by resource."""
    totals: dict[str, Any] = {}
    for pod_set in sets:
        spec = field_of(pod_set.template, "spec") or {}
        for name, amount in pod_resources(spec).items():
            totals[name] = totals.get(name, 0) + pod_set.count * amount
    return totals


def _group_problems(kind: PodGroupScheduler, called: str, group: Manifest, members: Sequence[PodSet]) -> Iterator[str]:
    for key in group.get("spec") or {}:
        if key not in kind.keys:
            fix = did_you_mean(key, kind.keys, "leave it out")
            yield f"{called} has {key!r}, which is left out ({fix})"
    yield from size_problems(called, kind.count[-1], field_of(group, *kind.count), members)
    if "minResources" in kind.keys:
        yield from sum_problems(called, field_of(group, "spec", "minResources"), members)
    if "queue" in kind.keys and not field_of(group, "spec", "queue"):
        yield f"{called} names no queue"


def _api(manifest: Manifest) -> str:
    return str(manifest.get("apiVersion", "")).partition("/")[0]


def size_problems(called: str, key: str, stated: object, members: Sequence[PodSet]) -> Iterator[str]:
    """Yield the problem with a gang's number of pods, if there is one."""
    count = sum(pod_set.count for pod_set in members)
    if isinstance(stated, bool) or stated != count:
        is_too_large = isinstance(stated, int) and stated > count
        effect = "the gang would never be whole" if is_too_large else "a part could start alone"
        yield f"{called} has {key} {stated!r} and {count} pods: {effect}"


def sum_problems(called: str, stated: object, members: Sequence[PodSet]) -> Iterator[str]:
    """Yield the problems with the sum of resources that a gang states."""
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
