"""Write a job on Kubernetes as manifests, check them against the schedulers' rules, show them and send them.

    KubernetesJob ─► render ─► check ─► to_text: what --dry-run prints
                                        send: the same text to `kubectl apply -f -`

Nothing here asks a cluster: `check` knows the rules of the gang schedulers, so a gang that could never start is
refused while a user looks on, and not after a night in a queue.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.kubernetes import gang as gangs
from paceline.launch.kubernetes import objects as manifest_kinds
from paceline.launch.kubernetes import pods
from paceline.launch.kubernetes.kubernetes_job import KubernetesJob
from paceline.launch.kubernetes.objects import PodSet, field_of, job_manifests, pod_sets
from paceline.launch.kubernetes.pods import COORDINATOR, SERVER, WORKER, Manifest
from paceline.nouns.errors import PacelineError, PlanError, UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import MOST_DIGITS, parse_whole, read_text, reason_of

_LONGEST_REASON = 300  # characters of a parser's message
_LONGEST_ANCHOR = 50  # characters of a name in an error
_MOST_BYTES = 2**20  # the largest file; a cluster takes no object that is larger
# kubectl reads more texts as numbers and truth values than the library that writes here: such as 1e-3, or y.
_NUMBER_LIKE = re.compile(r"[-+]?[.\d]")
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", "")

__all__ = ["KubernetesJob", "check", "notes", "read_manifests", "render", "send", "to_text"]


def render(job: KubernetesJob) -> list[Manifest]:
    """Render all manifests of the job, in the order in which they are sent, and check them."""
    job_and_gang = gangs.attach(job, manifest_kinds.KINDS[job.kind](job))
    manifests = [pods.network_policy(job), *job_and_gang]
    check(manifests)
    return manifests


def notes(job: KubernetesJob) -> list[str]:
    """Return the remarks for the user on a job's manifests."""
    remarks = []
    if not job.runs_claim:
        remarks.append(f"{job.runs} is the pods' own: checkpoints don't outlive them; name a claim with --runs-claim")
    if job.servers:
        secrets = ", ".join(f"{job.name}-credentials-{role}" for role in (COORDINATOR, SERVER, WORKER))
        remarks.append(f"the secrets {secrets} are made beforehand: see docs/kubernetes.md")
    remarks += job.gang_scheduler.notes(job)
    return remarks


def check(manifests: Sequence[Manifest]) -> None:
    """Check manifests, also such as a user has edited, against the plan and the schedulers' rules.

    All problems are in one error.

    Raises:
        PlanError: they break some rules; each is named, with the reason why it matters.
        UsageError: they are no manifests, or no job is among them.
    """
    are_manifests = all(isinstance(manifest, dict) for manifest in manifests)
    if not are_manifests or not job_manifests(manifests):
        raise UsageError(
            "can't check the manifests",
            "no job is among them",
            "name a file that `paceline submit kubernetes --dry-run` printed",
        )
    try:
        sets = pod_sets(manifests)
        problems = [*_shape_problems(manifests, sets), *_plan_problems(manifests, sets), *gangs.problems(manifests)]
    except (AttributeError, TypeError, LookupError, ValueError, RecursionError, ArithmeticError) as error:
        # A user may have edited them: whatever is expected to be a table or a number can be something else.
        raise UsageError(
            "can't check the manifests", f"one has a part of the wrong form ({reason_of(error)})", "print them again"
        ) from None
    if problems:
        name = field_of(job_manifests(manifests)[0], "metadata", "name")
        raise PlanError(
            f"the manifests of {name} should start as planned",
            "; ".join(dict.fromkeys(problems)),
            "mend this, or have them printed again with --dry-run",
        )


