"""The messages that workers, replicas and the coordinator send to each other.

Every message about one range carries the configuration version of its sender, and a receiver in another version refuses
it. A process that is started again counts as another one: its node number, or its incarnation, is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Node = int  # a replica's process; never used twice
Worker = tuple[int, int]  # name and incarnation
Out = list[tuple[Any, Any]]  # addressee and message: a Node, a Worker, COORDINATOR, or (HEAD, range)
Sent = list[tuple[Any, int, Any]]  # the same with the range that it is about, in between

COORDINATOR = "coordinator"
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The members of one range, as the coordinator decided. Each decision has the next version.

    `chain` is head to tail; `workers` are the active ones and their first clocks.
    """

    config_version: int
    chain: tuple[Node, ...]
    workers: Mapping[Worker, int]
    joining: tuple[Node, int] | None = None  # the last of the chain while it has no state, and since which version
    confirmed: int = -1  # the newest version that a replica with everything is known to be in
    holders: tuple[Node, ...] = ()  # the replicas that have everything in it: nothing is promised without them

    def neighbour(self, node: Node, step: int) -> Node | None:
        """Return the replica so many steps after `node` in the chain; None where there is none."""
        if node not in self.chain:
            return None
        index = self.chain.index(node) + step
        return self.chain[index] if 0 <= index < len(self.chain) else None


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient of one segment at one of its clocks, to the head. A retry carries the same bytes."""

    config_version: int
    worker: Worker
    clock: int
    segment: int
    updates_read: int  # updates in the parameters that it was computed from
    note: Any  # for the store, beside the gradient; the protocol does not look at it
    payload: Any


@dataclass(frozen=True, slots=True)
class Pushed:
    """The push is applied on every replica of the chain, or came too late to count."""

    config_version: int
    clock: int
    segment: int


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker asks the tail for the parameters of its step `clock`."""

    config_version: int
    worker: Worker
    # Numbers this worker's pulls of the range: an answer to an earlier one, late or doubled, is known by it.
    request: int
    clock: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The parameters, and the clock that they are for: later than the worker's if rounds were closed without it."""

    config_version: int
    request: int
    clock: int
    number: int  # updates in these parameters
    note: Any  # of the last update of the first segment
    values: Any


@dataclass(frozen=True, slots=True)
class Stale:
    """The refusal of a worker's message: sender and receiver are in different configurations."""

    config_version: int


@dataclass(frozen=True, slots=True)
class Update:
    """One change of one segment: the sum of some workers' gradients. Replicas apply the same ones in the same order."""

    segment: int
    pushes: tuple[tuple[Worker, int], ...]  # worker and clock, workers in order
    note: Any
    payload: Any
    share: float = 1.0  # of the step that is taken: less for a gradient of parameters that have moved on
    partial: float = 0.0  # of a gated round: what this range told the others


@dataclass(frozen=True, slots=True)
class Forward:
    """Update `number`, from a replica to the next of the chain."""

    config_version: int
    number: int
    update: Update


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The tail has every update before `number`."""

    config_version: int
    number: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The sender waits for update `number`, and has all before it."""

    config_version: int
    number: int


@dataclass(frozen=True, slots=True)
class State:
    """Everything a new replica needs: parameters, optimizer state, clocks, after `number` updates."""

    config_version: int
    number: int
    applied: Mapping[int, Mapping[Worker, int]]
    rounds: Mapping[int, int]
    partials: Mapping[int, float]
    note: Any
    content: Any


@dataclass(frozen=True, slots=True)
class Partial:
    """All gradients of a round are at the head of `key_range`: the value that all heads need before any applies them.

    It has no configuration version: versions of different ranges can't be compared.
    """

    key_range: int
    round: int
    value: float
    is_question: bool  # the sender lacks the addressee's value


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A replica is alive, in this configuration.

    `state_config_version` is the last version in which it had everything, -1 for none.
    """

    node: Node
    config_version: int
    state_config_version: int


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A worker is alive, at this clock; or it is done."""

    worker: Worker
    config_version: int
    clock: int
    is_done: bool
