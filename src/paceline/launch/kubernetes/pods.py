"""Render a job's pods: their commands, their rights, and the connections that they may have."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.launch.rank_command import stall_timeout_flag
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

WORKER = "worker"
SERVER = "server"
COORDINATOR = "coordinator"
NAME_LABEL = "app.kubernetes.io/name"
JOB_LABEL = "app.kubernetes.io/instance"
ROLE_LABEL = "app.kubernetes.io/component"
CONTAINER = "paceline"
RANKS_PORT = 29400
COORDINATOR_PORT = 7070
SERVER_PORT = 7071
SSH_PORT = 2222  # the port of an sshd that does not run as root
SSH_FOLDER = "/home/mpiuser/.ssh"  # where images of the MPI Operator have it
DASHBOARD_PORT = 8265  # the port of Ray's dashboard
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"  # the label with the Job that made a pod; since Kubernetes 1.27
LOCAL_DNS = "169.254.20.10/32"  # the address of a DNS cache on each node, where a cluster has one
SAVE_MARGIN_S = 10  # the part of a pod's grace that is not for saving

Manifest = dict[str, Any]


def labels(job: KubernetesJob, role: str = "") -> dict[str, str]:
    """Return the labels by which the job's objects are found."""
    common = {NAME_LABEL: "paceline", JOB_LABEL: job.name}
    if not role:
        return common
    return {**common, ROLE_LABEL: role}


def metadata(job: KubernetesJob, name: str = "", role: str = "") -> Manifest:
    """Render a manifest's metadata."""
    return {"name": name or job.name, "namespace": job.namespace, "labels": labels(job, role)}


def pod(job: KubernetesJob, role: str, command: Sequence[str], environment: Sequence[Manifest] = ()) -> Manifest:
    """Render a pod template that passes the namespace standard `restricted`.

    Args:
        job: the job that the pod belongs to.
        role: the word worker, server or coordinator.
        command: the command of the container; empty: the caller adds it.
        environment: the variables beside those that every pod has.
    """
    container: Manifest = {"name": CONTAINER, "image": job.image}
    if command:
        container["command"] = [_literal(word) for word in command]
    user_variables = {"HOME": "/tmp", "USER": "paceline"}  # the image may know no user of this number
    variables = []
    for name, value in {**user_variables, **job.environment}.items():
        variables.append({"name": name, "value": _literal(value)})
    container |= {
        "env": [*variables, *environment],
        "resources": _requests_and_limits(job.resources if role == WORKER else job.server_resources),
        "securityContext": container_security(),
        "volumeMounts": mounts(job, role),
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,  # the pods ask nothing of Kubernetes
        "enableServiceLinks": False,  # no variable for each Service of the namespace: there may be thousands
        "securityContext": pod_security(job),
        "affinity": anti_affinity(job, role),
        "containers": [container],
        "volumes": volumes(job, role),
    }
    spec |= placement(job)
    if job.priority_class:
        spec["priorityClassName"] = job.priority_class
    return {"metadata": {"labels": labels(job, role)}, "spec": spec}


def worker_pod(job: KubernetesJob, head: str) -> Manifest:
    """Render a node of the job: it starts its ranks, whose rendezvous is at the pod `head`.

    With an empty `head` the controller sets the rendezvous.
    """
    environment: list[Manifest] = []
    if head:
        rendezvous = {
            "PET_NNODES": str(job.nodes),
            "PET_NPROC_PER_NODE": str(job.ranks_per_node),
            "PET_MASTER_ADDR": head,
            "PET_MASTER_PORT": str(RANKS_PORT),
        }
        environment = [{"name": name, "value": value} for name, value in rendezvous.items()]
    return pod(job, WORKER, run_command(job), environment)


def check_pods_of_servers(plan: Plan, options: Mapping[str, str]) -> None:
    """Raise UsageError for options of servers' pods under a plan without servers.

    Args:
        plan: a plan with or without servers.
        options: the options that are not the default, with their names in errors.
    """
    for name in ("server_cpu", "server_memory"):
        if name in options and not plan.server:
            fix = "add server=2 to the plan, or leave it out"
            raise UsageError(f"{options[name]} does not apply", "the plan has no servers", fix)


