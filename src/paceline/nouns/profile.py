"""What one rank's training step takes: every block of memory, its operations, what it sends.

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

VERSION = 2
PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer state", "buffers"
ACTIVATIONS, TEMPORARY, INPUTS = "activations", "temporaries", "inputs"
COMMUNICATION, GATHERED = "gradient buckets", "gathered parameters"
_MOST_BYTES = 2**30  # of a file
_AMOUNT = Whole(0, 10**30)  # floating-point operations of a step; more than 64 bits
_FORM = {
    "plan": str,
    "rank": COUNT,
    "device": str,
    "micro_batch": COUNT,
    "precision": str,
    "kinds": [str],
    "holders": [str],
    "block_phases": [str],
    "blocks": list,
    "events": [int],
    "phases": [list],
    "last_step": COUNT,
    "operations": {str: [_AMOUNT]},
    "modules": {str: [_AMOUNT]},
    "traffic": [dict],
    "shared_bytes": COUNT,
    "notices": [str],
    "servers": [{str: COUNT}],
    "host_bytes": COUNT,
}
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS, TEMPORARY, COMMUNICATION, GATHERED, INPUTS)
NOTHING_TO_RECOMPUTE = "has nothing to compute again"  # in a notice: activation checkpointing saves nothing here


@dataclass(slots=True)
class Block:
    """A block of memory from its allocation to its end.

    Attributes:
        nbytes: as asked for.
        kind: one of KINDS.
        holder: the parameter it belongs to, or the path of the module that made it.
        phase: of the step, when it was made.
        stream: 0 computes, others copy and communicate.
    """

    nbytes: int
    kind: str
    holder: str
    phase: str
    stream: int = 0


@dataclass(slots=True)
class Recording:
    """Blocks and what became of them.

    Attributes:
        blocks: each once.
        events: in order: n+1 where block n is taken, -(n+1) where it is given back.
        phases: from which event on which phase: start, gather, forward, backward, reduce, update.
        last_step: the event with which the last step begins; before it the optimizer may not have its state yet.
    """

    blocks: list[Block] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    last_step: int = 0


@dataclass(slots=True)
class Work:
    """Operations of one kind: how often, floating-point operations and bytes read and written, altogether."""

    count: int = 0
    flops: int = 0
    nbytes: int = 0

    def times(self, number: float) -> Work:
        """So many of it."""
        return Work(round(self.count * number), round(self.flops * number), round(self.nbytes * number))


@dataclass(slots=True)
class Profile:
    """One rank's step under one plan.

    Attributes:
        plan: its line, see `Plan.line`.
        rank: whose step.
        device: "cpu", or "cuda" where it is computed as a GPU would.
        micro_batch: samples in this rank's first micro-batch.
        precision: the workload's.
        recording: its memory.
        operations: by name, shapes and dtype of what goes in: `aten.mm (8, 64)x(64, 64) float32`.
        modules: by path, the work of the module's own operations and those of the modules in it.
        traffic: rows as the ledger has them: collective, axis, calls, bytes.
        shared_bytes: memory that ranks of one host share, beside the recording's.
        notices: what a person should know of how it was made.
        servers: of each parameter server what it holds: parameters, optimizer_state, gradients.
        host_bytes: with offload=on, what the host holds for a GPU's rank, beside the recording's.
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

    def write(self, path: Path) -> None:
        """Write it as JSON, names once."""
        path.write_text(json.dumps(self.to_json()) + "\n")

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        recording = self.recording
        holders = list(dict.fromkeys(block.holder for block in recording.blocks))
        phases = list(dict.fromkeys(block.phase for block in recording.blocks))
        at = {name: index for index, name in enumerate(holders)}
        blocks = [
            [block.nbytes, KINDS.index(block.kind), at[block.holder], phases.index(block.phase), block.stream]
            for block in recording.blocks
        ]
        return {
            "version": VERSION,
            "plan": self.plan,
            "rank": self.rank,
            "device": self.device,
            "micro_batch": self.micro_batch,
            "precision": self.precision,
            "kinds": list(KINDS),
            "holders": holders,
            "block_phases": phases,
            "blocks": blocks,
            "events": recording.events,
            "phases": recording.phases,
            "last_step": recording.last_step,
            "operations": {name: [w.count, w.flops, w.nbytes] for name, w in self.operations.items()},
            "modules": {name: [w.count, w.flops, w.nbytes] for name, w in self.modules.items()},
            "traffic": self.traffic,
            "shared_bytes": self.shared_bytes,
            "notices": self.notices,
            "servers": self.servers,
            "host_bytes": self.host_bytes,
        }

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read one back.

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
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        if fault := fault_of(value, {"version": Whole(VERSION, VERSION)}) or fault_of(value, _FORM):
            raise ValueError(fault)
        kinds, holders, phases = value["kinds"], value["holders"], value["block_phases"]
        blocks = []
        for row in value["blocks"]:
            if not isinstance(row, list) or [type(number) for number in row] != [int] * 5 or min(row) < 0:
                raise ValueError(f"its block {shown(row)} is not five numbers")
            nbytes, kind, holder, phase, stream = row
            if kind >= len(kinds) or holder >= len(holders) or phase >= len(phases):
                raise ValueError(f"its block {shown(row)} is of a kind, holder or phase that is not listed")
            blocks.append(Block(nbytes, kinds[kind], holders[holder], phases[phase], stream))
        if any(not 1 <= abs(event) <= len(blocks) for event in value["events"]):
            raise ValueError(f"one of its events is about none of its {len(blocks)} blocks")
        if any(
            fault_of(mark, [(COUNT, str)]) or [type(part) for part in mark] != [int, str] for mark in value["phases"]
        ):
            raise ValueError("one of its phases is not a number and a name")
        marks = [(at, phase) for at, phase in value["phases"]]
        recording = Recording(blocks, value["events"], marks, value["last_step"])
        return cls(
            value["plan"],
            value["rank"],
            value["device"],
            value["micro_batch"],
            value["precision"],
            recording,
            {name: _work(numbers) for name, numbers in value["operations"].items()},
            {name: _work(numbers) for name, numbers in value["modules"].items()},
            value["traffic"],
            value["shared_bytes"],
            value["notices"],
            value["servers"],
            value["host_bytes"],
        )

    @property
    def flops(self) -> int:
        """Of the whole step on this rank."""
        return sum(work.flops for work in self.operations.values())


def _work(numbers: Sequence[int]) -> Work:
    if len(numbers) != 3:
        raise ValueError(f"an amount of work should be three numbers, it is {shown(numbers)}")
    return Work(*numbers)
