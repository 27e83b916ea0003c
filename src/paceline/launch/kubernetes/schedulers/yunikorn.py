"""Gangs under Apache YuniKorn: task groups computed from the pods, and the scheduler's rules without a scheduler.

YuniKorn starts a gang by placeholders: minMember small pods for each task group, with the resources and constraints
that the group states. When all are placed, the real pods take their places. The groups are JSON in an annotation,
which YuniKorn reads leniently: what it can't use it leaves out, with a line in its own log at most. So everything
is checked here, before anything is sent.

Source: yunikorn-k8shim 1.9, pkg/cache/{utils,gang_utils,placeholder}.go and pkg/plugin/predicates; its user guide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from paceline.launch.kubernetes.gang_scheduler import GangScheduler
from paceline.launch.kubernetes.objects import PodSet, field_of, pod_sets
from paceline.launch.kubernetes.pods import WORKER, Manifest
from paceline.launch.kubernetes.quantities import pod_resources, read_quantity
from paceline.nouns.errors import ReadError, did_you_mean
from paceline.nouns.reading import parse_json, parse_whole

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

SCHEDULER_NAME = "yunikorn"
PREFIX = "yunikorn.apache.org/"
APP = f"{PREFIX}app-id"
QUEUE = f"{PREFIX}queue"
GROUP = f"{PREFIX}task-group-name"
GROUPS = f"{PREFIX}task-groups"
POLICY = f"{PREFIX}schedulingPolicyParameters"
OLD = {APP: "applicationId", QUEUE: "queue"}  # labels that YuniKorn also reads
KNOWN = (APP, QUEUE, GROUP, GROUPS, POLICY, f"{PREFIX}allow-preemption", f"{PREFIX}user.info")
TIMEOUT = "placeholderTimeoutInSeconds"
STYLE = "gangSchedulingStyle"
CONSTRAINTS = ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints")
KEYS = ("name", "minMember", "minResource", "labels", "annotations", *CONSTRAINTS)
RAY_GANG = "ray.io/gang-scheduling-enabled"
INT32 = 2**31 - 1
INT64 = 2**63 - 1
_POD_NAME = re.compile(r"[-a-z0-9.]*")
_STRICT = ("podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution")


class YuniKorn(GangScheduler):
    """YuniKorn, with task groups. Of a RayJob KubeRay writes the groups."""

    name = SCHEDULER_NAME
    # A label's value, of parts between dots.
    queue = re.compile(r"(?![_-])[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(?<![_-])")
    queue_example = "root.ml"
    needs_queue = True
    # A placeholder has the affinity of the pods that it stands in for, so a strict one would keep the real pod off the
    # node of its own placeholder: YuniKorn asks the filter for affinity between pods when it swaps them. Asking for
    # all accelerators of a node is what keeps workers apart.
    allows_strict_anti_affinity = False

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Make these pods one application whose pods start all together or not at all."""
        sets = pod_sets(manifests)
        text = _written_groups(task_groups(sets))
        for pod_set in sets:
            head = pod_set.template["metadata"]
            head["labels"] |= {APP: job.name, QUEUE: job.queue}
            head["annotations"] = {
                **head.get("annotations", {}),
                GROUP: group_name(pod_set),
                GROUPS: text,
                # Hard: after the timeout the application fails. Soft, the default, starts the pods that found room.
                POLICY: f"{TIMEOUT}={job.placeholder_timeout_s} {STYLE}=Hard",
            }
            pod_set.template["spec"]["schedulerName"] = SCHEDULER_NAME
        if job.kind == "rayjob":  # KubeRay writes the groups, and which pod is in which
            manifests[-1]["metadata"]["labels"] |= {RAY_GANG: "true", APP: job.name, QUEUE: job.queue}
            for pod_set in sets:
                for key in (GROUP, GROUPS):
                    del pod_set.template["metadata"]["annotations"][key]
        return []

    def notes(self, job: KubernetesJob) -> Iterator[str]:
        """Yield the case in which two pods may come to one node, and the condition of KubeRay's operator."""
        if not job.accelerators:
            yield "under YuniKorn two pods without accelerators may come to one node"
        if job.kind == "rayjob":
            yield "KubeRay's operator must run with this scheduler as its batch scheduler"

    def problems(self, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
        """Yield the reasons why YuniKorn would not start these pods as a gang."""
        if not is_used(sets):
            return
        ray_jobs = [manifest for manifest in manifests if manifest.get("kind") == "RayJob"]
        if ray_jobs:
            yield from _ray_problems(ray_jobs, sets)
        else:
            yield from _gang_problems(sets)


def _written_groups(groups: Sequence[Manifest]) -> str:
    """Write the groups as JSON that users can read: a line for each key of a group."""
    texts = []
    for group in groups:
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in group.items()]
        texts.append(",\n".join(lines))
    return "[{\n" + "\n},{\n".join(texts) + "\n}]"


