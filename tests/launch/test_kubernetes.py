"""Manifests: as they stand in golden/, as the official schemas want them, and refused where they could not work."""

import contextlib
import copy
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launch.kubernetes.objects import job_manifests, pod_sets
from paceline.launch.kubernetes.quantities import pod_resources, read_quantity, write_quantity
from paceline.launch.kubernetes.submit import check, notes, read_manifests, render, send, to_text
from paceline.nouns.errors import PacelineError, PlanError, UsageError
from paceline.nouns.plan import Plan

from support.on_kubernetes import COMBINATIONS, NEWEST, OLDEST, a_job, rendered, schema, validate_all

GOLDEN = Path(__file__).parent / "golden"
REWRITE = "PACELINE_REWRITE_GOLDEN"
THREE_PARTS = re.compile(r"^.+\n  found: .+\n  fix: .+$", re.DOTALL)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_manifests_are_those_of_the_golden_file(name):
    job, file = COMBINATIONS[name], GOLDEN / f"{name}.yaml"
    text = to_text(render(job), notes(job))
    if os.environ.get(REWRITE):
        file.write_text(text)
    assert text == file.read_text(), f"set {REWRITE}=1 to write the golden files again, and read the difference"


def test_every_golden_file_has_its_job():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(COMBINATIONS)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_official_schemas_accept_every_golden_file(name):
    manifests = read_manifests(GOLDEN / f"{name}.yaml")
    validate_all(manifests, NEWEST)
    if "-native" not in name:  # older clusters know no schedulingGroup
        validate_all(manifests, OLDEST)
    check(manifests)


