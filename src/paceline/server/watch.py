"""Looks at a running job's servers from outside: asks the coordinator, then every server, how it goes."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.nouns.errors import PeerLostError
from paceline.server import setup
from paceline.server.address import Address, Credentials, connect
from paceline.server.connection import Connection
from paceline.server.peers import Peers, facts_of

ANSWER_S = 5.0


class Watcher(Peers):
    """Asks, and keeps the answers by who gave them."""

    def __init__(self, credentials: Credentials | None) -> None:
        super().__init__(credentials)
        self.answers: dict[Any, dict[str, Any]] = {}
        self.is_here = asyncio.Event()

    async def ask(self, who: Any, where: Address) -> dict[str, Any] | None:
        """What one process says; None where it does not answer."""
        try:
            connection = await connect(where, lambda: Connection(self), self.credentials)
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
        """An answer."""
        if isinstance(message, setup.Status):
            self.answers[peer] = facts_of(message.facts)
            self.is_here.set()


async def look(coordinator: Address, credentials: Credentials | None = None) -> dict[str, Any]:
    """The status of a job: the coordinator's, with every server's under "nodes".

    Raises:
        PeerLostError: the coordinator does not answer.
    """
    watcher = Watcher(credentials)
    facts = await watcher.ask("coordinator", coordinator)
    if facts is None:
        raise PeerLostError(
            f"the coordinator at {coordinator}",
            "it does not answer",
            "see whether the job runs with these credentials",
        )
    asked = [watcher.ask(int(node), Address.parse(where)) for node, where in facts.get("servers", {}).items()]
    facts["nodes"] = [answer for answer in await asyncio.gather(*asked) if answer is not None]
    return facts
