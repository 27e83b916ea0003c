"""The messages beside the protocol: who a process is, what is trained, the first parameters, state, status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.server.protocol.messages import Worker

VERSION = 1


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of who opens a connection: its role is "worker", "server" or "watcher".

    To the coordinator a worker sends its layout with it.
    """

    role: str
    name: int  # a worker's number, or the server's node; -1 for a server that has none yet
    incarnation: int
    address: str  # where a server listens
    digest: str
    layout: Any = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer: who the process is from now on."""

    name: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class StartServers:
    """The start of the job, to servers and workers: its settings as JSON, and its layout."""

    settings: str
    layout: Any


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of all servers that are connected, by node: JSON."""

    servers: str


@dataclass(frozen=True, slots=True)
class Install:
    """To a worker: send the first parameters to the servers. From it to a server: the first parameters of one range."""

    nodes: tuple[int, ...]
    content: Any = b""


@dataclass(frozen=True, slots=True)
class Installed:
    """A server has the first parameters of one range."""

    node: int


@dataclass(frozen=True, slots=True)
class ReadState:
    """A worker asks for everything of one range, for a checkpoint."""

    request: int


@dataclass(frozen=True, slots=True)
class StateRead:
    """Everything of one range: parameters and optimizer state."""

    request: int
    content: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """An error for the receiver to raise: its class and its three parts."""

    kind: str
    asked: str
    found: str
    fix: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    """A question for the receiver's status."""

    worker: Worker = (-1, 0)


@dataclass(frozen=True, slots=True)
class Status:
    """JSON of what a process says of itself: see `Peers.status`."""

    facts: object
