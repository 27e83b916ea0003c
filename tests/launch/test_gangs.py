"""Gangs of Kueue, Volcano, Coscheduling, KAI and Kubernetes: sized from the plan, refused where they can't start."""

# ruff: noqa: E501 - a table, a case a line

import copy
import re

import pytest

from paceline.launch.kubernetes.objects import job_manifests, pod_sets
from paceline.launch.kubernetes.submit import check, render
from paceline.nouns.errors import PlanError

from support.on_kubernetes import COMBINATIONS, a_job, rendered

THREE_PARTS = re.compile(r"^.+\n  found: .+\n  fix: .+$", re.DOTALL)
WORKER = {"cpu": 16, "memory": 200, "nvidia.com/gpu": 8}


def pod_group(manifests):
    (found,) = [one for one in manifests if one["kind"] == "PodGroup"]
    return found


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job"])
@pytest.mark.parametrize("gang", ["volcano", "coscheduling", "native"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_pod_group_has_all_pods(kind, gang, nodes):
    manifests = render(a_job(kind=kind, gang=gang, nodes=nodes))
    spec = pod_group(manifests)["spec"]
    if gang == "native":
        assert spec == {"schedulingPolicy": {"gang": {"minCount": nodes}}}
    else:
        assert spec["minMember"] == nodes
        assert spec["minResources"] == {
            "cpu": str(16 * nodes),
            "memory": f"{200 * nodes}Gi",
            "nvidia.com/gpu": str(8 * nodes),
        }


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_servers_are_in_the_gang(kind):
    spec = pod_group(render(a_job(3, kind=kind, gang="volcano")))["spec"]
    assert spec["minMember"] == 3 + 1 + 2
    assert spec["minResources"] == {"cpu": "48", "memory": "528Gi", "nvidia.com/gpu": "16"}
    assert spec["queue"] == "ml"
    assert pod_group(render(a_job(gang="volcano", queue="")))["spec"]["queue"] == "default"


def test_the_names_that_pods_carry():
    for gang, scheduler in (("volcano", "volcano"), ("coscheduling", "scheduler-plugins-scheduler"), ("native", None)):
        for one in pod_sets(render(a_job(2, gang=gang))):
            head, spec = one.template["metadata"], one.template["spec"]
            assert spec.get("schedulerName") == scheduler
            assert {
                "volcano": head.get("annotations", {}).get("scheduling.k8s.io/group-name"),
                "coscheduling": head["labels"].get("scheduling.x-k8s.io/pod-group"),
                "native": spec.get("schedulingGroup", {}).get("podGroupName"),
            }[gang] == "bert"


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job", "mpijob", "rayjob"])
def test_kueue_holds_the_job_until_there_is_room(kind):
    (own,) = job_manifests(render(a_job(kind=kind, gang="kueue")))
    assert own["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "ml"
    assert (own["spec"]["runPolicy"] if kind == "mpijob" else own["spec"])["suspend"] is True


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job"])
def test_kai_is_told_how_many_make_a_gang(kind):
    manifests = render(a_job(kind=kind, gang="kai", nodes=3))
    (own,) = job_manifests(manifests)
    assert own["metadata"]["annotations"] == {"kai.scheduler/batch-min-member": "3"}
    for one in pod_sets(manifests):
        assert one.template["metadata"]["labels"]["kai.scheduler/queue"] == "ml"
        assert one.template["spec"]["schedulerName"] == "kai-scheduler"


@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
def test_the_mpi_operator_makes_its_own_pod_group(gang):
    manifests = render(a_job(kind="mpijob", gang=gang, nodes=3))
    assert not [one for one in manifests if one["kind"] == "PodGroup"]
    policy = manifests[-1]["spec"]["runPolicy"]["schedulingPolicy"]
    assert policy["minAvailable"] == 3
    assert policy["minResources"] == {"cpu": "48", "memory": "600Gi", "nvidia.com/gpu": "24"}
    assert manifests[-1]["spec"]["launcherCreationPolicy"] == "AtStartup"
    assert render(a_job(kind="mpijob"))[-1]["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"


def test_a_scheduler_of_another_name():
    for one in pod_sets(render(a_job(gang="coscheduling", scheduler="gangs"))):
        assert one.template["spec"]["schedulerName"] == "gangs"


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_rules_accept_what_is_rendered(name):
    check(render(COMBINATIONS[name]))


def template(manifests):
    return pod_sets(manifests)[-1].template


def metadata(manifests):
    return manifests[-1]["metadata"]


def policy(manifests):
    return manifests[-1]["spec"]["runPolicy"]["schedulingPolicy"]


# The job, what a person did to its manifests, and the reason for which they are refused.
MUTATIONS = {
    "kueue: no queue": ({"gang": "kueue"}, lambda m: metadata(m)["labels"].update({"kueue.x-k8s.io/queue-name": ""}), "must name a queue, and says ''"),
    "kueue: a queue with dots": ({"gang": "kueue"}, lambda m: metadata(m)["labels"].update({"kueue.x-k8s.io/queue-name": "root.ml"}), "and says 'root.ml'"),
    "kueue: a misspelt label": ({"gang": "kueue"}, lambda m: metadata(m)["labels"].update({"kueue.x-k8s.io/queuename": "ml"}), "did you mean 'kueue.x-k8s.io/queue-name'"),
    "kueue: only a misspelt label": (
        {"gang": "kueue"},
        lambda m: metadata(m)["labels"].update({"kueue.x-k8s.io/queue": metadata(m)["labels"].pop("kueue.x-k8s.io/queue-name")}),
        "must name a queue, and says None",
    ),
    "kueue: not suspended": ({"gang": "kueue"}, lambda m: m[-1]["spec"].update(suspend=False), "starts before Kueue has room"),
    "kueue: an MPIJob not suspended": ({"gang": "kueue", "kind": "mpijob"}, lambda m: m[-1]["spec"]["runPolicy"].pop("suspend"), "starts before Kueue has room"),
    "kueue: a RayJob that stays": ({"gang": "kueue", "kind": "rayjob"}, lambda m: m[-1]["spec"].pop("shutdownAfterJobFinishes"), "only with shutdownAfterJobFinishes"),
    "volcano: more members than pods": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"].update(minMember=3), "minMember 3 and 2 pods: the gang would never be whole"),
    "volcano: fewer members than pods": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"].update(minMember=1), "a part could start alone"),
    "volcano: no members": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"].pop("minMember"), "minMember None and 2 pods"),
    "volcano: less than the pods need": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"]["minResources"].update(cpu="16"), "minResources cpu=16, and its pods ask for 32 together"),
    "volcano: no accelerators": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"]["minResources"].pop("nvidia.com/gpu"), "nvidia.com/gpu=nothing, and its pods ask for 16"),
    "volcano: a resource that is no quantity": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"]["minResources"].update(memory="many"), "memory='many' is no quantity"),
    "volcano: a misspelt key": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"].update(minMembers=2), "did you mean 'minMember'"),
    "volcano: no queue": ({"gang": "volcano"}, lambda m: pod_group(m)["spec"].pop("queue"), "names no queue"),
    "volcano: no pod group": ({"gang": "volcano"}, lambda m: m.pop(1), "there is no such PodGroup"),
    "volcano: pods of another group": ({"gang": "volcano"}, lambda m: template(m)["metadata"]["annotations"].update({"scheduling.k8s.io/group-name": "gpt"}), "group-name is 'gpt', and there is no such PodGroup"),
    "volcano: pods of no group": ({"gang": "volcano"}, lambda m: template(m)["metadata"]["annotations"].clear(), "group-name is None"),
    "volcano: no scheduler": ({"gang": "volcano"}, lambda m: template(m)["spec"].pop("schedulerName"), "write volcano"),
    "volcano: servers outside the gang": ({"gang": "volcano", "servers": 2}, lambda m: pod_sets(m)[1].template["metadata"]["annotations"].clear(), "JobSet bert, server: its scheduling.k8s.io/group-name is None"),
    "coscheduling: more members than pods": ({"gang": "coscheduling"}, lambda m: pod_group(m)["spec"].update(minMember=5), "minMember 5 and 2 pods"),
    "coscheduling: a key of Volcano": ({"gang": "coscheduling"}, lambda m: pod_group(m)["spec"].update(queue="ml"), "'queue', which is left out"),
    "coscheduling: no label": ({"gang": "coscheduling"}, lambda m: template(m)["metadata"]["labels"].pop("scheduling.x-k8s.io/pod-group"), "pod-group is None"),
    "coscheduling: no scheduler": ({"gang": "coscheduling"}, lambda m: template(m)["spec"].pop("schedulerName"), "is not asked"),
    "native: another count": ({"gang": "native"}, lambda m: pod_group(m)["spec"]["schedulingPolicy"]["gang"].update(minCount=1), "minCount 1 and 2 pods: a part could start alone"),
    "native: no gang": ({"gang": "native"}, lambda m: pod_group(m)["spec"].update(schedulingPolicy={"basic": {}}), "minCount None and 2 pods"),
    "native: another group": ({"gang": "native"}, lambda m: template(m)["spec"]["schedulingGroup"].update(podGroupName="gpt"), "podGroupName is 'gpt'"),
    "native: no group": ({"gang": "native"}, lambda m: template(m)["spec"].pop("schedulingGroup"), "podGroupName is None"),
    "kai: no queue": ({"gang": "kai"}, lambda m: template(m)["metadata"]["labels"].pop("kai.scheduler/queue"), "no queue is named"),
    "kai: another count": ({"gang": "kai"}, lambda m: metadata(m)["annotations"].update({"kai.scheduler/batch-min-member": "1"}), "says '1' and there are 2 pods"),
    "kai: no count": ({"gang": "kai"}, lambda m: metadata(m)["annotations"].clear(), "says None and there are 2 pods"),
    "kai: roles one after another": ({"gang": "kai"}, lambda m: m[-1]["spec"].pop("startupPolicy"), "a gang of each role by itself"),
    "kai: servers elsewhere": ({"gang": "kai", "servers": 1}, lambda m: pod_sets(m)[0].template["spec"].pop("schedulerName"), "its schedulerName is not kai-scheduler"),
    "kai: a second Job": ({"gang": "kai", "kind": "job"}, lambda m: m.append(copy.deepcopy(m[-1])), "KAI makes a gang of each Job by itself"),
    "mpi: more members than pods": ({"gang": "volcano", "kind": "mpijob"}, lambda m: policy(m).update(minAvailable=3), "minAvailable 3 and 2 pods"),
    "mpi: a key of the pod group": ({"gang": "volcano", "kind": "mpijob"}, lambda m: policy(m).update(minMember=2), "'minMember', which is left out"),
    "mpi: less than the pods need": ({"gang": "coscheduling", "kind": "mpijob"}, lambda m: policy(m)["minResources"].update(memory="1Gi"), "ask for 400Gi together"),
    "mpi: a launcher that comes last": ({"gang": "volcano", "kind": "mpijob"}, lambda m: m[-1]["spec"].update(launcherCreationPolicy="WaitForWorkersReady"), "so the gang is never whole"),
}  # fmt: skip


@pytest.mark.parametrize("case", MUTATIONS)
def test_mutated_gangs_are_refused_with_the_reason(case):
    changes, change, said = MUTATIONS[case]
    manifests = rendered(**changes)
    check(manifests)
    change(manifests)
    with pytest.raises(PlanError) as caught:
        check(manifests)
    assert said in str(caught.value)
    assert THREE_PARTS.match(str(caught.value))