def test_the_schemas_refuse_a_key_that_kubernetes_does_not_have():
    for kind in ("jobset", "trainjob", "job", "mpijob", "rayjob"):
        manifests = rendered(kind=kind)
        pod_sets(manifests)[0].template["spec"]["restartpolicy"] = "Never"
        with pytest.raises((jsonschema.ValidationError, AssertionError)):
            validate_all(manifests)
    manifests = rendered()
    manifests[-1]["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError):
        validate_all(manifests)


def test_pod_groups_of_both_releases_of_kubernetes():
    for api in ("v1beta1", "v1alpha3", "v1alpha2"):
        validate_all(rendered(gang="native", pod_group_api=api), "1.36.0" if api == "v1alpha2" else NEWEST)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_pod_is_hardened(name):
    manifests = render(COMBINATIONS[name])
    own = manifests[0]["spec"]["podSelector"]["matchLabels"]
    for one in pod_sets(manifests):
        spec, container = one.template["spec"], one.template["spec"]["containers"][0]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert spec["restartPolicy"] == "Never"
        assert own.items() <= one.template["metadata"]["labels"].items(), "the NetworkPolicy must select it"
        assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


def test_one_pod_per_node_with_all_its_accelerators():
    for kind in ("jobset", "trainjob", "job", "mpijob", "rayjob"):
        sets = pod_sets(render(a_job(kind=kind, nodes=5)))
        assert sum(one.count for one in sets) == 5
        assert {one.template["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for one in sets} == {"8"}
        for one in sets:
            (term,) = one.template["spec"]["affinity"]["podAntiAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]
            assert term["topologyKey"] == "kubernetes.io/hostname"


def test_one_node_needs_no_other_pods():
    for kind in ("jobset", "trainjob", "job", "mpijob", "rayjob"):
        assert sum(one.count for one in pod_sets(render(a_job(kind=kind, nodes=1)))) == 1


def test_the_network_is_the_jobs_own():
    policy = render(a_job(egress=["10.0.0.0/8"]))[0]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert [port["port"] for port in policy["egress"][1]["ports"]] == [53, 53]
    assert policy["egress"][2] == {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    assert len(render(a_job(kind="rayjob"))[0]["spec"]["ingress"]) == 2


def environment(template):
    return {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}


def test_pods_meet_at_the_first_pod():
    heads = {"jobset": "bert-worker-0-0.bert", "job": "bert-0.bert", "trainjob": None}
    for kind, head in heads.items():
        told = environment(pod_sets(render(a_job(kind=kind)))[-1].template)
        assert told.get("PET_MASTER_ADDR") == head
        assert "PET_NODE_RANK" not in told
        assert not head or (told["PET_NNODES"], told["PET_NPROC_PER_NODE"]) == ("2", "8")


def test_the_commands_words():
    plan = Plan.parse("replicate=16", compression="bf16", checkpoint_every=7)
    command = pod_sets(render(a_job(plan=plan, command=["a b.py", "$(HOME)"])))[0].template["spec"]["containers"][0][
        "command"
    ]
    assert command == [
        *["paceline", "run", "--runs", "/runs", "--job", "bert", "--resume-or-start", "--plan"],
        *[
            "replicate=16,compression=bf16",
            "--checkpoint-every",
            "7",
            "--grace",
            "110",
            "-j",
            "2x8",
            "a b.py",
            "$$(HOME)",
        ],
    ]
    entrypoint = render(a_job(kind="rayjob", command=["a b.py", "$(HOME)"]))[-1]["spec"]["entrypoint"]
    assert entrypoint.startswith("env RAY_ADDRESS=auto paceline run ")
    assert entrypoint.endswith("--on ray -j 2x8 'a b.py' '$(HOME)'")


def test_kubernetes_servers_listen_at_pod_ip_with_named_secrets():
    for kind, coordinator in (("jobset", "bert-coordinator-0-0.bert:7070"), ("job", "bert-coordinator-0.bert:7070")):
        manifests = render(a_job(servers=2, kind=kind))
        sets = {one.role: one for one in pod_sets(manifests)}
        assert {role: one.count for role, one in sets.items()} == {"coordinator": 1, "server": 2, "worker": 2}
        for role, one in sets.items():
            words = one.template["spec"]["containers"][0]["command"]
            if role != "worker":
                assert words[words.index("--listen") + 1].startswith("$(POD_IP):")
                assert words[words.index("--credentials") + 1] == f"/credentials/{role}"
            assert role != "coordinator" or "/runs/bert-coordinator-$(JOB_UID).log" in words
            secret = one.template["spec"]["volumes"][-1]["secret"]
            assert secret["secretName"] == f"bert-credentials-{role}"
        assert environment(sets["worker"].template)["PACELINE_COORDINATOR"] == coordinator
        assert "Secret" not in {one["kind"] for one in manifests}


# What was asked for, and what the error must say.
BAD = {
    "an unknown kind": ({"kind": "jobsett"}, "did you mean 'jobset'"),
    "an unknown gang": ({"gang": "yunicorn"}, "did you mean 'yunikorn'"),
    "an unknown pod group API": ({"pod_group_api": "v1"}, "v1beta1"),
    "a name with capitals": ({"name": "Bert"}, "small letters"),
    "a name that begins with a digit": ({"name": "1bert"}, "a letter first"),
    "a name that ends with a hyphen": ({"name": "bert-"}, "small letters"),
    "a name with a dot": ({"name": "bert.1"}, "small letters"),
    "no name": ({"name": ""}, "small letters"),
    "a name too long for a JobSet": ({"name": "b" * 47}, "at most 46"),
    "a name too long with servers": ({"name": "b" * 43, "servers": 2}, "at most 41"),
    "a name too long for many nodes": ({"name": "b" * 46, "nodes": 11}, "at most 45"),
    "a name too long for a Job": ({"name": "b" * 56, "kind": "job"}, "at most 55"),
    "a name too long for a TrainJob": ({"name": "b" * 49, "kind": "trainjob"}, "at most 48"),
    "a name too long for an MPIJob": ({"name": "b" * 49, "kind": "mpijob"}, "at most 48"),
    "a name too long for a RayJob": ({"name": "b" * 48, "kind": "rayjob"}, "at most 47"),
    "a namespace with capitals": ({"namespace": "ML"}, "the namespace 'ML'"),
    "no image": ({"image": ""}, "no image's name"),
    "an image with a space": ({"image": "a b"}, "no image's name"),
    "no file": ({"command": []}, "no workload file"),
    "fewer ranks than the plan": ({"plan": Plan.parse("replicate=15")}, "ranks\n  found: the plan replicate=15 has 15"),
    "no node": ({"nodes": 0, "plan": Plan.parse("replicate=1")}, "at least 1"),
    "half a node": ({"nodes": 1.5, "plan": Plan.parse("replicate=12")}, "1.5"),
    "accelerators below zero": ({"accelerators": -1}, "at least 0"),
    "more ranks than accelerators": ({"accelerators": 4}, "each rank takes one"),
    "memory with a space": ({"memory": "200 Gi"}, "memory='200 Gi'"),
    "memory in no unit": ({"memory": "200GB"}, "memory='200GB'"),
    "no memory": ({"memory": ""}, "memory=''"),
    "memory of zero": ({"memory": "0"}, "above 0"),
    "cpu below zero": ({"cpu": "-1"}, "above 0"),
    "cpu as a number": ({"cpu": 16}, "cpu=16"),
    "cpu in words": ({"cpu": "many"}, "cpu='many'"),
    "a server's memory in no unit": ({"servers": 1, "server_memory": "x"}, "server_memory='x'"),
    "shm above memory": ({"shm": "200Gi"}, "counts as the pod's memory"),
    "an accelerator without a vendor": ({"accelerator": "gpu"}, "no resource's name"),
    "a run directory that is not absolute": ({"runs": "runs"}, "no absolute path"),
    "root": ({"user": 0}, "at least 1"),
    "no time to save": ({"grace_s": 5}, "at least 20"),
    "restarts below zero": ({"max_restarts": -1}, "at least 0"),
    "no time to be placed": ({"placeholder_timeout_s": 0}, "at least 1"),
    "a gang like no other": ({"gang": "slurm"}, "write one of these"),
    "YuniKorn without a queue": ({"gang": "yunikorn", "queue": ""}, "no queue is named"),
    "Kueue without a queue": ({"gang": "kueue", "queue": ""}, "no queue is named"),
    "KAI without a queue": ({"gang": "kai", "queue": ""}, "no queue is named"),
    "a queue of YuniKorn with a space": ({"gang": "yunikorn", "queue": "root.m l"}, "such as root.ml"),
    "a queue of YuniKorn with an empty part": ({"gang": "yunikorn", "queue": "root..ml"}, "such as root.ml"),
    "a queue of Kueue with dots": ({"gang": "kueue", "queue": "root.ml"}, "such as ml"),
    "a queue that is too long": ({"gang": "kueue", "queue": "q" * 64}, "such as ml"),
    "a queue without a gang": ({"queue": "ml"}, "gang=none has none"),
    "a queue under native": ({"gang": "native", "queue": "ml"}, "gang=native has none"),
    "native with an MPIJob": ({"gang": "native", "kind": "mpijob"}, "silently drops it"),
    "native with a RayJob": ({"gang": "native", "kind": "rayjob"}, "silently drops it"),
    "Coscheduling with a RayJob": ({"gang": "coscheduling", "kind": "rayjob"}, "refuses a RayJob"),
    "a runtime and a scheduler": ({"runtime": "torch", "kind": "trainjob", "scheduler": "x"}, "scheduler=x with"),
    "a variable with a hyphen": ({"environment": {"A-B": "1"}}, "that is no variable's name"),
    "a variable of torchrun": ({"environment": {"PET_NNODES": "1"}}, "sets it for each of them"),
    "egress to a host": ({"egress": ["10.0.0.1/8"]}, "has host bits set"),
    "egress to a name": ({"egress": ["example.org"]}, "no network"),
    "servers in a TrainJob": ({"servers": 1, "kind": "trainjob"}, "workers only"),
    "servers in an MPIJob": ({"servers": 1, "kind": "mpijob"}, "workers only"),
    "servers in a RayJob": ({"servers": 1, "kind": "rayjob"}, "workers only"),
    "servers in plain Jobs under Kueue": ({"servers": 1, "kind": "job", "gang": "kueue"}, "--kind jobset"),
    "servers in plain Jobs under KAI": ({"servers": 1, "kind": "job", "gang": "kai"}, "--kind jobset"),
    "a runtime without a TrainJob": ({"runtime": "torch"}, "a TrainJob has one"),
    "a runtime and a gang": ({"runtime": "torch", "kind": "trainjob", "gang": "yunikorn"}, "its runtime does"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_before_anything_is_written(case):
    changes, said = BAD[case]
    with pytest.raises(PacelineError) as caught:
        a_job(**changes)
    assert said in str(caught.value)
    assert THREE_PARTS.match(str(caught.value)), caught.value
    assert caught.value.exit_code == 2


# What was asked for, and the fix, as flags that can be written so.
FIXES = {
    "shm above memory": ({"shm": "200Gi"}, "write a smaller --shm, or more memory with --memory"),
    "a queue": ({"gang": "kueue", "queue": ""}, "write the queue that the cluster's administrator names, with --queue"),
    "a pair": ({"gang": "kai", "kind": "job", "servers": 1}, "write --kind jobset"),
    "another pair": (
        {"gang": "coscheduling", "kind": "rayjob"},
        "write another --gang, or another --kind, such as --kind jobset",
    ),
    "servers": ({"servers": 1, "kind": "trainjob"}, "write --kind jobset, or leave server out"),
}


@pytest.mark.parametrize("case", FIXES)
def test_a_fix_names_flags(case):
    changes, fix = FIXES[case]
    with pytest.raises(PacelineError) as caught:
        a_job(**changes)
    assert caught.value.fix == fix


def test_a_name_of_the_longest_length_makes_no_longer_names():
    for kind, most in (("jobset", 46), ("trainjob", 48), ("job", 55), ("mpijob", 48), ("rayjob", 47)):
        validate_all(render(a_job(name="b" * most, kind=kind)))


# What a person changed in a JobSet of two nodes with two servers, and what the check must say.
def replicated(manifests, at):
    return manifests[-1]["spec"]["replicatedJobs"][at]["template"]["spec"]


EDITS = {
    "a node fewer": (lambda m: replicated(m, 2).update(parallelism=1), "1 pods of workers, and -j 2x8 wants 2"),
    "a node more": (lambda m: replicated(m, 2).update(parallelism=3), "there are 3 pods of workers"),
    "two sets of workers": (lambda m: m[-1]["spec"]["replicatedJobs"][2].update(replicas=2), "4 pods of workers"),
    "a server fewer": (lambda m: replicated(m, 1).update(parallelism=1), "there are 1 pods with the role server"),
    "no coordinator": (lambda m: m[-1]["spec"]["replicatedJobs"].pop(0), "there are 0 pods with the role coordinator"),
    "another plan": (lambda m: words(m).__setitem__(8, "replicate=8,server=2"), "-j 2x8 is not the 8 ranks"),
    "another size": (lambda m: words(m).__setitem__(words(m).index("-j") + 1, "4x8"), "-j 4x8 is not the 16 ranks"),
    "labels beside metadata": (
        lambda m: replicated(m, 2)["template"].update(labels={"a": "b"}),
        "'labels' stands beside metadata in the template, where it has no effect",
    ),
    "no containers": (lambda m: replicated(m, 2)["template"]["spec"].update(containers=[]), "have no container"),
    "two namespaces": (lambda m: m[0]["metadata"].update(namespace="other"), "in several namespaces (default, other)"),
}  # fmt: skip


def words(manifests):
    return replicated(manifests, 2)["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("case", EDITS)
def test_edited_manifests_must_still_fit_the_plan(case):
    change, said = EDITS[case]
    manifests = rendered(servers=2)
    change(manifests)
    with pytest.raises(PlanError) as caught:
        check(manifests)
    assert said in str(caught.value)
    assert THREE_PARTS.match(str(caught.value))


def test_all_that_is_wrong_is_said_at_once():
    manifests = rendered(servers=2)
    replicated(manifests, 2)["parallelism"] = 3
    replicated(manifests, 1)["parallelism"] = 1
    with pytest.raises(PlanError, match=r"3 pods of workers.*1 pods with the role server"):
        check(manifests)


def test_an_mpijob_starts_as_many_ranks_as_the_plan_has():
    manifests = rendered(kind="mpijob")
    launcher = manifests[-1]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    launcher[launcher.index("-np") + 1] = "8"
    with pytest.raises(PlanError, match="mpirun starts 8 ranks, and the plan replicate=16 has 16"):
        check(manifests)


@pytest.mark.parametrize("manifests", [[], ["text"], [{"kind": "Service"}], [None]])
def test_what_is_no_job_is_refused(manifests):
    with pytest.raises(UsageError, match="no job is among them"):
        check(manifests)


@pytest.mark.parametrize("spoil", ["spec", "replicatedJobs", "template"])
def test_a_part_of_the_wrong_form_is_a_plain_error(spoil):
    manifests = rendered()
    own = manifests[-1]
    if spoil == "spec":
        own["spec"] = ["a"]
    elif spoil == "replicatedJobs":
        own["spec"]["replicatedJobs"] = "a"
    else:
        replicated(manifests, 0)["template"] = {"metadata": {"labels": ["a"]}, "spec": {"containers": ["a"]}}
    with pytest.raises(PacelineError):
        check(manifests)


JUNK = (None, 0, -1, 1.5, True, "", "x", "'", [], ["x"], [None], {}, {"x": "y"}, {"x": None})


@functools.cache
def rendered_once(name):
    return render(COMBINATIONS[name])


def places(node, found):
    """Every (container, key) of a manifest."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        found.append((node, key))
        if isinstance(value, dict | list):
            places(value, found)
    return found


@pytest.mark.parametrize("name", ["jobset-yunikorn-servers", "trainjob-kai", "mpijob-volcano", "rayjob-yunikorn"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_edit_brings_the_check_down(name, data):
    manifests = copy.deepcopy(rendered_once(name))
    found = places(manifests, [])
    where, key = found[data.draw(st.integers(0, len(found) - 1))]
    where[key] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    with contextlib.suppress(PacelineError):
        check(manifests)


def test_notes_say_what_manifests_do_not():
    said = " ".join(notes(a_job(runs_claim="", servers=2, accelerators=0, gang="yunikorn")))
    assert "checkpoints don't outlive them" in said
    assert "bert-credentials-server" in said
    assert "come to one node" in said
    assert "see --gang" in " ".join(notes(a_job()))
    assert notes(a_job(gang="kueue")) == []


TEXTS = st.text("aynZ019 .:#-+'\"\\\n\t{}[],&*!|>%@`~=?<$é∑\u2028\ufeff\x07😀", max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXTS | st.text("-+0123.eEx:_yn~", max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=4), max_size=3))
def test_what_is_written_is_read_back_the_same(manifests):
    assert list(yaml.safe_load_all(to_text(manifests))) == manifests


def test_texts_that_kubectl_reads_as_numbers_are_quoted():
    for text in ("1e-3", "0o17", "12", "-1", ".5", "1:30", "y", "No", "null", "", "~", "1_000"):
        assert to_text([{"key": text}]) == f"---\nkey: '{text}'\n"
    assert to_text([{"key": "a\nb"}]) == "---\nkey: |-\n  a\n  b\n"


def test_manifests_of_a_file_that_is_none(tmp_path):
    for content in ("a: [", "- : -\n  \t- x", None):
        file = tmp_path / "job.yaml"
        file.unlink(missing_ok=True)
        if content:
            file.write_text(content)
        with pytest.raises(UsageError, match="they can't be read") as caught:
            read_manifests(file)
        assert caught.value.found.count("can't be read") == 1


BOMBS = {
    "an alias": ("a: &a [1]\nb: [*a]", r"the alias \*a: write out what it stands for"),
    "merged tables": (
        "a: &a0 {x: 1}\n" + "".join(f"b{n}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(40)),
        "the alias",
    ),
    "a list in itself": ("&a [*a]", "the alias"),
    "digits": (f"a: {'9' * 5000}", "more than 300 digits"),
    "digits in base 60": (f"a: 1{':1' * 100_000}", "more than 300 digits"),
    "a tag of its own": (f'!!int "{"9" * 5000}"', "more than 300 digits"),
    "levels": ("[" * 100_000, "RecursionError"),
    "a long file": ("#" * (2**20 + 1), "more than 1048576 bytes"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_manifests_that_stand_for_more_than_their_text(case, tmp_path):
    content, said = BOMBS[case]
    (tmp_path / "job.yaml").write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        read_manifests(tmp_path / "job.yaml")
    assert len(str(caught.value)) < 1000


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A program of that name that keeps its words and its input, and fails on demand."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nhere = pathlib.Path({str(tmp_path)!r})\n"
        "(here / 'words').write_text(' '.join(sys.argv[1:]))\n(here / 'input').write_text(sys.stdin.read())\n"
        "fails = here / 'fails'\nsys.exit(fails.read_text() if fails.exists() else print('created') or 0)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return tmp_path


def test_kubectl_gets_the_printed_manifests_on_standard_input(kubectl):
    manifests = render(a_job(gang="yunikorn"))
    assert send(manifests, "lab").strip() == "created"
    assert (kubectl / "words").read_text() == "--context lab apply -f -"
    assert (kubectl / "input").read_text() == to_text(manifests)


@pytest.mark.parametrize(
    ("answer", "found", "fix"),
    [
        (
            'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
            "kubectl refuses them (error: no matches for kind",
            "install it in the cluster, or write another --kind or --gang (docs/kubernetes.md)",
        ),
        ('namespaces "ml" not found', 'kubectl refuses them (namespaces "ml" not found)', "mend what it names"),
        (
            'failed to download openapi: Get "http://localhost:8080/openapi/v2": dial tcp: connect: connection refused',
            "kubectl reaches no cluster (failed to download",
            "see that `kubectl get nodes` works, or name a cluster with --context",
        ),
    ],
)
def test_what_kubectl_complains_of_is_told(kubectl, answer, found, fix):
    (kubectl / "fails").write_text(answer)
    with pytest.raises(PacelineError) as caught:
        send(render(a_job()))
    assert found in caught.value.found
    assert caught.value.fix.endswith(fix)
    assert caught.value.exit_code == 1


def test_broken_manifests_are_not_sent(kubectl):
    manifests = rendered()
    replicated(manifests, 0)["parallelism"] = 3
    with pytest.raises(PlanError):
        send(manifests)
    assert not (kubectl / "words").exists()


def test_without_kubectl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no kubectl on this host"):
        send(render(a_job()))


def test_quantities_are_read_exactly():
    for text, value in (("16", 16), ("500m", 0.5), ("200Gi", 200 * 2**30), ("1.5Ki", 1536), ("2e3", 2000), (".5", 0.5)):
        assert read_quantity(text) == value
    for text in ("", "Gi", "1 Gi", "1GB", "1gi", "1e", "--1", "1K", None, True, 1.5, "one"):
        if text != "1K":
            assert read_quantity(text) is None, text


@given(st.integers(0, 2**70))
def test_a_written_quantity_is_the_same_quantity(value):
    assert read_quantity(write_quantity(read_quantity(value))) == value


def test_a_pods_resources_are_those_of_all_its_containers():
    def container(cpu, **more):
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {"containers": [container("1"), container("500m")], "initContainers": [container("2")]}
    assert pod_resources(spec) == {"cpu": 2}
    spec["initContainers"] += [container("1", restartPolicy="Always")]  # a sidecar, which stays
    assert pod_resources(spec) == {"cpu": 2.5}
    assert pod_resources({"containers": [{"resources": {"limits": {"cpu": "3"}}}]}) == {"cpu": 3}


def test_writing_manifests_needs_no_torch():
    code = "import sys, paceline.launch.kubernetes.submit; assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_schemas_are_there():
    assert schema("podtemplatespec-v1", NEWEST).is_valid({"spec": {"containers": [{"name": "a"}]}})
    assert job_manifests(render(a_job()))


def test_a_ray_job_without_its_network_policy_is_refused():
    manifests = render(a_job(kind="rayjob"))
    check(manifests)
    with pytest.raises(PlanError, match="whoever reaches Ray's dashboard can run code"):
        check([one for one in manifests if one["kind"] != "NetworkPolicy"])