def server_pods(job: KubernetesJob, coordinator: str) -> tuple[Manifest, Manifest]:
    """Render the pod of a parameter server, and that of the coordinator, whose address is `coordinator`.

    Both ask for the same, for they are one gang.
    """
    paths = {"POD_IP": "status.podIP", "JOB_UID": f"metadata.labels['{JOB_UID_LABEL}']"}
    environment = []
    for name, path in paths.items():
        environment.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    serve = ["paceline", "server", "serve", "--coordinator", coordinator]
    coordinate = ["paceline", "server", "coordinate", "--plan", job.plan.line()]
    # A pod that takes another's place goes on with its log. When all starts again, under a new Job, the servers are
    # new too, and what was known of the old ones must not stay.
    coordinate += ["--log", f"{job.runs}/{job.name}-coordinator-$(JOB_UID).log"]
    templates = []
    for role, command, port in ((SERVER, serve, SERVER_PORT), (COORDINATOR, coordinate, COORDINATOR_PORT)):
        template = pod(job, role, [], environment)
        # Kubernetes writes the pod's own address here, so that nothing listens at any other.
        command += ["--listen", f"$(POD_IP):{port}", "--credentials", f"/credentials/{role}"]
        template["spec"]["containers"][0]["command"] = command
        templates.append(template)
    return templates[0], templates[1]


def with_coordinator(template: Manifest, coordinator: str) -> Manifest:
    """Add to a worker's pod the variables by which it finds its parameter servers, and return the pod."""
    container = template["spec"]["containers"][0]
    variables = {"PACELINE_COORDINATOR": coordinator, "PACELINE_CREDENTIALS": f"/credentials/{WORKER}"}
    container["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    return template


def run_command(job: KubernetesJob) -> list[str]:
    """Return the command of each node: the same on all, and again after a restart."""
    # Kubernetes sends SIGKILL when the pod's grace has passed: the save must be over before.
    grace = ["--grace", str(job.grace_s - SAVE_MARGIN_S)]
    return [*_run(job), *grace, "-j", f"{job.nodes}x{job.ranks_per_node}", *job.command]


def mpi_command(job: KubernetesJob) -> list[str]:
    """Return the command of an MPIJob's launcher: one process for each rank, which becomes that rank."""
    # sshd gives a process none of its pod's variables: mpirun hands them on by name.
    variables = []
    for name in ("HOME", "USER", *job.environment):
        variables += ["-x", name]
    per_node = f"ppr:{job.ranks_per_node}:node"
    # The other pods' sshd may come up later than the launcher: ssh asks once a second.
    patience = ["--mca", "plm_rsh_args", "-o ConnectionAttempts=120"]
    mpirun = ["mpirun", "-np", str(job.plan.world_size), "--map-by", per_node, *patience, *variables]
    return [*mpirun, *_run(job), *job.command]


def ray_entrypoint(job: KubernetesJob) -> str:
    """Return the command of a Ray cluster's head, as a line for a shell."""
    size = ["-j", f"{job.nodes}x{job.ranks_per_node}"]
    # RAY_ADDRESS: of the cluster that this head is in, and not of one only for this job.
    return shlex.join(["env", "RAY_ADDRESS=auto", *_run(job), "--on", "ray", *size, *job.command])


def _run(job: KubernetesJob) -> list[str]:
    command = ["paceline", "run", "--runs", job.runs, "--job", job.name, "--resume-or-start", "--plan", job.plan.line()]
    default = Plan()
    for name in ("checkpoint_every", "keep", "copy_to"):  # not of the plan's line
        if getattr(job.plan, name) != getattr(default, name):
            command += [f"--{name.replace('_', '-')}", str(getattr(job.plan, name))]
    return [*command, *stall_timeout_flag(job.stall_timeout_s)]


def _literal(word: str) -> str:
    """Escape a word of a command or a variable: Kubernetes would put a variable's value in place of $(NAME)."""
    return word.replace("$(", "$$(")


def _requests_and_limits(resources: dict[str, str]) -> Manifest:
    # Equal requests and limits: the class Guaranteed, whose pods are evicted last.
    return {"requests": dict(resources), "limits": dict(resources)}


def pod_security(job: KubernetesJob) -> Manifest:
    """Render a security context in which nobody is root, and volumes belong to the job's user."""
    number = job.user
    return {
        "runAsNonRoot": True,
        "runAsUser": number,
        "runAsGroup": number,
        "fsGroup": number,
        "fsGroupChangePolicy": "OnRootMismatch",  # a large run directory is not walked through at every start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    """Render a security context without rights beyond the user's, in which the image can't be changed."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def anti_affinity(job: KubernetesJob, role: str) -> Manifest:
    """Render the affinity that puts workers on nodes of their own, and servers apart where there is room.

    Under a scheduler that can't place pods with such an affinity it is a preference for workers too.
    """
    roles = [WORKER] if role == WORKER else [SERVER, COORDINATOR]  # one gang: the same for both
    chosen = {"key": ROLE_LABEL, "operator": "In", "values": roles}
    selector = {"matchLabels": labels(job), "matchExpressions": [chosen]}
    term = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}  # a domain is a node
    if role == WORKER and job.gang_scheduler.allows_strict_anti_affinity:
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def placement(job: KubernetesJob) -> Manifest:
    """Render the choice of nodes for the pods, and the account as which they run."""
    spec: Manifest = {}
    if job.node_selector:
        spec["nodeSelector"] = dict(job.node_selector)
    if job.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in job.tolerations]
    if job.service_account:
        spec["serviceAccountName"] = job.service_account
    if job.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in job.image_pull_secrets]
    return spec


