"""Task groups: computed from the plan, and refused with the reason wherever YuniKorn would do otherwise than meant."""

# ruff: noqa: E501 - a table, a case a line

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.schedulers.yunikorn import APP, GROUP, GROUPS, POLICY, QUEUE
from paceline.launch.kubernetes.submit import check, render
from paceline.nouns.errors import PlanError

from support.on_kubernetes import a_job, rendered

THREE_PARTS = re.compile(r"^.+\n  found: .+\n  fix: .+$", re.DOTALL)
TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def groups_of(manifests):
    (text,) = {one.template["metadata"]["annotations"][GROUPS] for one in pod_sets(manifests)}
    return json.loads(text)


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job", "mpijob"])
@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_a_group_has_as_many_members_as_there_are_pods(kind, nodes):
    manifests = render(a_job(gang="yunikorn", kind=kind, nodes=nodes))
    (group,) = groups_of(manifests)
    assert group["minMember"] == nodes
    assert group["minResource"] == {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "8"}


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_servers_and_workers_are_two_groups(kind):
    manifests = render(a_job(3, gang="yunikorn", kind=kind, node_selector={"zone": "a"}, tolerations=TOLERATIONS))
    groups = {group["name"]: group for group in groups_of(manifests)}
    assert {name: group["minMember"] for name, group in groups.items()} == {"server": 3 + 1, "worker": 2}
    assert groups["server"]["minResource"] == {"cpu": "4", "memory": "32Gi"}
    assert {one.template["metadata"]["annotations"][GROUP] for one in pod_sets(manifests)} == set(groups)
    for one in pod_sets(manifests):
        group, spec = groups[one.template["metadata"]["annotations"][GROUP]], one.template["spec"]
        assert group["nodeSelector"] == spec["nodeSelector"] == {"zone": "a"}
        assert group["tolerations"] == spec["tolerations"] == TOLERATIONS
        assert group["affinity"] == spec["affinity"]


def test_every_pod_carries_what_yunikorn_reads():
    for one in pod_sets(render(a_job(2, gang="yunikorn", placeholder_timeout_s=90))):
        head = one.template["metadata"]
        assert (head["labels"][APP], head["labels"][QUEUE]) == ("bert", "root.ml")
        assert head["annotations"][POLICY] == "placeholderTimeoutInSeconds=90 gangSchedulingStyle=Hard"
        assert one.template["spec"]["schedulerName"] == "yunikorn"


def test_yunikorn_anti_affinity_of_workers_is_only_preferred():
    (one,) = pod_sets(render(a_job(gang="yunikorn")))
    assert list(one.template["spec"]["affinity"]["podAntiAffinity"]) == [
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]


def test_kuberay_writes_the_groups_of_a_rayjob():
    manifests = render(a_job(gang="yunikorn", kind="rayjob"))
    labels = manifests[-1]["metadata"]["labels"]
    assert labels["ray.io/gang-scheduling-enabled"] == "true"
    assert (labels[APP], labels[QUEUE]) == ("bert", "root.ml")
    for one in pod_sets(manifests):
        assert set(one.template["metadata"]["annotations"]) == {POLICY}


class Edit:
    """A JobSet of two workers and two servers, as a person edits it."""

    def __init__(self):
        self.manifests = rendered(servers=2, gang="yunikorn", tolerations=TOLERATIONS, node_selector={"zone": "a"})
        self.sets = pod_sets(self.manifests)
        self.coordinator, self.server, self.worker = (one.template for one in self.sets)
        self.parts = self.manifests[-1]["spec"]["replicatedJobs"]

    def groups(self, change):
        """Change the groups, on all pods."""
        groups = groups_of(self.manifests)
        change({group["name"]: group for group in groups})
        self.text(json.dumps(groups))

    def text(self, text):
        for one in self.sets:
            one.template["metadata"]["annotations"][GROUPS] = text

    def worker_group(self, **changes):
        self.groups(lambda groups: groups["worker"].update(changes))

    def worker_resource(self, **changes):
        self.groups(lambda groups: groups["worker"]["minResource"].update(changes))

    def without(self, key):
        self.groups(lambda groups: groups["worker"].pop(key))

    def policy(self, text):
        for one in self.sets:
            one.template["metadata"]["annotations"][POLICY] = text

    def label(self, key, value):
        self.worker["metadata"]["labels"][key] = value

    def annotation(self, key, value):
        self.worker["metadata"]["annotations"][key] = value


def again(edit):
    """Both groups, the second a second time."""
    groups = groups_of(edit.manifests)
    edit.text(json.dumps([*groups, groups[1]]))


