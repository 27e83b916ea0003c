"""Jobs for the tests of manifests, and the official schemas to hold them against."""

import copy
import functools
import json
from importlib.resources import files

import jsonschema
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime
from referencing import Registry, Resource

from paceline.launch.kubernetes.gang import SCHEDULERS
from paceline.launch.kubernetes.kubernetes_job import KINDS, SERVER_KINDS
from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.submit import KubernetesJob, render
from paceline.nouns.plan import Plan

NEWEST, OLDEST = "1.37.0", "1.29.0"  # of Kubernetes; sidecars and podReplacementPolicy are older than the oldest
# Keys of objects that have no published schema in a Python package, from the Go types of each project:
# mpi-operator pkg/apis/kubeflow/v2beta1/types.go, kuberay ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go,
# volcano.sh/apis pkg/apis/scheduling/v1beta1/types.go, scheduler-plugins apis/scheduling/v1alpha1/types.go.
POLICY = {"minAvailable", "queue", "minResources", "priorityClass", "scheduleTimeoutSeconds"}
REPLICA = {"replicas", "template", "restartPolicy"}
RUN_POLICY = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "suspend"}
MPI = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath", "mpiImplementation"}
RAY = {"entrypoint", "submissionMode", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec", "suspend"}
RAY_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
VOLCANO = {"minMember", "minTaskMember", "minResources", "queue", "priorityClassName"}
COSCHEDULING = {"minMember", "minResources", "scheduleTimeoutSeconds"}


def a_job(servers=0, nodes=2, ranks=8, **changes):
    plan = f"replicate={int(nodes * ranks) or 1}" + (f",server={servers}" if servers else "")
    scheduler = SCHEDULERS.get(changes.get("gang", "none"))
    usual = {
        "name": "bert",
        "image": "registry.example/bert:1",
        "command": ["train.py", "--lr", "1e-3"],
        "plan": Plan.parse(plan),
        "nodes": nodes,
        "ranks_per_node": ranks,
        "cpu": "16",
        "memory": "200Gi",
        "shm": "16Gi",
        "accelerators": 8,
        "queue": scheduler.queue_example if scheduler and scheduler.queue else "",
        "runs_claim": "runs",
        "server_cpu": "4",
        "server_memory": "32Gi",
    }
    return KubernetesJob(**{**usual, **changes})


def combinations():
    """(name, job) of every kind with every gang that goes with it, also with servers."""
    for kind in KINDS:
        for gang, scheduler in SCHEDULERS.items():
            if kind in scheduler.impossible:
                continue
            yield f"{kind}-{gang}", a_job(kind=kind, gang=gang)
            if kind in SERVER_KINDS and kind not in scheduler.impossible_with_servers:
                yield f"{kind}-{gang}-servers", a_job(2, kind=kind, gang=gang)
    yield "trainjob-none-runtime", a_job(kind="trainjob", runtime="torch-distributed")
    yield "trainjob-kueue-runtime", a_job(kind="trainjob", gang="kueue", runtime="torch-distributed")


COMBINATIONS = dict(combinations())


def rendered(**changes):
    """Manifests that a test may change."""
    return copy.deepcopy(render(a_job(**changes)))


@functools.cache
def schema(name, version):
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    own, definitions = (json.loads((folder / f"{one}.json").read_text()) for one in (name, "_definitions"))
    registry = Resource.from_contents(own) @ Registry()
    return jsonschema.Draft202012Validator(own, registry=Resource.from_contents(definitions) @ registry)


def validate_all(manifests, version=NEWEST):
    """Hold each manifest against its official schema, and each pod in it against that of Kubernetes."""
    for one in manifests:
        VALIDATORS[one["kind"], one["apiVersion"].partition("/")[0]](one, version)
    for found in pod_sets(manifests):
        schema("podtemplatespec-v1", version).validate(found.template)


def official(name):
    return lambda one, version: schema(name, version).validate(one)


def pod_group(one, version):
    word = one["apiVersion"].removeprefix("scheduling.k8s.io/")
    schema(f"podgroup-scheduling-{word}", "1.36.0" if word == "v1alpha2" else version).validate(one)


def modelled(model):
    """The model leaves out what it does not know, so what comes back must be what went in."""

    def validate(one, _version):
        assert model.from_dict(one).to_dict() == one

    return validate


def keys(of, *allowed):
    assert not set(of) - set().union(*allowed), set(of) - set().union(*allowed)


def mpi_job(one, _version):
    keys(one["spec"], MPI, {"launcherCreationPolicy"})
    assert one["spec"]["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    keys(one["spec"]["runPolicy"], RUN_POLICY, {"schedulingPolicy"})
    keys(one["spec"]["runPolicy"].get("schedulingPolicy", {}), POLICY)
    keys(one["spec"]["mpiReplicaSpecs"], {"Launcher", "Worker"})
    for replicas in one["spec"]["mpiReplicaSpecs"].values():
        keys(replicas, REPLICA)


def ray_job(one, _version):
    keys(one["spec"], RAY)
    cluster = one["spec"]["rayClusterSpec"]
    keys(cluster, {"headGroupSpec", "workerGroupSpecs"})
    keys(cluster["headGroupSpec"], {"rayStartParams", "template"})
    for group in cluster.get("workerGroupSpecs", []):
        keys(group, RAY_GROUP)
        assert set(group) == RAY_GROUP


VALIDATORS = {
    ("NetworkPolicy", "networking.k8s.io"): official("networkpolicy-networking-v1"),
    ("Service", "v1"): official("service-v1"),
    ("Job", "batch"): official("job-batch-v1"),
    ("PodGroup", "scheduling.k8s.io"): pod_group,
    ("PodGroup", "scheduling.volcano.sh"): lambda one, _version: keys(one["spec"], VOLCANO),
    ("PodGroup", "scheduling.x-k8s.io"): lambda one, _version: keys(one["spec"], COSCHEDULING),
    ("JobSet", "jobset.x-k8s.io"): modelled(JobsetV1alpha2JobSet),
    ("TrainJob", "trainer.kubeflow.org"): modelled(TrainerV1alpha1TrainJob),
    ("TrainingRuntime", "trainer.kubeflow.org"): modelled(TrainerV1alpha1TrainingRuntime),
    ("MPIJob", "kubeflow.org"): mpi_job,
    ("RayJob", "ray.io"): ray_job,
}