def group_name(pods: PodSet) -> str:
    """Return the name of the pods' task group; servers and their coordinator, which ask for the same, are one."""
    return "worker" if pods.role == WORKER else "server"


def task_groups(sets: Sequence[PodSet]) -> list[Manifest]:
    """Return a group for each kind of pod: the number of pods, and the requests of each."""
    groups: dict[str, Manifest] = {}
    for pod_set in sets:
        spec = pod_set.template["spec"]
        name = group_name(pod_set)
        if name in groups:  # servers and their coordinator: equal requests and constraints, so one group
            groups[name]["minMember"] += pod_set.count
            continue
        groups[name] = {
            "name": name,
            "minMember": pod_set.count,
            "minResource": dict(spec["containers"][0]["resources"]["requests"]),
            "labels": {},
            "annotations": {},
            "nodeSelector": spec.get("nodeSelector", {}),
            "tolerations": spec.get("tolerations", []),
            "affinity": spec.get("affinity", {}),
            "topologySpreadConstraints": spec.get("topologySpreadConstraints", []),
        }
    return list(groups.values())


def is_used(sets: Sequence[PodSet]) -> bool:
    """Return True if YuniKorn is to start these pods: they name it, or have a label or annotation of its own."""
    for pod_set in sets:
        if field_of(pod_set.template, "spec", "schedulerName") == SCHEDULER_NAME:
            return True
        if any(PREFIX in key for key in _marks(pod_set)):
            return True
    return False


def _gang_problems(sets: Sequence[PodSet]) -> Iterator[str]:
    for pod_set in sets:
        yield from _pod_problems(pod_set)
    for key in (APP, QUEUE):
        values = {str(_label(pod_set, key)) for pod_set in sets if _label(pod_set, key)}
        if len(values) > 1:
            yield f"the pods' label {key} differs ({', '.join(sorted(values))}): they are one application in one queue"
    texts = {_annotation(pod_set, GROUPS) for pod_set in sets}
    if len(texts) > 1:
        yield f"the annotation {GROUPS} is not the same on all pods: each one must state all groups"
    for text in texts - {None}:
        yield from _text_problems(text, sets)


