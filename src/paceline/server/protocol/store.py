"""What a replica asks of the parameters that it keeps. `tensors.py` keeps them in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.server.protocol.messages import Push, Update


class Store(Protocol):
    """The range's parameters and their optimizer."""

    def combine(self, pushes: Sequence[Push]) -> tuple[Any, dict[str, Any]]:
        """What is to be applied of some workers' gradients of one segment, in the order given: payload and note."""

    def measure(self, updates: Sequence[Update]) -> float:
        """What the other ranges must know of a gated round."""

    def finish(self, update: Update, partials: Sequence[float]) -> Update:
        """An update of a gated round, when every range has been measured."""

    def apply(self, update: Update) -> None:
        """Change the parameters of one segment."""

    def read(self) -> Any:
        """The parameters."""

    def content(self) -> Any:
        """Everything, for a replica that joins."""

    def restore(self, content: Any) -> None:
        """Take over what `content` gave."""

    def clear(self) -> None:
        """Hold nothing."""
