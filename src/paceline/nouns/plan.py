"""The plan: everything that is decided before the first step. The command writes it, a job obeys it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.nouns.errors import MeshError, PlanError, did_you_mean
from paceline.nouns.mesh import AXES, SHORT, Mesh

VERSION = 1
COMPRESSIONS = ("none", "bf16", "fp16", "powersgd", "topk")
TRANSPORTS = ("auto", "shared_memory", "gloo", "nccl")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
CHECKPOINTING = ("none", "selective", "full")
SWITCH = ("off", "on")
OPTIONS = ("zero", "offload", "sequence", "schedule", "micro_batches", "checkpointing", "compile")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job runs: ranks on a mesh, what is on the wire, how often it is saved."""

    mesh: str = "replicate=1"
    transport: str = "auto"
    compression: str = "none"
    bucket_bytes: int = 25 * 2**20  # gradients of so many bytes travel together; DDP's default (Li et al. 2020)
    checkpoint_every: int = 100  # steps; 0 saves at the end and when stopped, and at no other time
    keep: int = 3  # newest checkpoints that stay
    zero: int = 3  # what `shard` splits: 1 optimizer state, 2 also gradients, 3 also parameters
    offload: str = "off"  # optimizer state of `shard` in host memory
    sequence: str = "off"  # under `tensor`: norms and dropout split along the sequence
    schedule: str = "1f1b"  # of `pipeline`
    micro_batches: int = 0  # of `pipeline`, per step; 0 leaves it to micro_batch_size, else to the schedule
    checkpointing: str = "none"  # of activations
    compile: str = "off"  # torch.compile
    version: int = VERSION

    def __post_init__(self) -> None:
        Mesh.parse(self.mesh)
        for name, value, choices in (
            ("transport", self.transport, TRANSPORTS),
            ("compression", self.compression, COMPRESSIONS),
            ("schedule", self.schedule, SCHEDULES),
            ("checkpointing", self.checkpointing, CHECKPOINTING),
            *((name, getattr(self, name), SWITCH) for name in ("offload", "sequence", "compile")),
        ):
            if value not in choices:
                raise PlanError(
                    f"the plan's {name} is {value!r}",
                    f"there are {', '.join(choices)}",
                    did_you_mean(value, choices, f"write {name}={choices[0]}"),
                )
        for name, number, least in (
            ("bucket_bytes", self.bucket_bytes, 1),
            ("checkpoint_every", self.checkpoint_every, 0),
            ("keep", self.keep, 1),
            ("zero", self.zero, 1),
            ("micro_batches", self.micro_batches, 0),
        ):
            if not isinstance(number, int) or number < least:
                raise PlanError(
                    f"the plan's {name} should be a whole number of at least {least}",
                    f"it is {number!r}",
                    f"write {name}={max(least, 1)} or more",
                )

        if self.zero > 3:
            raise PlanError(f"the plan's zero is {self.zero}", "there are 1, 2 and 3", "write zero=3")

    @classmethod
    def parse(cls, text: str, **values: Any) -> Plan:
        """A plan of a line such as `shard=4,zero=2` or `pipeline=2,tensor=2,schedule=gpipe`.

        Args:
            text: axes with their sizes, and options with their values.
            values: the plan's other fields.

        Raises:
            MeshError: an axis or option is unknown or named twice, or an axis has no size.
            PlanError: an option has a value that it can't have.
        """
        axes = []
        for item in text.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in OPTIONS:
                if SHORT.get(name, name) not in AXES:
                    raise _unknown(text, name)
                axes.append(item)
                continue
            if name in values:
                raise PlanError(f"the plan {text!r} should give {name} once", "it names it twice", "keep one of them")
            values[name] = int(value) if value.isdecimal() else value
        return cls(**{**values, "mesh": str(Mesh.parse(",".join(axes) or "replicate=1"))})

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
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the file is missing, is not JSON, or has a key that a plan does not have.
        """
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"the plan should be in {path}",
                f"it can't be read ({error})",
                "name a plan.json as `paceline run` writes it",
            ) from None
        return cls.of(values, str(path))

    @classmethod
    def of(cls, values: Any, source: str) -> Plan:
        """A plan of decoded JSON; `source` is named in errors."""
        names = [field.name for field in fields(cls)]
        unknown = [key for key in values if key not in names] if isinstance(values, dict) else ["(no object)"]
        if unknown:
            raise PlanError(
                f"the plan in {source} has {unknown[0]!r}",
                f"a plan's keys are {', '.join(names)}",
                did_you_mean(unknown[0], names, "leave it out"),
            )
        if values.get("version", VERSION) != VERSION:
            raise PlanError(
                f"the plan in {source} is of version {values['version']}",
                f"this Paceline reads version {VERSION}",
                "make it again with this Paceline",
            )
        return cls(**values)


def _unknown(text: str, name: str) -> MeshError:
    return MeshError(
        f"the plan {text!r} names {name!r}",
        f"a plan's axes are {', '.join(AXES)}, its options {', '.join(OPTIONS)}",
        did_you_mean(name, [*AXES, *SHORT, *OPTIONS], "write replicate=N"),
    )