def mounts(job: KubernetesJob, role: str) -> list[Manifest]:
    """Render the folders that a container can write or read."""
    container_mounts: list[Manifest] = []
    if role == WORKER:
        container_mounts += [{"name": "shm", "mountPath": "/dev/shm"}]
    container_mounts += [{"name": "tmp", "mountPath": "/tmp"}]
    if role != SERVER:
        container_mounts += [{"name": "runs", "mountPath": job.runs}]
    if job.servers:
        container_mounts += [{"name": "credentials", "mountPath": f"/credentials/{role}", "readOnly": True}]
    return container_mounts


def volumes(job: KubernetesJob, role: str) -> list[Manifest]:
    """Render the volumes that `mounts` names. The credentials' secret is made beforehand: see docs/kubernetes.md."""
    pod_volumes: list[Manifest] = []
    if role == WORKER:
        pod_volumes += [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}}]
    pod_volumes += [{"name": "tmp", "emptyDir": {}}]
    if role != SERVER:
        runs: Manifest = {"emptyDir": {}}
        if job.runs_claim:
            runs = {"persistentVolumeClaim": {"claimName": job.runs_claim}}
        pod_volumes += [{"name": "runs", **runs}]
    if job.servers:
        secret = {"secretName": f"{job.name}-credentials-{role}", "defaultMode": 0o440}
        pod_volumes += [{"name": "credentials", "secret": secret}]
    return pod_volumes


def network_policy(job: KubernetesJob) -> Manifest:
    """Render the policy that lets the job's pods reach each other and DNS, and nobody else reach them."""
    # Egress needs DNS too, or the pods could not find each other by name.
    job_pods = [{"podSelector": {"matchLabels": labels(job)}}]
    names = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        },
        {"ipBlock": {"cidr": LOCAL_DNS}},
    ]
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    into: list[Manifest] = [{"from": job_pods}]
    if job.kind == "rayjob":
        # The operator submits the job over the dashboard's port, and may be in any namespace.
        operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {NAME_LABEL: "kuberay-operator"}}}
        into += [{"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]}]
    out: list[Manifest] = [{"to": job_pods}, {"to": names, "ports": ports}]
    if job.egress:
        out += [{"to": [{"ipBlock": {"cidr": network}} for network in job.egress]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job),
        "spec": {
            "podSelector": {"matchLabels": labels(job)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": into,
            "egress": out,
        },
    }


def headless_service(job: KubernetesJob) -> Manifest:
    """Render the Service that gives each pod of an indexed Job its name; JobSet and the operators make their own."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods look for each other while they start
            "selector": labels(job),
        },
    }