def more_containers(edit):
    side = {"name": "log", "image": "log:1", "resources": {"requests": {"cpu": "1"}}}
    edit.worker["spec"]["containers"].append(side)


def a_sidecar(edit):
    side = {"name": "log", "image": "log:1", "restartPolicy": "Always", "resources": {"limits": {"memory": "1Gi"}}}
    edit.worker["spec"]["initContainers"] = [side]


def strict_anti_affinity(edit, role="worker"):
    expression = {"key": "app.kubernetes.io/component", "operator": "In", "values": [role]}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchExpressions": [expression]}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    edit.worker["spec"]["affinity"] = affinity
    edit.worker_group(affinity=affinity)


# What a person did to good manifests, and the reason for which they are refused.
MUTATIONS = {
    # members
    "more members than pods": (lambda e: e.worker_group(minMember=3), "1 placeholders would never be replaced"),
    "fewer members than pods": (lambda e: e.worker_group(minMember=1), "1 pods would not be part of the gang"),
    "no members": (lambda e: e.worker_group(minMember=0), "must be above 0"),
    "members below zero": (lambda e: e.worker_group(minMember=-2), "must be above 0"),
    "members above 32 bits": (lambda e: e.worker_group(minMember=2**31), "below 2^31"),
    "members as a text": (lambda e: e.worker_group(minMember="2"), "a whole number, not '2'"),
    "members as a fraction": (lambda e: e.worker_group(minMember=2.0), "a whole number, not 2.0"),
    "members as a truth value": (lambda e: e.worker_group(minMember=True), "a whole number, not True"),
    "members left out": (lambda e: e.without("minMember"), "a whole number, not None"),
    "servers without their coordinator": (
        lambda e: e.groups(lambda g: g["server"].update(minMember=2)),
        "minMember 2 and 3 pods: 1 pods would not be part of the gang",
    ),
    "pods added and not the members": (
        lambda e: e.parts[1]["template"]["spec"].update(parallelism=3),
        "minMember 3 and 4 pods",
    ),
    # keys
    "a misspelt key": (lambda e: e.worker_group(toleration=TOLERATIONS), "did you mean 'tolerations'"),
    "a key with a small letter": (lambda e: e.worker_group(minresource={}), "did you mean 'minResource'"),
    "a key of another scheduler": (lambda e: e.worker_group(minAvailable=2), "'minAvailable', which YuniKorn leaves out"),
    "a key said twice": (
        lambda e: e.text(e.worker["metadata"]["annotations"][GROUPS].replace('"minMember": 2', '"minMember": 2, "minMember": 2')),
        "says 'minMember' twice",
    ),
    "labels that are no words": (lambda e: e.worker_group(labels={"a": 1}), "its labels must be words by words"),
    # resources
    "the key pods": (lambda e: e.worker_resource(pods="2"), "the key pods, which YuniKorn counts by itself"),
    "cpu and vcore": (lambda e: e.worker_resource(vcore="16"), "cpu and vcore, which are one resource"),
    "less memory than the pod": (lambda e: e.worker_resource(memory="100Gi"), "reserves memory=100Gi, and a pod of JobSet bert, worker asks for 200Gi"),
    "more cpu than the pod": (lambda e: e.worker_resource(cpu="17"), "reserves cpu=17"),
    "memory in another unit": (lambda e: e.worker_resource(memory="200G"), "reserves memory=200G"),
    "no accelerators": (lambda e: e.groups(lambda g: g["worker"]["minResource"].pop("nvidia.com/gpu")), "reserves nvidia.com/gpu=nothing"),
    "accelerators that the pod does not have": (lambda e: e.worker_resource(**{"amd.com/gpu": "1"}), "asks for nothing"),
    "another number of accelerators": (lambda e: e.worker_resource(**{"nvidia.com/gpu": "4"}), "asks for 8"),
    "a resource below zero": (lambda e: e.worker_resource(cpu="-16"), "cpu=-16 is below 0"),
    "a resource that is no quantity": (lambda e: e.worker_resource(memory="200GB"), "memory='200GB' is no quantity"),
    "a resource of nothing": (lambda e: e.worker_resource(memory=None), "memory=None is no quantity"),
    "more than 64 bits": (lambda e: e.worker_resource(memory="8Ei"), "more memory than a 64-bit number"),
    "more than 64 bits of thousandths": (lambda e: e.worker_resource(cpu="9e15"), "more cpu than a 64-bit number"),
    "resources left out": (lambda e: e.without("minResource"), "needs a minResource"),
    "no resources": (lambda e: e.worker_group(minResource={}), "needs a minResource"),
    "resources as a list": (lambda e: e.worker_group(minResource=["cpu"]), "needs a minResource"),
    "a container more in the pods": (more_containers, "reserves cpu=16, and a pod of JobSet bert, worker asks for 16 + 1"),
    "a sidecar in the pods": (a_sidecar, "reserves memory=200Gi"),
    "less in the pods": (lambda e: e.worker["spec"]["containers"][0]["resources"]["requests"].update(cpu="8"), "reserves cpu=16"),
    # where
    "another node selector": (lambda e: e.worker_group(nodeSelector={"zone": "b"}), "its nodeSelector differs"),
    "no tolerations": (lambda e: e.worker_group(tolerations=[]), "its tolerations differs"),
    "no affinity": (lambda e: e.without("affinity"), "its affinity differs"),
    "a spread that pods don't have": (lambda e: e.worker_group(topologySpreadConstraints=[{"maxSkew": 1}]), "its topologySpreadConstraints differs"),
    "another node selector of the pods": (lambda e: e.worker["spec"].update(nodeSelector={"zone": "b"}), "its nodeSelector differs"),
    "a strict anti-affinity": (strict_anti_affinity, "off the node of its placeholder"),
    # style and timeout
    "Soft style": (lambda e: e.policy("placeholderTimeoutInSeconds=600 gangSchedulingStyle=Soft"), "the style 'Soft': after the timeout a part of the gang would start"),
    "no style": (lambda e: e.policy("placeholderTimeoutInSeconds=600"), "no style, which means Soft"),
    "an unknown style": (lambda e: e.policy("gangSchedulingStyle=Firm"), "the style 'Firm', which is taken as Soft"),
    "a style with a small letter": (lambda e: e.policy("gangSchedulingStyle=hard"), "which is taken as Soft"),
    "two spaces": (lambda e: e.policy("placeholderTimeoutInSeconds=600  gangSchedulingStyle=Hard"), "the part '', which is skipped"),
    "a comma": (lambda e: e.policy("placeholderTimeoutInSeconds=600,gangSchedulingStyle=Hard"), "which is skipped"),
    "a misspelt parameter": (lambda e: e.policy("placeholderTimeoutSeconds=30 gangSchedulingStyle=Hard"), "did you mean 'placeholderTimeoutInSeconds'"),
    "a timeout with a unit": (lambda e: e.policy("placeholderTimeoutInSeconds=10m gangSchedulingStyle=Hard"), "no number of seconds"),
    "a timeout of zero": (lambda e: e.policy("placeholderTimeoutInSeconds=0 gangSchedulingStyle=Hard"), "no number of seconds"),
    "a style said twice": (lambda e: e.policy("gangSchedulingStyle=Hard gangSchedulingStyle=Hard"), "has gangSchedulingStyle twice"),
    "no parameters": (lambda e: e.worker["metadata"]["annotations"].pop(POLICY), f"the annotation {POLICY} is missing"),
    # names
    "no queue": (lambda e: e.worker["metadata"]["labels"].pop(QUEUE), f"the label {QUEUE} is missing: no queue is named"),
    "an empty queue": (lambda e: e.label(QUEUE, ""), "no queue is named"),
    "no application": (lambda e: e.worker["metadata"]["labels"].pop(APP), "no application is named"),
    "two queues": (lambda e: e.label(QUEUE, "root.other"), "differs (root.ml, root.other)"),
    "two applications": (lambda e: e.label(APP, "gpt"), "differs (bert, gpt)"),
    "an application with capitals": (lambda e: e.label(APP, "Bert"), "placeholders are named after it"),
    "the old label of a queue": (lambda e: e.label("queue", "root.old"), "the old label queue=root.old says something else"),
    "a misspelt label": (lambda e: e.label("yunikorn.apache.org/appid", "bert"), "did you mean 'yunikorn.apache.org/app-id'"),
    "an annotation of an old guide": (lambda e: e.annotation("yunikorn.apache.org/taskGroupName", "worker"), "YuniKorn knows no yunikorn.apache.org/taskGroupName"),
    "another scheduler": (lambda e: e.worker["spec"].update(schedulerName="default-scheduler"), "YuniKorn leaves it alone"),
    "no scheduler": (lambda e: e.worker["spec"].pop("schedulerName"), "its schedulerName is not yunikorn"),
    # groups
    "no group": (lambda e: e.worker["metadata"]["annotations"].pop(GROUP), f"the annotation {GROUP} is missing"),
    "a group that is not there": (lambda e: e.annotation(GROUP, "workers"), "did you mean 'worker'"),
    "no groups on one kind of pod": (lambda e: e.worker["metadata"]["annotations"].pop(GROUPS), f"the annotation {GROUPS} is missing"),
    "other groups on one kind of pod": (lambda e: e.annotation(GROUPS, json.dumps(groups_of(e.manifests)[1:])), "is not the same on all pods"),
    "a group without pods": (lambda e: e.groups(lambda g: g["server"].update(name="servers")), "its placeholders would never be replaced"),
    "two groups of one name": (again, "two groups of one name"),
    "a group with a capital": (lambda e: e.worker_group(name="Worker"), "placeholders are named after it"),
    "a group without a name": (lambda e: e.without("name"), "the task group None needs a name"),
    "groups that are not JSON": (lambda e: e.text("[{name: worker}]"), "is not JSON"),
    "groups with typographic quotes": (lambda e: e.text("[{“name”: “worker”}]"), "is not JSON"),
    "no groups at all": (lambda e: e.text("[]"), "must be a list of groups"),
    "groups under a key": (lambda e: e.text('{"taskGroups": []}'), "must be a list of groups"),
    "groups that are words": (lambda e: e.text('["worker"]'), "must be a list of groups"),
    "labels beside metadata": (lambda e: e.worker.update(labels=e.worker["metadata"].pop("labels")), "where it has no effect"),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTATIONS)