def _shape_problems(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    namespaces = set()
    for manifest in manifests:
        namespaces.add(field_of(manifest, "metadata", "namespace") or "default")
    if len(namespaces) > 1:
        yield f"they are in several namespaces ({', '.join(sorted(map(str, namespaces)))})"
    kinds = {manifest.get("kind") for manifest in manifests}
    if "RayJob" in kinds and "NetworkPolicy" not in kinds:
        yield "there is no NetworkPolicy: whoever reaches Ray's dashboard can run code"
    for pod_set in sets:
        for key in pod_set.template:
            if key not in ("metadata", "spec"):
                yield f"{pod_set.place}: {key!r} stands beside metadata in the template, where it has no effect"
        containers = field_of(pod_set.template, "spec", "containers")
        if (
            not isinstance(containers, list)
            or not containers
            or not all(isinstance(container, dict) for container in containers)
        ):
            yield f"{pod_set.place}: its pods have no container"


def _plan_problems(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Yield a problem where there are not as many pods as the plan in their commands needs."""
    workers = [pod_set for pod_set in sets if pod_set.role == WORKER]
    command = []
    for worker in workers:
        command += _command_of(worker)
    for manifest in manifests:  # a RayJob's command is not its pods', but its own
        command += shlex.split(str(field_of(manifest, "spec", "entrypoint") or ""))
    plan = _after("--plan", command)
    if plan is None:
        return  # a TrainJob with a foreign runtime, or a job that is not Paceline's
    parsed = Plan.parse(plan)
    size = (_after("-j", command) or "").split("x")
    worker_pods = sum(worker.count for worker in workers)
    numbers = [number for number in map(parse_whole, size) if number is not None]
    if len(size) == 2 and len(numbers) == 2:
        nodes, per_node = numbers
        if nodes * per_node != parsed.world_size:
            yield f"-j {nodes}x{per_node} is not the {parsed.world_size} ranks of the plan {plan}"
        if worker_pods != nodes:
            yield f"there are {worker_pods} pods of workers, and -j {nodes}x{per_node} wants {nodes}"
    elif _after("-np", command) != str(parsed.world_size):
        yield f"mpirun starts {_after('-np', command)} ranks, and the plan {plan} has {parsed.world_size}"
    for role, count in ((SERVER, parsed.server), (COORDINATOR, min(parsed.server, 1))):
        found_pods = sum(pod_set.count for pod_set in sets if pod_set.role == role)
        if found_pods != count:
            yield f"there are {found_pods} pods with the role {role}, and the plan {plan} wants {count}"


def _command_of(pod_set: PodSet) -> list[str]:
    """Return the commands of all containers of a pod, one after the other."""
    command = []
    for container in field_of(pod_set.template, "spec", "containers") or []:
        for word in field_of(container, "command") or []:
            command.append(str(word))
    return command


def _after(flag: str, command: Sequence[str]) -> str | None:
    """Return the value of a flag in a command; None where it has none."""
    for word, value in itertools.pairwise(command):
        if word == flag:
            return value
    return None


def to_text(manifests: Sequence[Manifest], remarks: Sequence[str] = ()) -> str:
    """Write the manifests as YAML, exactly as they are sent; `remarks` become comments on top."""
    import yaml  # only here: other commands start faster without

    class Writer(yaml.SafeDumper):
        """Write texts of several lines as such, and equal values again in full."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(writer: yaml.SafeDumper, value: str) -> Any:
        style = None
        if "\n" in value:
            style = "|"
        elif _NUMBER_LIKE.match(value) or value.lower() in _WORDS:
            style = "'"
        return writer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Writer.add_representer(str, text)
    body = yaml.dump_all(
        manifests, Dumper=Writer, sort_keys=False, width=2**31, explicit_start=True, allow_unicode=True
    )
    comments = "".join(f"# {remark}\n" for remark in remarks)
    return comments + str(body)


def read_manifests(path: Path) -> list[Manifest]:
    """Read the manifests in a file, to be checked.

    Raises:
        UsageError: it can't be read, or is not YAML.
    """
    import yaml

    class Reader(yaml.SafeLoader):
        """Refuse YAML that can stand for more than its text: aliases, and numbers whose digits int() takes long for."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                refused = f"the alias *{event.anchor[:_LONGEST_ANCHOR]}: write out what it stands for"
                raise yaml.composer.ComposerError(None, None, refused, event.start_mark)
            node = super().compose_node(parent, index)
            if node is not None and node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
                refused = f"a number of more than {MOST_DIGITS} digits"
                raise yaml.composer.ComposerError(None, None, refused, node.start_mark)
            return node

    try:
        text = read_text(path, _MOST_BYTES)
        return [manifest for manifest in yaml.load_all(text, Reader) if manifest is not None]
    except (PacelineError, RecursionError, yaml.YAMLError, ValueError, ArithmeticError, LookupError) as error:
        # Of a file that can't be read, the reason within "it can't be read (...)" is enough.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = " ".join(reason_of(cause).split())[:_LONGEST_REASON]
        raise UsageError(f"the manifests in {path}", f"they can't be read ({reason})", "name a YAML file") from None


def send(manifests: Sequence[Manifest], context: str = "") -> str:
    """Check the manifests and hand them to kubectl. Return its answer.

    They go through its standard input: a command's words can be read by every user of this host.

    Args:
        manifests: the manifests that `render` made.
        context: the context of kubectl's configuration; empty: its current one.

    Raises:
        PlanError: they break a rule.
        UsageError: there is no kubectl.
        PacelineError: kubectl refuses them.
    """
    check(manifests)
    command = ["kubectl"]
    if context:
        command += ["--context", context]
    command += ["apply", "-f", "-"]
    try:
        completed = subprocess.run(
            command, input=to_text(manifests), capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        fix = "install kubectl, or write the manifests to a file with --dry-run and apply them elsewhere"
        raise UsageError("can't send the manifests", "there is no kubectl on this host", fix) from None
    if completed.returncode:
        answer = " ".join(completed.stderr.split()) or f"exit code {completed.returncode}"
        reason, fix = _meaning(answer)
        raise PacelineError("can't send the manifests", f"kubectl {reason} ({answer})", fix)
    return completed.stdout


def _meaning(answer: str) -> tuple[str, str]:
    """Return the meaning of kubectl's error message, and the advice to the user."""
    if re.search(r"dial tcp|connection refused|was refused - did you|[Uu]nable to connect|i/o timeout", answer):
        return "reaches no cluster", "see that `kubectl get nodes` works, or name a cluster with --context"
    if "no matches for kind" in answer:
        fix = "install it in the cluster, or write another --kind or --gang (docs/kubernetes.md)"
        return "refuses them", fix
    return "refuses them", "mend what it names"
