"""Ask a running job for its status from outside: first the coordinator, then every server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from paceline.nouns.errors import PeerLostError
from paceline.nouns.reading import fault_of
from paceline.server import setup
from paceline.server.transport.address import Address, Credentials, connect
from paceline.server.transport.connection import Connection
from paceline.server.transport.frames import FrameError
from paceline.server.transport.peers import Peers, addresses_of, facts_of

ANSWER_S = 5.0
_ALWAYS = {
    "job": {
        "mode": str,
        "quorum": int,
        "staleness": int,
        "deadline": float,
        "workers": int,
        "servers": int,
        "replicas": int,
    },
    "state": str,
    "servers": {str: str},
}
_GATHERING = {"here": [str]}
_TRAINING = {
    "workers": [
        {
            "worker": int,
            "incarnation": int,
            "clock": int,
            "is_done": bool,
            "is_in": bool,
            "silent_s": float,
            "is_waiting?": bool,
            "waited_for_network_s?": float,
            "waited_for_others_s?": float,
            "bytes_sent?": int,
            "bytes_received?": int,
        }
    ],
    "chains": [{"range": int, "chain": [int], "epoch": int, "is_whole": bool}],
}
# What a server answers.
NODE = {
    "ranges": [
        {
            "range": int,
            "role": str,
            "updates": int,
            "behind": int,
            "duplicates": int,
            "waits_for": [int],
            "staleness?": {str: int},
        }
    ]
}


class Watcher(Peers):
    """A process that only asks for the status of others."""

    def __init__(self, credentials: Credentials | None) -> None:
        super().__init__(credentials)
        self.answers: dict[Any, dict[str, Any]] = {}
        self.is_here = asyncio.Event()

    async def ask(self, who: object, address: Address) -> dict[str, Any] | None:
        """Return the status of one process; None where it does not answer."""
        try:
            connection = await connect(address, lambda: Connection(self), self.credentials)
        except PeerLostError:
            return None
        connection.peer = who
        self.connections[who] = connection
        connection.send(0, setup.Hello("watcher", -1, 0, "", ""))
        connection.send(0, setup.AskStatus())
        try:
            async with asyncio.timeout(ANSWER_S):
                while who not in self.answers:
                    await self.is_here.wait()
                    self.is_here.clear()
        except TimeoutError:
            return None
        connection.close("the process ends")
        return self.answers.pop(who)

    def take(self, peer: Any, number: int, message: Any) -> None:
        """Handle an answer."""
        if isinstance(message, setup.Status):
            self.answers[peer] = facts_of(message.facts)
            self.is_here.set()


async def look(coordinator: Address, credentials: Credentials | None = None) -> dict[str, Any]:
    """Return the status of a job: the coordinator's, with every server's under "nodes".

    Raises:
        PeerLostError: the coordinator does not answer.
    """
    watcher = Watcher(credentials)
    status = await watcher.ask("coordinator", coordinator)
    if status is None:
        raise PeerLostError(
            f"can't reach the coordinator at {coordinator}",
            "it does not answer",
            "see whether the job runs with these credentials",
        )
    # Checked before it is used: whoever listens there may be of another version, or no coordinator.
    fault = fault_of_facts(status)
    if fault is not None:
        raise PeerLostError(
            f"the coordinator at {coordinator} should say how its job goes",
            f"it says something else: {fault}",
            "see whether a coordinator of this version of Paceline listens there",
        )
    servers = addresses_of(json.dumps(status["servers"]))
    answers = await asyncio.gather(*[watcher.ask(node, address) for node, address in servers.items()])
    status["nodes"] = []
    for answer in answers:
        if answer is not None and fault_of(answer, NODE) is None:
            status["nodes"].append(answer)
    return status


def fault_of_facts(status: Any) -> str | None:
    """Return the first value in a coordinator's answer that `status_table.py` can't read; None if there is none."""
    fault = fault_of(status, _ALWAYS)
    if fault is not None:
        return fault
    try:
        addresses_of(json.dumps(status["servers"]))
    except FrameError as error:
        return str(error)
    return fault_of(status, _GATHERING if status["state"] == "gathering" else _TRAINING)