def _ray_problems(ray_jobs: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield the reasons why KubeRay would not ask YuniKorn for a gang."""
    for manifest in ray_jobs:
        for key in (RAY_GANG, APP, QUEUE):
            if not field_of(manifest, "metadata", "labels", key):
                yield f"the RayJob has no label {key}, without which KubeRay asks for no gang"
    for pod_set in sets:
        for problem in _pod_problems(pod_set):
            if not problem.endswith("is missing"):  # KubeRay writes these
                yield problem


def _pod_problems(pod_set: PodSet) -> Iterator[str]:
    """Yield the problems with labels and annotations of these pods, whatever their groups say."""
    if field_of(pod_set.template, "spec", "schedulerName") != SCHEDULER_NAME:
        yield f"{pod_set.place}: its schedulerName is not {SCHEDULER_NAME}, so YuniKorn leaves it alone"
    for key in (APP, QUEUE):
        if not _label(pod_set, key):
            noun = "queue" if key == QUEUE else "application"
            yield f"{pod_set.place}: the label {key} is missing: no {noun} is named"
        old = _label(pod_set, OLD[key])
        if old and old != _label(pod_set, key):
            yield f"{pod_set.place}: the old label {OLD[key]}={old} says something else than {key}"
    for key in (GROUP, GROUPS, POLICY):
        if not _annotation(pod_set, key):
            yield f"{pod_set.place}: the annotation {key} is missing"
    unknown = [key for key in _marks(pod_set) if key.startswith(PREFIX) and key not in KNOWN]
    for key in unknown:
        yield f"{pod_set.place}: YuniKorn knows no {key} ({did_you_mean(key, KNOWN, 'leave it out')})"
    # As much of the name as YuniKorn takes over into a placeholder's name.
    if not _POD_NAME.fullmatch(str(_label(pod_set, APP) or "")[:28]):
        yield (
            f"{pod_set.place}: {APP} must be of small letters, digits and hyphens, for placeholders are named after it"
        )
    policy = str(_annotation(pod_set, POLICY) or f"{STYLE}=Hard")
    # A missing annotation has its own reason above, so its style is not told as well.
    for reason in _policy_problems(policy):
        yield f"{pod_set.place}: {POLICY} {reason}"
    yield from _anti_affinity_problems(pod_set)


def _policy_problems(text: str) -> Iterator[str]:
    """Yield the problems with a policy. YuniKorn splits at single spaces and at `=`, and skips what it can't read."""
    settings: dict[str, str] = {}
    for part in text.split(" "):
        key, _, value = part.partition("=")
        if part.count("=") != 1:
            yield f"has the part {part!r}, which is skipped: write KEY=VALUE with single spaces between"
        elif key not in (TIMEOUT, STYLE):
            yield f"has {key!r}, which is skipped ({did_you_mean(key, (TIMEOUT, STYLE), 'leave it out')})"
        elif key in settings:
            yield f"has {key} twice"
        else:
            settings[key] = value
    style = settings.get(STYLE)
    if style != "Hard":
        style_text = "no style, which means Soft" if style is None else f"the style {style!r}"
        if style not in (None, "Soft"):
            style_text += ", which is taken as Soft"
        yield (
            f"has {style_text}: after the timeout a part of the gang would start, and wait for the rest; "
            f"write {STYLE}=Hard"
        )
    seconds = settings.get(TIMEOUT)
    if seconds is not None and parse_whole(seconds, 1, INT64) is None:
        yield f"has {TIMEOUT}={seconds[:100]}, which is no number of seconds above 0"


def _anti_affinity_problems(pod_set: PodSet) -> Iterator[str]:
    """Yield a problem for each required anti-affinity of pods against their own kind.

    A placeholder has its pods' affinity: where that is strict against its own kind it bars the real pod.
    """
    pod_labels = field_of(pod_set.template, "metadata", "labels") or {}
    for term in field_of(pod_set.template, "spec", "affinity", *_STRICT) or []:
        selector = field_of(term, "labelSelector")
        if isinstance(selector, dict) and _selects(selector, pod_labels):
            yield (
                f"{pod_set.place}: its required podAntiAffinity selects its own pods: YuniKorn would keep each real "
                "pod off the node of its placeholder; write it as preferred, and ask for all accelerators of a node"
            )


def _selects(selector: Mapping[str, Any], pod_labels: Mapping[str, str]) -> bool:
    """Return True if a label selector matches the labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if pod_labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions") or []:
        key = rule.get("key")
        values = rule.get("values") or []
        is_met = {
            "In": pod_labels.get(key) in values,
            "NotIn": pod_labels.get(key) not in values,  # codespell:ignore notin
            "Exists": key in pod_labels,
            "DoesNotExist": key not in pod_labels,
        }.get(rule.get("operator"), False)
        if not is_met:
            return False
    return True


def _text_problems(text: object, sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield the problems with the annotation that states all groups."""
    twice: list[str] = []  # json.loads keeps the last of equal keys, so they are noted while it reads

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return dict(pairs)

    try:
        groups = parse_json(str(text), GROUPS, pairs=once)
    except ReadError as error:
        yield f"{GROUPS} is not JSON ({error.found}): YuniKorn would start the pods one by one"
        return
    if twice:
        yield f"{GROUPS} says {twice[0]!r} twice in one group"
    is_list = isinstance(groups, list) and bool(groups)
    if not is_list or not all(isinstance(group, dict) for group in groups):
        yield f"{GROUPS} must be a list of groups"
        return
    names = [group.get("name") for group in groups]
    if len({str(name) for name in names}) < len(names):
        yield f"{GROUPS} has two groups of one name"
    for pod_set in sets:
        name = _annotation(pod_set, GROUP)
        if name and name not in names:
            fix = did_you_mean(str(name), [str(group_name) for group_name in names], "name one of them")
            yield f"{pod_set.place}: its group {name!r} is not in {GROUPS} ({fix})"
    for group in groups:
        members = [pod_set for pod_set in sets if _annotation(pod_set, GROUP) == group.get("name")]
        yield from _group_problems(group, members)
    yield from _overflow_problems(groups)


def _group_problems(group: Mapping[str, object], members: Sequence[PodSet]) -> Iterator[str]:
    name = group.get("name")
    called = f"the task group {name!r}"
    if not isinstance(name, str) or not name or not _POD_NAME.fullmatch(name[:20]):
        yield f"{called} needs a name of small letters, digits and hyphens, for placeholders are named after it"
    for key in group:
        if key not in KEYS:
            yield f"{called} has {key!r}, which YuniKorn leaves out ({did_you_mean(key, KEYS, 'leave it out')})"
    for key in ("labels", "annotations", "nodeSelector"):
        value = group.get(key) or {}
        if not isinstance(value, dict) or not all(isinstance(inner, str) for inner in value.values()):
            yield f"{called}: its {key} must be words by words"
    yield from _member_problems(called, group.get("minMember"), sum(pod_set.count for pod_set in members))
    yield from _resource_problems(called, group.get("minResource"))
    for pod_set in members:
        yield from _difference_problems(called, group, pod_set)


def _member_problems(called: str, count: object, pods: int) -> Iterator[str]:
    if not isinstance(count, int) or isinstance(count, bool):
        yield f"{called} needs a minMember that is a whole number, not {count!r}: YuniKorn would drop all groups"
    elif not 0 < count <= INT32:
        yield f"{called} has minMember {count}: it must be above 0 and below 2^31"
    elif not pods:
        yield f"{called} has no pods: its placeholders would never be replaced"
    elif count > pods:
        yield f"{called} has minMember {count} and {pods} pods: {count - pods} placeholders would never be replaced"
    elif count < pods:
        yield f"{called} has minMember {count} and {pods} pods: {pods - count} pods would not be part of the gang"


def _resource_problems(called: str, resources: object) -> Iterator[str]:
    if not isinstance(resources, dict) or not resources:
        yield f"{called} needs a minResource"
        return
    for key, text in resources.items():
        value = read_quantity(text)
        if value is None:
            yield f"{called}: minResource {key}={text!r} is no quantity: YuniKorn would drop all groups"
        elif value < 0:
            yield f"{called}: minResource {key}={text} is below 0"
    if "pods" in resources:
        yield f"{called}: minResource has the key pods, which YuniKorn counts by itself"
    if "cpu" in resources and "vcore" in resources:
        yield f"{called}: minResource has cpu and vcore, which are one resource"


def _difference_problems(called: str, group: Mapping[str, object], pod_set: PodSet) -> Iterator[str]:
    """Yield the differences between the requests of a group and of its pods.

    Placeholders stand in for pods: a difference reserves nodes where the pods can't go, or too little for them.
    """
    spec = field_of(pod_set.template, "spec") or {}
    stated = group.get("minResource")
    asked = pod_resources(spec)  # of all containers, as the scheduler sums them
    if not isinstance(stated, dict):
        stated = {}
    reserved = {key: read_quantity(text) or Fraction(0) for key, text in stated.items()}
    for key in sorted({*asked, *reserved} - {"pods"}):
        if asked.get(key, 0) != reserved.get(key, 0):
            text = stated.get(key, "nothing")
            yield f"{called} reserves {key}={text}, and a pod of {pod_set.place} asks for {_written(spec, key)}"
    for key in CONSTRAINTS:
        if (group.get(key) or None) != (spec.get(key) or None):
            yield f"{called}: its {key} differs from that of {pod_set.place}, so its placeholders may stand elsewhere"


def _written(spec: Mapping[str, Any], key: str) -> str:
    """Return a resource that a pod asks for as it is written: the sum of its containers' requests."""
    amounts = []
    for container in spec.get("containers") or []:
        amount = field_of(container, "resources", "requests", key)
        if amount is not None:
            amounts.append(str(amount))
    return " + ".join(amounts) or "nothing"


def _overflow_problems(groups: Sequence[Mapping[str, object]]) -> Iterator[str]:
    totals: dict[str, Fraction] = {}
    for group in groups:
        count = group.get("minMember")
        resources = group.get("minResource")
        if not isinstance(count, int) or not isinstance(resources, dict):
            continue
        for key, text in resources.items():
            unit = 1000 if key == "cpu" else 1  # YuniKorn counts thousandths of a core
            value = (read_quantity(text) or Fraction(0)) * count * unit
            totals[key] = totals.get(key, Fraction(0)) + value
    for key, total in totals.items():
        if total > INT64:
            yield f"all groups together ask for more {key} than a 64-bit number holds"


def _label(pod_set: PodSet, key: str) -> Any:
    return field_of(pod_set.template, "metadata", "labels", key)


def _annotation(pod_set: PodSet, key: str) -> Any:
    return field_of(pod_set.template, "metadata", "annotations", key)


def _marks(pod_set: PodSet) -> list[str]:
    """Return the keys of all labels and annotations of pods."""
    metadata = field_of(pod_set.template, "metadata") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    return [*labels, *annotations]


SCHEDULER = YuniKorn()