def test_mutated_task_groups_are_refused_with_the_reason(case):
    change, said = MUTATIONS[case]
    edit = Edit()
    check(edit.manifests)
    change(edit)
    with pytest.raises(PlanError) as caught:
        check(edit.manifests)
    assert said in str(caught.value)
    assert THREE_PARTS.match(str(caught.value))


def test_there_are_many_mutations():
    assert len(MUTATIONS) >= 30


# Other ways to say the same.
SAME = {
    "memory in another unit": lambda e: e.worker_resource(memory="204800Mi"),
    "thousandths of cpu": lambda e: e.worker_resource(cpu="16000m"),
    "a resource as a number": lambda e: e.worker_resource(cpu=16),
    "a resource of zero": lambda e: e.worker_resource(**{"amd.com/gpu": "0"}),
    "no empty keys": lambda e: e.without("topologySpreadConstraints"),
    "an anti-affinity against others": lambda e: strict_anti_affinity(e, "server"),
    "no timeout": lambda e: e.policy("gangSchedulingStyle=Hard"),
    "the other order": lambda e: e.policy("gangSchedulingStyle=Hard placeholderTimeoutInSeconds=5"),
    "the old label with the same queue": lambda e: e.label("queue", "root.ml"),
    "a small init container": lambda e: e.worker["spec"].update(
        initContainers=[{"name": "a", "image": "b", "resources": {"requests": {"cpu": "1"}}}]
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_what_means_the_same_is_accepted(case):
    edit = Edit()
    SAME[case](edit)
    check(edit.manifests)


def test_a_rayjob_must_ask_for_its_gang():
    for key in ("ray.io/gang-scheduling-enabled", APP, QUEUE):
        manifests = rendered(gang="yunikorn", kind="rayjob")
        del manifests[-1]["metadata"]["labels"][key]
        with pytest.raises(PlanError, match=f"no label {key}"):
            check(manifests)
    manifests = rendered(gang="yunikorn", kind="rayjob")
    pod_sets(manifests)[0].template["metadata"]["annotations"][POLICY] = "gangSchedulingStyle=Soft"
    with pytest.raises(PlanError, match="the style 'Soft'"):
        check(manifests)


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 300),
    ranks=st.integers(1, 8),
    servers=st.integers(0, 9),
    cpu=st.sampled_from(["1", "500m", "96", "1.5"]),
    memory=st.sampled_from(["40Gi", "1Ti", "64e9", "33000M"]),
    kind=st.sampled_from(["jobset", "job"]),
)
def test_whatever_the_size_the_rules_hold(nodes, ranks, servers, cpu, memory, kind):
    sizes = {"cpu": cpu, "memory": memory, "server_cpu": "", "server_memory": ""}
    manifests = render(a_job(servers, nodes, ranks, gang="yunikorn", kind=kind, **sizes))
    wanted = {"worker": nodes} | ({"server": servers + 1} if servers else {})
    assert {group["name"]: group["minMember"] for group in groups_of(manifests)} == wanted
