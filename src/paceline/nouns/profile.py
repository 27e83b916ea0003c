"""The profile of one rank's training step: every block of memory, its operations, its traffic.

`profile/simulate.py` makes it, `plan/memory.py` reads it, and it is a file between them: `profile.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.reading import COUNT, Whole, fault_of, read_json, reason_of, shown

VERSION = 2  # the version of the file's form
# Kinds of blocks.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers"
ACTIVATIONS = "activations"
TEMPORARY = "temporaries"
INPUTS = "inputs"
COMMUNICATION = "gradient buckets"
GATHERED = "gathered parameters"
_MOST_BYTES = 2**30  # the largest file: a block is a row, and a large model's step has many
_AMOUNT = Whole(0, 10**30)  # floating-point operations of a step; more than 64 bits
LEDGER_ROW = {"collective": str, "axis": str, "calls": COUNT, "bytes": COUNT}
# Fields of a profile that are in the file as they are.
_PLAIN = {
    "plan": str,
    "rank": COUNT,
    "device": str,
    "micro_batch": COUNT,
    "precision": str,
    "traffic": [LEDGER_ROW],
    "shared_bytes": COUNT,
    "notices": [str],
    "servers": [{str: COUNT}],
    "host_bytes": COUNT,
    "copied_bytes?": COUNT,
}
_FORM = {
    **_PLAIN,
    "kinds": [str],
    "holders": [str],
    "block_phases": [str],
    "blocks": list,
    "events": [int],
    "phases": [list],
    "last_step": COUNT,
    "operations": {str: [_AMOUNT]},
    "modules": {str: [_AMOUNT]},
}
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS, TEMPORARY, COMMUNICATION, GATHERED, INPUTS)
NOTHING_TO_RECOMPUTE = "has nothing to compute again"  # in a notice: activation checkpointing saves nothing here
NOTHING_TO_OFFLOAD = "has nothing to copy to the host"  # the same, of activations in the host's memory


@dataclass(slots=True)
class Block:
    """A block of memory from its allocation to its end.

    Attributes:
        nbytes: the bytes that were asked for.
        kind: the kind of the block, one of KINDS.
        holder: the parameter that the block belongs to, or the path of the module that made it.
        phase: the phase of the step when the block was made.
        stream: the number of the stream: 0 computes, others copy and communicate.
    """

    nbytes: int
    kind: str
    holder: str
    phase: str
    stream: int = 0


@dataclass(slots=True)
class Recording:
    """The blocks of memory of some steps, and when each was allocated and freed.

    Attributes:
        blocks: all blocks of memory, each once.
        events: the allocations and frees in order: n+1 where block n is taken, -(n+1) where it is given back.
        phases: the event with which each phase begins, and its name: start, gather, forward, backward, reduce, update.
        last_step: the event with which the last step begins; before it the optimizer may not have its state yet.
    """

    blocks: list[Block] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    last_step: int = 0


@dataclass(slots=True)
class Work:
    """The work of operations of one kind: calls, floating-point operations, bytes read and written."""

    count: int = 0
    flops: int = 0
    nbytes: int = 0

    def times(self, number: float) -> Work:
        """Return `number` times the work."""
        return Work(round(self.count * number), round(self.flops * number), round(self.nbytes * number))

    def to_json(self) -> list[int]:
        """Return the numbers as a JSON list."""
        return [self.count, self.flops, self.nbytes]

    @classmethod
    def of_json(cls, numbers: Sequence[int]) -> Work:
        """Read the list that `to_json` returned; raise ValueError if it is something else."""
        if len(numbers) != 3:
            raise ValueError(f"an amount of work should be three numbers, it is {shown(numbers)}")
        return cls(*numbers)


@dataclass(slots=True)
class Profile:
    """The profile of one rank's step under one plan.

    Attributes:
        plan: the line of the plan, see `Plan.line`.
        rank: the rank whose step it is.
        device: the kind of device: "cpu", or "cuda" where the step is computed as a GPU would.
        micro_batch: the samples in this rank's first micro-batch.
        precision: the precision of the workload.
        recording: the memory of the step.
        operations: the work by name, shapes and dtype of the inputs: `aten.mm (8, 64)x(64, 64) float32`.
        modules: the work by the module's path: of its own operations and those of the modules in it.
        traffic: the rows of the ledger: collective, axis, calls, bytes.
        shared_bytes: the memory that ranks of one host share, beside that of the recording.
        notices: the remarks for the user on the way in which the profile was made.
        servers: the bytes that each parameter server holds: parameters, optimizer_state, gradients.
        host_bytes: the host's memory for a GPU's rank with offload=on or checkpointing=offload, beside that of the
            recording.
        copied_bytes: the activations that a step copies to the host and back with checkpointing=offload, in bytes.
    """

    plan: str
    rank: int
    device: str
    micro_batch: int
    precision: str
    recording: Recording
    operations: dict[str, Work]
    modules: dict[str, Work]
    traffic: list[dict[str, Any]]
    shared_bytes: int = 0
    notices: list[str] = field(default_factory=list)
    servers: list[dict[str, int]] = field(default_factory=list)
    host_bytes: int = 0
    copied_bytes: int = 0

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps(self.to_json()) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON object; a block refers to its kind, holder and phase by number."""
        recording = self.recording
        holders: dict[str, int] = {}
        phases: dict[str, int] = {}
        blocks = []
        # Names once, in the order in which they first come; blocks have their numbers. A dict keeps that order.
        for block in recording.blocks:
            holder = holders.setdefault(block.holder, len(holders))
            phase = phases.setdefault(block.phase, len(phases))
            blocks.append([block.nbytes, KINDS.index(block.kind), holder, phase, block.stream])
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in _plain_names()},
            "kinds": list(KINDS),
            "holders": list(holders),
            "block_phases": list(phases),
            "blocks": blocks,
            "events": recording.events,
            "phases": recording.phases,
            "last_step": recording.last_step,
            "operations": {name: work.to_json() for name, work in self.operations.items()},
            "modules": {name: work.to_json() for name, work in self.modules.items()},
        }

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read the file that `write` wrote.

        Raises:
            WorkloadError: the file is missing or is no profile.
        """
        try:
            return cls.of_json(read_json(path, most_bytes=_MOST_BYTES))
        except ValueError as error:
            raise WorkloadError(
                f"a profile in {path}",
                f"it can't be read ({reason_of(error)})",
                "make it with: paceline profile -o FILE WORKLOAD",
            ) from None

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Profile:
        """Read the object that `to_json` returned.

        Raises:
            ValueError: it is something else.
        """
        fault = fault_of(value, {"version": Whole(VERSION, VERSION)}) or fault_of(value, _FORM)
        if fault:
            raise ValueError(fault)
        blocks = _read_blocks(value)
        # After these checks every number refers to something: readers index without looking.
        if any(not 1 <= abs(event) <= len(blocks) for event in value["events"]):
            raise ValueError(f"one of its events is about none of its {len(blocks)} blocks")
        phases = [_read_phase(item) for item in value["phases"]]
        recording = Recording(blocks, value["events"], phases, value["last_step"])
        return cls(
            recording=recording,
            operations={name: Work.of_json(numbers) for name, numbers in value["operations"].items()},
            modules={name: Work.of_json(numbers) for name, numbers in value["modules"].items()},
            **{name: value[name] for name in _plain_names() if name in value},
        )

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the whole step on this rank."""
        return sum(work.flops for work in self.operations.values())


def _plain_names() -> list[str]:
    return [name.removesuffix("?") for name in _PLAIN]


def _read_blocks(value: dict[str, Any]) -> list[Block]:
    """Read the blocks of a profile; raise ValueError if one is not five numbers or refers to nothing."""
    kinds, holders, phases = value["kinds"], value["holders"], value["block_phases"]
    blocks = []
    for row in value["blocks"]:
        if not isinstance(row, list) or [type(number) for number in row] != [int] * 5 or min(row) < 0:
            raise ValueError(f"its block {shown(row)} is not five numbers")
        nbytes, kind, holder, phase, stream = row
        if kind >= len(kinds) or holder >= len(holders) or phase >= len(phases):
            raise ValueError(f"its block {shown(row)} is of a kind, holder or phase that is not listed")
        blocks.append(Block(nbytes, kinds[kind], holders[holder], phases[phase], stream))
    return blocks


def _read_phase(item: Any) -> tuple[int, str]:
    """Read the event with which a phase begins, and its name; raise ValueError if it is something else."""
    if fault_of(item, [(COUNT, str)]) or [type(part) for part in item] != [int, str]:
        raise ValueError("one of its phases is not a number and a name")
    event, name = item
    return event, name
