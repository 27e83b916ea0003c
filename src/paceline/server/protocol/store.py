"""Define the interface between a replica and its parameters; `tensors.py` implements it with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.server.protocol.messages import Push, Update


class Store(Protocol):
    """The parameters of one range, and their optimizer."""

    def combine(self, pushes: Sequence[Push]) -> tuple[Any, dict[str, Any]]:
        """Sum some workers' gradients of one segment, in the order given; return the payload and note of the update."""

    def measure(self, updates: Sequence[Update]) -> float:
        """Return the value that the other ranges need of a gated round, such as the squared norm of its gradient."""

    def finish(self, update: Update, partials: Sequence[float]) -> Update:
        """Return the update of a gated round as it is to be applied, given the values of all ranges."""

    def apply(self, update: Update) -> None:
        """Change the parameters of one segment."""

    def read(self) -> Any:
        """Return the parameters."""

    def content(self) -> Any:
        """Return everything, for a replica that joins."""

    def restore(self, content: Any) -> None:
        """Take over what `content` returned."""

    def clear(self) -> None:
        """Forget everything."""
