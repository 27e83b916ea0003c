"""A job on Kubernetes: written as manifests, held against the schedulers' rules, shown, and sent.

    KubernetesJob ─► render ─► check ─► to_text: what --dry-run prints
                                        send: the same text to `kubectl apply -f -`

Nothing here asks a cluster: `check` knows the rules of the gang schedulers, so a gang that could never start is
refused while a person looks on, and not after a night in a queue.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.kubernetes import gang as gangs
from paceline.launch.kubernetes import objects as manifest_kinds
from paceline.launch.kubernetes import pods
from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.objects import PodSet, field_of, job_manifests, pod_sets
from paceline.launch.kubernetes.pods import COORDINATOR, SERVER, WORKER, Manifest
from paceline.nouns.errors import PacelineError, PlanError, UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.reading import parse_whole, read_text, reason_of

# kubectl reads more texts as numbers and truth values than the library that writes here: such as 1e-3, or y.
_LONGEST_SAID = 300  # characters of what a parser says
_NUMBER_LIKE = re.compile(r"[-+]?[.\d]")
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", "")

__all__ = ["KubernetesJob", "check", "notes", "read_manifests", "render", "send", "to_text"]


def render(job: KubernetesJob) -> list[Manifest]:
    """All that the job is, in the order in which it is sent."""
    made = gangs.attach(job, manifest_kinds.KINDS[job.kind](job))
    manifests = [pods.network_policy(job), *made]
    check(manifests)
    return manifests


def notes(job: KubernetesJob) -> list[str]:
    """What a person should know of these manifests, and they don't say."""
    found = []
    if not job.runs_claim:
        found.append(f"{job.runs} is the pods' own: checkpoints don't outlive them; name a claim with --runs-claim")
    if job.servers:
        secrets = ", ".join(f"{job.name}-credentials-{role}" for role in (COORDINATOR, SERVER, WORKER))
        found.append(f"the secrets {secrets} are made beforehand: see docs/kubernetes.md")
    if job.gang == "none" and job.nodes + job.servers > 1:
        found.append("no gang: some pods may start and wait while others find no room; see --gang")
    if job.gang == "yunikorn" and not job.accelerators:
        found.append("under YuniKorn two pods without accelerators may come to one node")
    if job.kind == "mpijob" and job.gang in ("volcano", "coscheduling"):
        found.append("the MPI Operator must run with --gang-scheduling, or it makes no pod group")
    if job.kind == "rayjob" and job.gang in ("yunikorn", "volcano", "kai"):
        found.append("KubeRay's operator must run with this scheduler as its batch scheduler")
    return found


def check(manifests: Sequence[Manifest]) -> None:
    """Hold manifests, also such as a person has edited, against the plan and the schedulers' rules.

    Raises:
        PlanError: they break some; each is named, with why it matters.
        UsageError: they are no manifests, or start nothing.
    """
    if not all(isinstance(one, dict) for one in manifests) or not job_manifests(manifests):
        raise UsageError("can't check the manifests", "no job is among them", "name a file that `paceline run` printed")
    try:
        sets = pod_sets(manifests)
        found = [*_shape_reasons(manifests, sets), *_plan_reasons(manifests, sets), *gangs.reasons(manifests)]
    except (AttributeError, TypeError, LookupError, ValueError, RecursionError, ArithmeticError) as error:
        raise UsageError(
            "can't check the manifests", f"one has a part of the wrong form ({reason_of(error)})", "print them again"
        ) from None
    if found:
        name = field_of(job_manifests(manifests)[0], "metadata", "name")
        raise PlanError(
            f"the manifests of {name} should start as planned",
            "; ".join(dict.fromkeys(found)),
            "mend this, or have them printed again with --dry-run",
        )


def _shape_reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    spaces = {field_of(one, "metadata", "namespace") or "default" for one in manifests}
    if len(spaces) > 1:
        yield f"they are in several namespaces ({', '.join(sorted(map(str, spaces)))})"
    kinds = {one.get("kind") for one in manifests}
    if "RayJob" in kinds and "NetworkPolicy" not in kinds:
        yield "there is no NetworkPolicy: whoever reaches Ray's dashboard can run code"
    for one in sets:
        for key in one.template:
            if key not in ("metadata", "spec"):
                yield f"{one.where}: {key!r} stands beside metadata in the template, where it has no effect"
        containers = field_of(one.template, "spec", "containers")
        if not isinstance(containers, list) or not containers or not all(isinstance(each, dict) for each in containers):
            yield f"{one.where}: its pods have no container"


