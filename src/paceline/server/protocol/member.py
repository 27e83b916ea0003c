"""One server process: a replica of every range. Those of ranges whose chain it is not in stay empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.server.protocol.client import with_range
from paceline.server.protocol.messages import HEAD, Node, Out, Sent
from paceline.server.protocol.replica import Replica


@dataclass(slots=True)
class Member:
    """The state machine of a server process.

    Args:
        node: this process's node.
        replicas: the replica of each range.
    """

    node: Node
    replicas: Sequence[Replica]

    def on(self, number: int, message: Any) -> Sent:
        """Handle one message about range `number` and return the messages that follow from it."""
        replica = self.replicas[number]
        before = replica.configuration.config_version
        sent = self._resolve_heads(number, replica.on(message))
        if replica.configuration.config_version != before:  # its head is another, or is known only now
            for other_number, other_replica in enumerate(self.replicas):
                sent += self._resolve_heads(other_number, other_replica.announce())
        return sent

    def heartbeat(self) -> Sent:
        """Return the messages that say that this process is alive."""
        sent: Sent = []
        for number, replica in enumerate(self.replicas):
            sent += with_range(number, replica.heartbeat())
        return sent

    def expire(self, now_s: float) -> Sent:
        """Close the rounds whose deadline has passed."""
        sent: Sent = []
        for number, replica in enumerate(self.replicas):
            sent += self._resolve_heads(number, replica.expire(now_s))
        return sent

    def repeat(self) -> Sent:
        """Return again the messages that may have been lost."""
        sent: Sent = []
        for number, replica in enumerate(self.replicas):
            sent += self._resolve_heads(number, replica.repeat())
        return sent

    def _resolve_heads(self, number: int, out: Out) -> Sent:
        """Replace (HEAD, range) by the process that is its head, as far as this one knows it.

        What is for this process itself is handled here, and so are the messages that follow from it.
        """
        sent: Sent = []
        waiting = with_range(number, out)
        # A queue, not recursion: heads of several ranges in one process may answer each other back and forth.
        while waiting:
            addressee, about, message = waiting.pop(0)
            if isinstance(addressee, tuple) and addressee[0] == HEAD:
                about = addressee[1]
                chain = self.replicas[about].configuration.chain
                # It has not heard of that range's chain yet. `announce` says it again when it has.
                if not chain:
                    continue
                addressee = chain[0]
            if addressee == self.node:
                waiting += with_range(about, self.replicas[about].on(message))
            else:
                sent.append((addressee, about, message))
        return sent
