"""One server process: a replica of every range, of which those count whose chain it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.protocol.client import with_range
from paceline.server.protocol.messages import HEAD, Node, Out, Sent
from paceline.server.protocol.replica import Replica


@dataclass(slots=True)
class Member:
    """The state machine.

    Args:
        node: this process.
        replicas: by range.
    """

    node: Node
    replicas: Sequence[Replica]

    def on(self, number: int, message: Any) -> Sent:
        """Take one message about range `number`."""
        before = self.replicas[number].configuration.epoch
        sent = self._resolved(number, self.replicas[number].on(message))
        if self.replicas[number].configuration.epoch != before:  # its head is another, or is known only now
            for other, replica in enumerate(self.replicas):
                sent += self._resolved(other, replica.announce())
        return sent

    def heartbeat(self) -> Sent:
        """Now and then: a sign of life."""
        return [one for number, replica in enumerate(self.replicas) for one in with_range(number, replica.heartbeat())]

    def expire(self, now_s: float) -> Sent:
        """Now and then: close the rounds whose deadline has passed."""
        return [one for n, replica in enumerate(self.replicas) for one in self._resolved(n, replica.expire(now_s))]

    def repeat(self) -> Sent:
        """Say again what may have been lost."""
        return [one for n, replica in enumerate(self.replicas) for one in self._resolved(n, replica.repeat())]

    def _resolved(self, number: int, out: Out) -> Sent:
        """To the head of a range: to its process, as far as this one knows it."""
        sent: Sent = []
        waiting = with_range(number, out)
        while waiting:
            addressee, about, message = waiting.pop(0)
            if isinstance(addressee, tuple) and addressee[0] == HEAD:
                about = addressee[1]
                chain = self.replicas[about].configuration.chain
                if not chain:
                    continue
                addressee = chain[0]
            if addressee == self.node:
                waiting += with_range(about, self.replicas[about].on(message))
            else:
                sent.append((addressee, about, message))
        return sent
