"""The plan: everything that is decided before the first step. The command writes it, a job obeys it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.nouns import arguments
from paceline.nouns.errors import MeshError, PlanError, ReadError, did_you_mean
from paceline.nouns.mesh import AXES, GRAPH_AXES, MOST_RANKS, SHORT, SPREADING_AXES, Mesh
from paceline.nouns.options import SCOPES, check_options, without_effect
from paceline.nouns.reading import (
    LARGEST,
    fault_of,
    parse_json,
    parse_number,
    parse_whole,
    read_json,
    shown,
    write_whole,
)

VERSION = 1
BUCKET_BYTES = 25 * 2**20  # DDP's default (Li et al. 2020)
COMPRESSIONS = ("none", "bf16", "fp16", "powersgd", "topk")
TRANSPORTS = ("auto", "shared_memory", "gloo", "nccl")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
CHECKPOINTING = ("none", "selective", "full", "offload")
OPTIMIZER_STATES = ("full", "8bit", "4bit", "float8")  # all but full by torchao
CONTEXT_BY = ("auto", "ring", "heads")
SWITCH = ("off", "on")
FLOAT8 = ("off", "rowwise", "rowwise_with_gw_hp")  # those of torchao's recipes that don't look at other samples
COMPILE = ("off", "on", "blocks")
MODES = ("sync", "quorum", "deadline", "stale", "async")  # for servers: see server/protocol/admission.py
SERVER_OPTIONS = ("server", "mode", "quorum", "staleness", "deadline", "replicas")
SHORT_OPTIONS = {"ps": "server"}
_KINDS = {"str": str, "int": int, "float": float}
OPTIONS = (
    *("zero", "offload", "optimizer_states", "sequence", "context_by", "schedule", "micro_batches"),
    *("checkpointing", "compile", "float8", "transport", "compression", "bucket_bytes", "check"),
    *SERVER_OPTIONS,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a job: its ranks on a mesh, the form of gradients on the way, the times of checkpoints, and others.

    `--plan` has a plan as a line, which `parse` reads; `job.plan` is the one that the job runs under.

    Args:
        mesh: the sizes of the axes `pipeline`, `replicate`, `shard`, `expert`, `context` and `tensor`, as
            "replicate=2,tensor=2".
        transport: the way of gradients: "auto", "shared_memory", "gloo" or "nccl".
        compression: the compression of gradients: "none", "bf16", "fp16", "powersgd" or "topk".
        bucket_bytes: the bytes of gradients that are sent together.
        checkpoint_every: the steps from one checkpoint to the next; 0 saves only at the end and when stopped.
        keep: the number of newest checkpoints that stay.
        copy_to: the URL of a folder in an object store that checkpoints are copied to; "" copies none.
        zero: the stage of ZeRO under `shard`: 1 splits optimizer state, 2 also gradients, 3 also parameters.
        offload: "on" keeps the optimizer state of `shard` in host memory.
        optimizer_states: the form of Adam's moments: "full", the parameters' dtype; "8bit", "4bit" or "float8".
        sequence: "on" splits norms and dropout along the sequence, under `tensor`.
        context_by: the way in which ranks of `context` share attention: "ring" (keys and values go round), "heads"
            (heads are exchanged), or the cheapest of both and their products, "auto".
        schedule: the schedule of `pipeline`: "1f1b", "gpipe", "interleaved" or "zero_bubble".
        micro_batches: the micro-batches of `pipeline` per step; 0 leaves it to micro_batch_size, else to the schedule.
        checkpointing: the treatment of activations: kept, "none"; computed again, "selective" or "full"; copied to the
            host's memory, "offload".
        compile: "on" compiles the model with torch.compile, "blocks" each of its repeated blocks by itself.
        float8: the recipe of torchao by which linear layers multiply in float8: "rowwise" or "rowwise_with_gw_hp".
        check: "on" compares the first step of a job, and the first after a resume, with that of one process.
        server: the number of parameter servers, beside the workers on the mesh's `replicate` axis; 0: none.
        mode: the rule by which servers make an update of gradients: "sync", "quorum", "deadline", "stale" or "async".
        quorum: the number of workers whose gradients make an update, under mode=quorum.
        staleness: the number of steps that the fastest worker may be ahead, under mode=stale.
        deadline: the seconds that the first gradient of a step waits for the others, under mode=deadline.
        replicas: the number of servers that hold the same part of the parameters.
        version: the version of the file format.

    Raises:
        MeshError: the mesh names an unknown axis, or one twice, or a size that is not a whole number above 0.
        PlanError: an option has a value that it can't have, or contradicts another.

    Examples:
        >>> job = paceline.distribute(workload)
        >>> if job.plan.compression == "none" and job.rank == 0:
        ...     print(f"gradients are sent as they are, in buckets of {job.plan.bucket_bytes // 2**20} MiB")
        gradients are sent as they are, in buckets of 25 MiB
    """

    mesh: str = "replicate=1"
    transport: str = "auto"
    compression: str = "none"
    bucket_bytes: int = BUCKET_BYTES
    checkpoint_every: int = 100
    keep: int = 3
    copy_to: str = ""
    zero: int = 3
    offload: str = "off"
    optimizer_states: str = "full"
    sequence: str = "off"
    context_by: str = "auto"
    schedule: str = "1f1b"
    micro_batches: int = 0
    checkpointing: str = "none"
    compile: str = "off"
    float8: str = "off"
    check: str = "on"
    server: int = 0
    mode: str = "sync"
    quorum: int = 0
    staleness: int = 0
    deadline: float = 0.0
    replicas: int = 2
    version: int = VERSION

    def __post_init__(self) -> None:
        self._check_kinds()  # first: the others compare values, which a file may have of any kind
        Mesh.parse(self.mesh)
        self._check_choice("transport", TRANSPORTS)
        self._check_choice("compression", COMPRESSIONS)
        self._check_choice("context_by", CONTEXT_BY)
        self._check_choice("schedule", SCHEDULES)
        self._check_choice("checkpointing", CHECKPOINTING)
        self._check_choice("float8", FLOAT8)
        self._check_choice("compile", COMPILE)
        self._check_choice("optimizer_states", OPTIMIZER_STATES)
        self._check_choice("mode", MODES)
        for name in ("offload", "sequence", "check"):
            self._check_choice(name, SWITCH)
        self._check_least("bucket_bytes", 1)
        self._check_least("checkpoint_every", 0)
        self._check_least("keep", 1)
        for name in ("micro_batches", "server", "quorum", "staleness"):
            self._check_least(name, 0)
        self._check_least("replicas", 1)
        if self.server > MOST_RANKS:
            raise PlanError(f"the plan's server={self.server}", f"there can be {MOST_RANKS}", "write a smaller number")
        if not 1 <= self.zero <= 3:
            fix = "write zero=1, 2 or 3 with shard=N; without any of them it is replicate=N"
            raise PlanError(f"the plan's zero is {self.zero}", "there are 1, 2 and 3", fix)
        self._check_compile()
        beside = Mesh.parse(self.mesh).used(GRAPH_AXES)
        if self.float8 != "off" and beside:
            raise PlanError(
                f"the plan's float8={self.float8} beside {beside[0]}",
                "there the model runs as a graph, in which linear layers keep their dtype",
                f"leave float8 out, or write replicate or shard in place of {beside[0]}",
            )
        if self.optimizer_states != "full" and self.offload == "on":
            raise PlanError(
                f"the plan's optimizer_states={self.optimizer_states} beside offload=on",
                "the host's memory has the optimizer's state in full precision",
                "leave one of them out",
            )
        if self.optimizer_states != "full" and Mesh.parse(self.mesh).size("expert") > 1:
            raise PlanError(
                f"the plan's optimizer_states={self.optimizer_states} beside expert",
                "each rank updates some experts' part of a weight, and blocks of states are of whole weights",
                "leave optimizer_states out, or write tensor in place of expert",
            )
        self._check_server()

    def _check_kinds(self) -> None:
        """Raise PlanError unless every field has a value of its kind, as one that was read from a file may not."""
        for field in fields(self):
            value = getattr(self, field.name)
            kind = str(field.type)
            if fault_of(value, _KINDS[kind]) is not None:
                expected = {"str": "a word", "int": "a whole number", "float": "a number"}[kind]
                raise PlanError(
                    f"the plan's {field.name} should be {expected}",
                    f"it is {shown(value)}",
                    f"write {field.name}={field.default}",
                )

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        """Raise PlanError unless a field is one of some words."""
        value = getattr(self, name)
        if value not in choices:
            raise PlanError(
                f"the plan's {name} is {value!r}",
                f"the choices are {', '.join(choices)}",
                did_you_mean(value, choices, "write one of these", _SAME),
            )

    def _check_least(self, name: str, least: int) -> None:
        """Raise PlanError where a field is too small a number."""
        number = getattr(self, name)
        if number < least:
            # A field that is no option of a plan's line has a flag of its own.
            written = f"{name}=" if name in OPTIONS else f"--{name.replace('_', '-')} "
            raise PlanError(
                f"the plan's {name} should be a whole number of at least {least}",
                f"it is {number!r}",
                f"write {written}{max(least, 1)} or more",
            )

    def _check_compile(self) -> None:
        """Raise PlanError where the model, or its blocks, can't be compiled under the plan's other options."""
        if self.checkpointing == "offload" and self.is_compiled:
            raise PlanError(
                f"the plan's checkpointing=offload beside compile={self.compile}",
                "the hooks that copy activations can't be compiled",
                "leave one of them out",
            )
        beside = Mesh.parse(self.mesh).used(GRAPH_AXES)
        if self.compile == "blocks" and beside:
            raise PlanError(
                f"the plan's compile=blocks beside {beside[0]}",
                "there each rank runs graphs of the model's operations, which compile=on compiles region by region",
                f"write compile=on, or leave {beside[0]} out",
            )

    def _check_server(self) -> None:
        """Raise PlanError unless the options of servers go with the mesh and with each other."""
        if self.server:
            self._check_beside_server()
        else:
            for name, neutral in (("mode", "sync"), ("quorum", 0), ("staleness", 0), ("deadline", 0)):
                value = getattr(self, name)
                if value != neutral:
                    raise PlanError(f"the plan's {name}={value}", "it has no servers", "add e.g. server=2")
        workers = self.world_size
        if self.quorum and self.mode != "quorum":
            raise PlanError(f"the plan's quorum={self.quorum}", f"its mode is {self.mode}", "write mode=quorum")
        if self.mode == "quorum" and not 1 <= self.quorum <= workers:
            found = f"it is {self.quorum} of {workers} worker{'s' * (workers > 1)}"
            raise PlanError("the plan's quorum does not fit its workers", found, f"write quorum={max(1, workers - 1)}")
        if (self.mode == "deadline") != (self.deadline > 0):
            found = f"its mode is {self.mode} and its deadline {self.deadline:g} s"
            fix = "write both, such as mode=deadline,deadline=1"
            raise PlanError("a deadline goes with mode=deadline alone", found, fix)
        if self.staleness and self.mode != "stale":
            raise PlanError(f"the plan's staleness={self.staleness}", f"its mode is {self.mode}", "write mode=stale")

    def _check_beside_server(self) -> None:
        """Raise PlanError for axes and options that parameter servers leave no place for."""
        mesh = Mesh.parse(self.mesh)
        for axis in AXES:
            if axis != "replicate" and mesh.size(axis) > 1:
                raise PlanError(
                    f"can't run the plan {self.mesh} with server={self.server}",
                    f"servers go with workers that hold the whole model, not with {axis}",
                    f"leave {axis} out, or server",
                )
        for name, default in (("compression", "none"), ("transport", "auto"), ("bucket_bytes", BUCKET_BYTES)):
            value = getattr(self, name)
            if value != default:
                raise PlanError(f"the plan's {name}={value}", "its gradients go to servers", f"leave {name} out")
        if self.optimizer_states != "full":
            raise PlanError(
                f"the plan's optimizer_states={self.optimizer_states}",
                "its servers keep the optimizer's state in full precision",
                "leave optimizer_states out",
            )

    @classmethod
    def parse(cls, text: str, **values: Any) -> Plan:
        """Read a line such as `shard=4,zero=2` or `pipeline=2,tensor=2,schedule=gpipe`.

        Args:
            text: the axes with their sizes, and the options with their values.
            values: the plan's other fields.

        Returns:
            The plan. Options that are not named have their defaults.

        Raises:
            MeshError: an axis or option is unknown or named twice, or an axis has no size.
            PlanError: an option has a value that it can't have, or no effect under these axes.

        Examples:
            >>> from paceline.nouns.plan import Plan
            >>> plan = Plan.parse("pp=2,tp=2,schedule=gpipe", checkpoint_every=500)
            >>> plan.mesh, plan.world_size, plan.checkpoint_every
            ('pipeline=2,tensor=2', 4, 500)
        """
        axes = []
        options = []
        text = arguments.text("Plan.parse", "text", text, "shard=2")
        _check_signs(text)
        for item in text.split(","):
            name, _, value = item.partition("=")
            name = name.strip()
            name = SHORT_OPTIONS.get(name, name)
            if name in OPTIONS:
                if name in values:
                    raise PlanError(
                        f"the plan {shown(text)} should give {name} once", "it names it twice", "keep one of them"
                    )
                values[name] = cls._option_value(name, value.strip())
                options.append(name)
            elif SHORT.get(name, name) in AXES:
                axes.append(item)
            else:
                raise _unknown(text, name)
        mesh = Mesh.parse(",".join(axes) or "replicate=1")
        plan = cls(**{**values, "mesh": str(mesh)})
        plan.check_effect(options, ",".join(axes))
        return plan.settled()

    @classmethod
    def _option_value(cls, name: str, text: str) -> str | int | float:
        """Return an option's value; a text that is no number stays one, for which the plan has an error."""
        if name == "deadline":
            return _seconds(text)
        kinds = {field.name: field.type for field in fields(cls)}
        if kinds[name] == "str":
            return text
        return _number(text)

    @property
    def strategy(self) -> str:
        """Return `servers` where parameter servers update the model, else `collectives`."""
        return "servers" if self.server else "collectives"

    def without_shared_memory(self) -> Plan:
        """Return the plan with Gloo where its ranks may use shared memory; servers and their workers have none."""
        return self if self.server else replace(self, transport="gloo")

    @property
    def is_one_process(self) -> bool:
        """Return True if one process trains, without servers."""
        return self.world_size == 1 and not self.server

    @property
    def shares_updates(self) -> bool:
        """Return True if ranks of `shard` have whole parameters, and each updates a part of them (ZeRO-1)."""
        mesh = Mesh.parse(self.mesh)
        return mesh.size("shard") > 1 and (self.zero == 1 or bool(mesh.used(GRAPH_AXES)))

    @property
    def gradient_axes(self) -> list[str]:
        """Return the axes whose ranks hold the same parameters and parts of the same gradients, outermost first."""
        axes = ["replicate", *(["shard"] if self.shares_updates else []), "expert", "context"]
        return Mesh.parse(self.mesh).used(axes)

    @property
    def spreading_axes(self) -> list[str]:
        """Return the axes whose ranks hold gradients of different elements, innermost first."""
        axes = Mesh.parse(self.mesh).used(SPREADING_AXES)
        return [axis for axis in axes if axis != "shard" or not self.shares_updates]

    @property
    def is_compiled(self) -> bool:
        """Return True if torch.compile compiles the model or its blocks."""
        return self.compile != "off"

    def check_effect(self, options: Iterable[str], axes: str) -> None:
        """Raise PlanError where an option has no effect under the plan's axes.

        Args:
            options: the names of the options that the user wrote.
            axes: the axes as the user wrote them; naming one with size 1 is enough.
        """
        names = [item.partition("=")[0].strip() for item in axes.split(",")]
        named_axes = {SHORT.get(name, name) for name in names}
        values = {name: getattr(self, name) for name in options}
        check_options(values, Mesh.parse(self.mesh), named_axes, self.server)

    def settled(self) -> Plan:
        """Return the plan without the options of axes of size 1, which its mesh does not name."""
        default = Plan()
        mesh = Mesh.parse(self.mesh)
        # A mesh is written without its axes of size 1. A plan that kept their options could not be read again: `of`
        # refuses options without effect.
        named_axes = {item.partition("=")[0] for item in str(mesh).split(",")}
        changes = {}
        for name in without_effect({name: getattr(self, name) for name in SCOPES}, mesh):
            if not named_axes.intersection(SCOPES[name].axes):
                changes[name] = getattr(default, name)
        return replace(self, **changes)

    def line(self) -> str:
        """Return the plan as `parse` reads it: its mesh and every option in OPTIONS that is not the default.

        Returns:
            A line for `--plan`.

        Examples:
            Print the plan of a run, to start another with the same:

            >>> job = paceline.distribute(workload)
            >>> print(f"paceline run --plan {job.plan.line()} train.py")
            paceline run --plan replicate=1 train.py
        """
        default = Plan()
        items = [self.mesh]
        for name in OPTIONS:
            value = getattr(self, name)
            if value != getattr(default, name):
                items.append(f"{name}={value}")
        return ",".join(items)

    @property
    def world_size(self) -> int:
        """Return the number of ranks that the plan's mesh covers.

        Returns:
            The product of the mesh's sizes; parameter servers are not among them.
        """
        return Mesh.parse(self.mesh).world_size

    @property
    def data_size(self) -> int:
        """Return the number of parts into which a batch is split under this plan.

        Returns:
            The product of the sizes of `replicate` and `shard`. Ranks along the other axes see the same samples.
        """
        return Mesh.parse(self.mesh).data_size

    def write(self, path: Path) -> None:
        """Write the plan as JSON, at once: other ranks may be reading the file.

        Args:
            path: the path of the file, which is replaced.

        Raises:
            OSError: it can't be written.

        Examples:
            >>> import pathlib
            >>> from paceline.nouns.plan import Plan
            >>> Plan.parse("replicate=2,tensor=2").write(pathlib.Path("plan.json"))
            >>> "replicate=2,tensor=2" in pathlib.Path("plan.json").read_text()
            True
        """
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan.

        Args:
            path: the path of a `plan.json`, as `paceline run` writes it to `runs/JOB/`.

        Returns:
            The plan in the file.

        Raises:
            PlanError: the file is missing, is not JSON, has a key or value that a plan does not have, or an option
                without effect under the plan's axes.

        Examples:
            >>> import pathlib
            >>> from paceline.nouns.plan import Plan
            >>> Plan.parse("shard=4,zero=2").write(pathlib.Path("plan.json"))
            >>> Plan.read(pathlib.Path("plan.json")).line()
            'shard=4,zero=2'
        """
        try:
            values = read_json(path)
        except ReadError as error:
            raise PlanError(
                f"can't read the plan in {path}",
                error.found,
                "name a plan.json as `paceline run` writes it",
            ) from None
        return cls.of(values, str(path))

    @classmethod
    def of_variable(cls, text: str) -> Plan:
        """Read the plan in the variable PACELINE_PLAN.

        Raises:
            PlanError: it is not JSON, or has a key or value that a plan does not have.
        """
        try:
            values = parse_json(text, "PACELINE_PLAN")
        except ReadError as error:
            raise PlanError(
                "the variable PACELINE_PLAN should hold a plan", error.found, "unset PACELINE_PLAN"
            ) from None
        return cls.of(values, "PACELINE_PLAN")

    @classmethod
    def of(cls, values: Any, source: str) -> Plan:
        """Return the plan of decoded JSON; `source` is named in errors.

        Raises:
            PlanError: it has a key or value that a plan does not have, or an option without effect under its axes.
        """
        if isinstance(values, dict) and values.get("version", VERSION) != VERSION:  # its keys may be others, too
            raise PlanError(
                f"the plan in {source} is of version {shown(values['version'])}",
                f"this Paceline reads version {VERSION}",
                "make it again with this Paceline",
            )
        names = [field.name for field in fields(cls)]
        unknown = ["(no object)"]
        if isinstance(values, dict):
            unknown = [key for key in values if key not in names]
        if unknown:
            raise PlanError(
                f"the plan in {source} has {shown(unknown[0])}",
                f"a plan's keys are {', '.join(names)}",
                did_you_mean(unknown[0], names, "leave it out"),
            )
        plan = cls(**values)
        default = Plan()
        changed = [name for name in SCOPES if getattr(plan, name) != getattr(default, name)]
        plan.check_effect(changed, plan.mesh)
        return plan.settled()


# Words that mean the same elsewhere: for off, for on, and other spellings.
_SAME = {
    "true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off", "bfloat16": "bf16",
    "float16": "fp16", "shm": "shared_memory",
}  # fmt: skip


def _number(text: str) -> int | str:
    """Return the whole number in a text, else the text."""
    number = parse_whole(text, least=-LARGEST)
    return text if number is None else number


def _seconds(text: str) -> float:
    """Return the number in a text; raise PlanError if it is none."""
    number = parse_number(text)
    if number is None:
        raise PlanError(f"the plan's deadline is {shown(text)}", "it is a number of seconds", "write deadline=1")
    return number


_DDP = {"ddp": "replicate"}  # torch's name for it, and nearer to dp than a misspelling is


def _unknown(text: str, name: str) -> MeshError:
    otherwise = "write one of these, or leave it out"
    if name.isdecimal():
        otherwise = f"write replicate={name:.9}, or -n {name:.9} without a plan"
    return MeshError(
        f"the plan {shown(text)} should name axes and options alone",
        f"it names {shown(name)}; the axes are {', '.join(AXES)}, the options {', '.join(OPTIONS)}",
        did_you_mean(name, [*AXES, *SHORT, *OPTIONS], otherwise, _DDP),
    )


def _check_signs(text: str) -> None:
    """Raise MeshError for a plan whose only fault is its signs, such as tensor:2 or replicate=2;shard=2."""
    items = []
    for item in re.split(r"[,;&+\s]+", text):
        items.append(re.sub(r"^([a-z_]+)(\d+)$", r"\1=\2", re.sub(r"^(\w+):", r"\1=", item)))
    names = {item.partition("=")[0] for item in items}
    if items != [item.strip() for item in text.split(",")] and names <= {*AXES, *SHORT, *OPTIONS, *SHORT_OPTIONS}:
        raise MeshError(
            f"the plan {shown(text)} should have `=` between a name and its value, and commas between these",
            "it has other signs",
            f"write {','.join(items):.200}",
        )
