"""The plan: everything that is decided before the first step. The command writes it, a job obeys it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.nouns.errors import MeshError, PlanError, ReadError, did_you_mean
from paceline.nouns.mesh import AXES, MOST_RANKS, SHORT, Mesh
from paceline.nouns.options import SCOPES, check_options, without_effect
from paceline.nouns.reading import LARGEST, fault_of, parse_json, parse_number, parse_whole, read_json, shown

VERSION = 1
BUCKET_BYTES = 25 * 2**20  # DDP's default (Li et al. 2020)
COMPRESSIONS = ("none", "bf16", "fp16", "powersgd", "topk")
TRANSPORTS = ("auto", "shared_memory", "gloo", "nccl")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
CHECKPOINTING = ("none", "selective", "full")
SWITCH = ("off", "on")
MODES = ("sync", "quorum", "deadline", "stale", "async")  # of parameter servers: see server/protocol/admission.py
SERVER_OPTIONS = ("server", "mode", "quorum", "staleness", "deadline", "replicas")
SHORT_OPTIONS = {"ps": "server"}
_KINDS = {"str": str, "int": int, "float": float}
OPTIONS = ("zero", "offload", "sequence", "schedule", "micro_batches", "checkpointing", "compile", *SERVER_OPTIONS)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job runs: ranks on a mesh, what is on the wire, how often it is saved."""

    mesh: str = "replicate=1"
    transport: str = "auto"
    compression: str = "none"
    bucket_bytes: int = BUCKET_BYTES  # gradients of so many bytes travel together
    checkpoint_every: int = 100  # steps; 0 saves at the end and when stopped, and at no other time
    keep: int = 3  # newest checkpoints that stay
    zero: int = 3  # what `shard` splits: 1 optimizer state, 2 also gradients, 3 also parameters
    offload: str = "off"  # optimizer state of `shard` in host memory
    sequence: str = "off"  # under `tensor`: norms and dropout split along the sequence
    schedule: str = "1f1b"  # of `pipeline`
    micro_batches: int = 0  # of `pipeline`, per step; 0 leaves it to micro_batch_size, else to the schedule
    checkpointing: str = "none"  # of activations
    compile: str = "off"  # torch.compile
    server: int = 0  # parameter servers, beside the workers on the mesh's `replicate` axis; 0: none
    mode: str = "sync"  # when the servers make an update of gradients
    quorum: int = 0  # of mode=quorum, how many workers' gradients make an update
    staleness: int = 0  # of mode=stale, how many steps the fastest worker may be ahead
    deadline: float = 0.0  # of mode=deadline, seconds that the first gradient of a step waits for the others
    replicas: int = 2  # servers that hold the same part of the parameters
    version: int = VERSION

    def __post_init__(self) -> None:
        self._check_kinds()
        Mesh.parse(self.mesh)
        for name, value, choices in (
            ("transport", self.transport, TRANSPORTS),
            ("compression", self.compression, COMPRESSIONS),
            ("schedule", self.schedule, SCHEDULES),
            ("checkpointing", self.checkpointing, CHECKPOINTING),
            ("mode", self.mode, MODES),
            *((name, getattr(self, name), SWITCH) for name in ("offload", "sequence", "compile")),
        ):
            if value not in choices:
                raise PlanError(
                    f"the plan's {name} is {value!r}",
                    f"there are {', '.join(choices)}",
                    did_you_mean(value, choices, "write one of these", _SAME),
                )
        for name, number, least in (
            ("bucket_bytes", self.bucket_bytes, 1),
            ("checkpoint_every", self.checkpoint_every, 0),
            ("keep", self.keep, 1),
            ("zero", self.zero, 1),
            ("micro_batches", self.micro_batches, 0),
            ("server", self.server, 0),
            ("quorum", self.quorum, 0),
            ("staleness", self.staleness, 0),
            ("replicas", self.replicas, 1),
        ):
            if number < least:
                raise PlanError(
                    f"the plan's {name} should be a whole number of at least {least}",
                    f"it is {number!r}",
                    f"write {name}={max(least, 1)} or more",
                )

        if self.server > MOST_RANKS:
            raise PlanError(f"the plan's server={self.server}", f"there can be {MOST_RANKS}", "write a smaller number")
        if self.zero > 3:
            raise PlanError(f"the plan's zero is {self.zero}", "there are 1, 2 and 3", "write zero=3")
        self._check_server()

    def _check_kinds(self) -> None:
        """Raise PlanError unless every field has a value of its kind, as one that was read from a file may not."""
        for one in fields(self):
            value = getattr(self, one.name)
            if fault_of(value, _KINDS[str(one.type)]) is None:
                continue
            wanted = {"str": "a word", "int": "a whole number", "float": "a number"}[str(one.type)]
            raise PlanError(
                f"the plan's {one.name} should be {wanted}", f"it is {shown(value)}", f"write {one.name}={one.default}"
            )

    def _check_server(self) -> None:
        """Raise PlanError unless what is said of servers fits the mesh and itself."""
        mesh, workers = Mesh.parse(self.mesh), self.world_size
        others = [axis for axis in AXES if axis != "replicate" and mesh.size(axis) > 1]
        named = [name for name in ("mode", "quorum", "staleness", "deadline") if getattr(self, name) not in ("sync", 0)]
        if not self.server and named:
            raise PlanError(
                f"the plan's {named[0]}={getattr(self, named[0])}", "it has no servers", "add e.g. server=2"
            )
        if self.server and others:
            raise PlanError(
                f"can't run the plan {self.mesh} with server={self.server}",
                f"servers go with workers that hold the whole model, not with {others[0]}",
                f"leave {others[0]} out, or server",
            )
        for name, usual in (("compression", "none"), ("transport", "auto"), ("bucket_bytes", BUCKET_BYTES)):
            if self.server and getattr(self, name) != usual:
                what = f"the plan's {name}={getattr(self, name)}"
                raise PlanError(what, "its gradients go to servers", f"leave {name} out")
        if self.quorum and self.mode != "quorum":
            raise PlanError(f"the plan's quorum={self.quorum}", f"its mode is {self.mode}", "write mode=quorum")
        if self.mode == "quorum" and not 1 <= self.quorum <= workers:
            found = f"it is {self.quorum} of {workers} worker{'s' * (workers > 1)}"
            raise PlanError("the plan's quorum does not fit its workers", found, f"write quorum={max(1, workers - 1)}")
        if (self.mode == "deadline") != (self.deadline > 0):
            found = f"its mode is {self.mode} and its deadline {self.deadline:g} s"
            raise PlanError("the plan's deadline", found, "write both, such as mode=deadline,deadline=1")
        if self.staleness and self.mode != "stale":
            raise PlanError(f"the plan's staleness={self.staleness}", f"its mode is {self.mode}", "write mode=stale")

    @classmethod
    def parse(cls, text: str, **values: Any) -> Plan:
        """A plan of a line such as `shard=4,zero=2` or `pipeline=2,tensor=2,schedule=gpipe`.

        Args:
            text: axes with their sizes, and options with their values.
            values: the plan's other fields.

        Raises:
            MeshError: an axis or option is unknown or named twice, or an axis has no size.
            PlanError: an option has a value that it can't have, or no effect under these axes.
        """
        axes, options = [], []
        words = [one.name for one in fields(cls) if one.type == "str"]
        for item in text.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            name = SHORT_OPTIONS.get(name, name)
            if name not in OPTIONS:
                if SHORT.get(name, name) not in AXES:
                    raise _unknown(text, name)
                axes.append(item)
                continue
            if name in values:
                raise PlanError(
                    f"the plan {shown(text)} should give {name} once", "it names it twice", "keep one of them"
                )
            values[name] = value if name in words else _number(value) if name != "deadline" else _seconds(value)
            options.append(name)
        plan = cls(**{**values, "mesh": str(Mesh.parse(",".join(axes) or "replicate=1"))})
        plan.check_effect(options, ",".join(axes))
        return plan.settled()

    def check_effect(self, options: Iterable[str], axes: str) -> None:
        """Raise PlanError where an option has no effect under the plan's axes.

        Args:
            options: names of those that somebody asked for.
            axes: the axes as somebody wrote them; naming one with size 1 is enough.
        """
        words = [item.partition("=")[0].strip() for item in axes.split(",")]
        named = {SHORT.get(word, word) for word in words}
        check_options({name: getattr(self, name) for name in options}, Mesh.parse(self.mesh), named, self.server)

    def settled(self) -> Plan:
        """The plan without the options of axes of size 1, which its mesh does not name."""
        default, mesh = Plan(), Mesh.parse(self.mesh)
        idle = without_effect({name: getattr(self, name) for name in SCOPES}, mesh)
        named = {item.partition("=")[0] for item in str(mesh).split(",")}
        return replace(self, **{name: getattr(default, name) for name in idle if not named & {*SCOPES[name].axes}})

    def line(self) -> str:
        """The plan as `parse` reads it: its mesh and every option that is not the default."""
        default = Plan()
        changed = [f"{name}={getattr(self, name)}" for name in OPTIONS if getattr(self, name) != getattr(default, name)]
        return ",".join([self.mesh, *changed])

    @property
    def world_size(self) -> int:
        """Ranks that the plan's mesh covers."""
        return Mesh.parse(self.mesh).world_size

    @property
    def data_size(self) -> int:
        """Parts that a batch is split into under this plan."""
        return Mesh.parse(self.mesh).data_size

    def write(self, path: Path) -> None:
        """Write the plan as JSON, at once: other ranks may be reading what was there."""
        draft = path.with_name(f".{path.name}.draft")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the file is missing, is not JSON, has a key or value that a plan does not have, or an option
                without effect under the plan's axes.
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
        """The plan in the variable PACELINE_PLAN.

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
        """A plan of decoded JSON; `source` is named in errors."""
        names = [one.name for one in fields(cls)]
        unknown = [key for key in values if key not in names] if isinstance(values, dict) else ["(no object)"]
        if unknown:
            raise PlanError(
                f"the plan in {source} has {shown(unknown[0])}",
                f"a plan's keys are {', '.join(names)}",
                did_you_mean(unknown[0], names, "leave it out"),
            )
        if values.get("version", VERSION) != VERSION:
            raise PlanError(
                f"the plan in {source} is of version {shown(values['version'])}",
                f"this Paceline reads version {VERSION}",
                "make it again with this Paceline",
            )
        plan, default = cls(**values), Plan()
        changed = [name for name in SCOPES if getattr(plan, name) != getattr(default, name)]
        plan.check_effect(changed, plan.mesh)
        return plan.settled()


# What is off and on elsewhere; and no more than a spelling apart.
_SAME = {
    "true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off", "bfloat16": "bf16",
    "float16": "fp16", "shm": "shared_memory",
}  # fmt: skip


def _number(text: str) -> int | str:
    number = parse_whole(text, least=-LARGEST)
    return text if number is None else number


def _seconds(text: str) -> float:
    number = parse_number(text)
    if number is None:
        raise PlanError(f"the plan's deadline is {shown(text)}", "it is a number of seconds", "write deadline=1")
    return number


def _unknown(text: str, name: str) -> MeshError:
    return MeshError(
        f"the plan {shown(text)} names {shown(name)}",
        f"a plan's axes are {', '.join(AXES)}, its options {', '.join(OPTIONS)}",
        did_you_mean(name, [*AXES, *SHORT, *OPTIONS], "write one of these, or leave it out"),
    )