def _plan_reasons(manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
    """Whether there are as many pods as the plan in their commands needs."""
    workers = [one for one in sets if one.role == WORKER]
    words = [word for one in workers for word in _words(one)]
    for own in manifests:
        words += shlex.split(str(field_of(own, "spec", "entrypoint") or ""))
    plan = _after("--plan", words)
    if plan is None:
        return  # a TrainJob with a foreign runtime, or a job that is not Paceline's
    wanted = Plan.parse(plan)
    size = (_after("-j", words) or "").split("x")
    pods_of = sum(one.count for one in workers)
    sizes = [number for number in map(parse_whole, size) if number is not None]
    if len(size) == 2 and len(sizes) == 2:
        nodes, per_node = sizes
        if nodes * per_node != wanted.world_size:
            yield f"-j {nodes}x{per_node} is not the {wanted.world_size} ranks of the plan {plan}"
        if pods_of != nodes:
            yield f"there are {pods_of} pods of workers, and -j {nodes}x{per_node} wants {nodes}"
    elif _after("-np", words) != str(wanted.world_size):
        yield f"mpirun starts {_after('-np', words)} ranks, and the plan {plan} has {wanted.world_size}"
    for role, count in ((SERVER, wanted.server), (COORDINATOR, min(wanted.server, 1))):
        there = sum(one.count for one in sets if one.role == role)
        if there != count:
            yield f"there are {there} pods with the role {role}, and the plan {plan} wants {count}"


def _words(one: PodSet) -> list[str]:
    found = [field_of(each, "command") or [] for each in field_of(one.template, "spec", "containers") or []]
    return [str(word) for words in found for word in words]


def _after(flag: str, words: Sequence[str]) -> str | None:
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word == flag), None)


def to_text(manifests: Sequence[Manifest], remarks: Sequence[str] = ()) -> str:
    """The manifests as YAML, exactly as they are sent; `remarks` become comments on top."""
    import yaml  # only here: other commands start faster without

    class Writer(yaml.SafeDumper):
        """Texts of several lines stand as such; what is the same is written out again."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(writer: yaml.SafeDumper, value: str) -> Any:
        is_like_another = _NUMBER_LIKE.match(value) or value.lower() in _WORDS
        style = "|" if "\n" in value else "'" if is_like_another else None
        return writer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Writer.add_representer(str, text)
    body = yaml.dump_all(
        manifests, Dumper=Writer, sort_keys=False, width=2**31, explicit_start=True, allow_unicode=True
    )
    return "".join(f"# {remark}\n" for remark in remarks) + str(body)


def read_manifests(path: Path) -> list[Manifest]:
    """The manifests in a file, to be checked.

    Raises:
        UsageError: it can't be read, or is not YAML.
    """
    import yaml

    try:
        return [one for one in yaml.safe_load_all(read_text(path)) if one is not None]
    except (PacelineError, RecursionError, yaml.YAMLError, ValueError, ArithmeticError, LookupError) as error:
        said = " ".join(reason_of(error).split())[:_LONGEST_SAID]
        raise UsageError(f"the manifests in {path}", f"they can't be read ({said})", "name a YAML file") from None


def send(manifests: Sequence[Manifest], context: str = "") -> str:
    """Check the manifests and hand them to kubectl; what it answers.

    They go through its standard input: a command's words can be read by every user of this host.

    Args:
        manifests: as `render` made them.
        context: of kubectl's configuration; empty: its current one.

    Raises:
        PlanError: they break a rule.
        UsageError: there is no kubectl.
        PacelineError: it refuses them.
    """
    check(manifests)
    command = ["kubectl", *(["--context", context] if context else []), "apply", "-f", "-"]
    try:
        done = subprocess.run(
            command, input=to_text(manifests), capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        fix = "install kubectl, or write the manifests to a file with --dry-run and apply them elsewhere"
        raise UsageError("can't send the manifests", "there is no kubectl on this host", fix) from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise PacelineError("can't send the manifests", f"kubectl refuses them ({said})", "mend what it names")
    return done.stdout
