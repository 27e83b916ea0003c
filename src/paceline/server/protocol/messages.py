"""What workers, replicas and the coordinator say to each other.

Every message carries the epoch of its sender: one of an older configuration is refused, whoever sends it. A process
that starts again is another one: its node number, or its incarnation, is new.
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
    """Who is who, by the coordinator. `chain` is head to tail; `workers` are the active ones and their first clocks."""

    epoch: int
    chain: tuple[Node, ...]
    workers: Mapping[Worker, int]
    joining: tuple[Node, int] | None = None  # the last of the chain, while it has no state, and since which epoch
    confirmed: int = -1  # the newest epoch that a replica with everything is known to be in
    holders: tuple[Node, ...] = ()  # the replicas of that epoch that have everything: nothing is promised without them

    def neighbour(self, node: Node, step: int) -> Node | None:
        """The replica so many steps after `node` in the chain; None where there is none."""
        at = self.chain.index(node) + step if node in self.chain else -1
        return self.chain[at] if 0 <= at < len(self.chain) else None


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient of one segment at one of its clocks, to the head. A retry carries the same bytes."""

    epoch: int
    worker: Worker
    clock: int
    segment: int
    read: int  # updates in the parameters that it was computed from
    note: Any  # what the store wants to know beside the gradient; nothing here looks at it
    payload: Any


@dataclass(frozen=True, slots=True)
class Pushed:
    """The push is applied on every replica of the chain, or came too late to count."""

    epoch: int
    clock: int
    segment: int


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker wants the parameters for its step `clock`, from the tail."""

    epoch: int
    worker: Worker
    request: int
    clock: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """The parameters, and the clock that they are for: a round that went on without the worker is not made up for."""

    epoch: int
    request: int
    clock: int
    number: int  # updates in these parameters
    note: Any  # of the last update of the first segment
    values: Any


@dataclass(frozen=True, slots=True)
class Stale:
    """The sender's configuration is older than the receiver's."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Update:
    """One change of one segment: the sum of some workers' gradients. Replicas apply the same ones in the same order."""

    segment: int
    pushes: tuple[tuple[Worker, int], ...]  # worker and clock, workers in order
    note: Any
    payload: Any
    share: float = 1.0  # of the step that is taken: less for a gradient of parameters that have moved on
    partial: float = 0.0  # of a gated round: what this range said to the others


@dataclass(frozen=True, slots=True)
class Forward:
    """Update `number`, from a replica to the next of the chain."""

    epoch: int
    number: int
    update: Update


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The tail has every update up to `number`, counted without it."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The next update that the sender waits for."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class State:
    """Everything a new replica needs: parameters, optimizer state, clocks, after `number` updates."""

    epoch: int
    number: int
    applied: Mapping[int, Mapping[Worker, int]]
    rounds: Mapping[int, int]
    partials: Mapping[int, float]
    note: Any
    content: Any


@dataclass(frozen=True, slots=True)
class Partial:
    """All gradients of a round are at the head of `range`; what the others must know before anybody applies them."""

    range: int
    round: int
    value: float
    is_question: bool  # whether the sender lacks the addressee's


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A replica is alive, in this configuration; `state_epoch` is the last in which it had everything, -1 for none."""

    node: Node
    epoch: int
    state_epoch: int


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """A worker is alive, at this clock; or it is done."""

    worker: Worker
    epoch: int
    clock: int
    is_done: bool
