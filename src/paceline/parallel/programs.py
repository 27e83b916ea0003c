"""Graphs that are ready to run, by the shapes of batch that they are for: as many as there is room for.

A graph holds for one shape, and a new shape is captured anew: about 2 s for a GPT-2 of 12 layers on two ranks of a
machine with two cores. Where every batch has a length of its own, steps wait for that more than for the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.parallel.graph_model import Program

# About 1 GiB: a graph takes about 2 KiB for each of its operations (measured: GPT-2, 12 layers, tensor=2).
MOST_NODES = 500_000
_SAID_FROM_TIMES = 12
_SAID_FROM_S = 20.0


@dataclass(slots=True)
class Programs:
    """The programs that were used last; one that is dropped is made again where its shape comes again.

    Attributes:
        most_nodes: operations of all of them together.
        notices: what the user should know of how often programs are made.
    """

    most_nodes: int = MOST_NODES
    notices: list[str] = field(default_factory=list)
    kept: dict[Hashable, Program] = field(default_factory=dict)  # the one used last at the end
    made: int = 0
    spent_s: float = 0.0

    def find(self, key: Hashable, make: Callable[[], Program]) -> Program:
        """Return the program for `key`, made where it is not kept."""
        program = self.kept.pop(key, None)
        if program is None:
            began_s = time.monotonic()
            program = make()
            self._note(time.monotonic() - began_s)
        self.kept[key] = program
        while len(self.kept) > 1 and sum(each.nodes for each in self.kept.values()) > self.most_nodes:
            del self.kept[next(iter(self.kept))]
        return program

    def _note(self, seconds: float) -> None:
        self.made += 1
        self.spent_s += seconds
        if not self.notices and self.made >= _SAID_FROM_TIMES and self.spent_s >= _SAID_FROM_S:
            self.notices.append(
                f"the model was captured {self.made} times so far, in {self.spent_s:.0f} s, as each new shape of a "
                "batch needs it: pad batches to fewer lengths, such as multiples of 64 (pad_to_multiple_of=64 in "
                "collators of transformers)"
            )
