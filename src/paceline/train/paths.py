"""Report where a model's path depends on the values of its batch: N ranks then compute other numbers than one does.

`if bool(done.all()): break` in a forward pass looks at all samples of a batch. A rank sees only its own, and stops
earlier. That can be meant, and may change nothing, so it is a notice: in the first steps each rank counts what every
line that looks at a tensor's value saw, and where ranks with other samples have other counts, the line is named.

Traffic: two all_gathers of some bytes after the first steps, nothing later.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from paceline.comm.collectives import AxisComm
from paceline.torch_private.modules import is_compiled
from paceline.train.control_flow_trace import Branches

FIRST_STEPS = 3

Counts = dict[str, list[int]]  # how often each line saw True and False, and read a number


class Paths:
    """Compares the paths that ranks with different samples take.

    Args:
        comm: the communicator of these ranks.
        notice: a function that prints a line.
    """

    def __init__(self, comm: AxisComm, notice: Callable[[str], None]) -> None:
        self.comm = comm
        self.notice = notice
        self.steps = 0  # that were compared
        self.counts: Counts = {}
        self.reported: set[str] = set()
        self.watching = ExitStack()  # a loop's models are watched from one step's end to the next
        self.is_watching = comm.size > 1 and self.steps < FIRST_STEPS  # in the first steps; equal on all ranks

    @contextlib.contextmanager
    def watched(self, in_models: bool = False) -> Iterator[None]:
        """Count what the code inside sees.

        Args:
            in_models: True to count only what a module looks at while gradients are taken, and not the loop around it.
        """
        if not self.is_watching:
            yield
            return
        with Branches(in_models) as branches:
            try:
                yield
            finally:
                for line, outcome in branches.outcomes:
                    counts = self.counts.setdefault(line, [0, 0, 0])
                    counts[2 if outcome is None else 1 - outcome] += 1

    def watch(self) -> None:
        """Begin to count what models see, until `end_step` or `stop`."""
        self.watching.enter_context(self.watched(in_models=True))

    def leave_out(self) -> None:
        """Watch nothing."""
        self.stop()
        self.is_watching = False

    def stop(self) -> None:
        """Count no longer."""
        self.watching.close()

    def end_step(self) -> None:
        """Compare the step's counts, and name lines at which ranks went other ways. Collective, in the first steps."""
        if not self.is_watching:
            return
        self.stop()
        self.steps += 1
        self.is_watching = self.steps < FIRST_STEPS
        texts = self.comm.all_gather_text(json.dumps(self.counts))
        self.counts = {}
        by_rank: list[Counts] = [json.loads(text) for text in texts]
        # A rank without any counts has had no samples.
        ranks = [rank for rank, counts in zip(self.comm.peers, by_rank, strict=True) if counts]
        seen = [counts for counts in by_rank if counts]
        for line in dict.fromkeys(line for counts in seen for line in counts):
            at_line = [counts.get(line, [0, 0, 0]) for counts in seen]
            differing = next((index for index, counts in enumerate(at_line) if counts != at_line[0]), None)
            if differing is not None and line not in self.reported:
                self._report(line, (ranks[0], at_line[0]), (ranks[differing], at_line[differing]))

    def _report(self, line: str, first: tuple[int, list[int]], second: tuple[int, list[int]]) -> None:
        self.reported.add(line)
        self.notice(
            f"the path at {line} depends on the values of the batch: on rank {first[0]} it {_described(first[1])}, on "
            f"rank {second[0]}, which has other samples, it {_described(second[1])}. Unless that changes no result, "
            "the losses are not those of one process: choose by torch.where or a mask for each sample, or take a fixed "
            "number of rounds; `paceline verify` tells"
        )


def _described(counts: list[int]) -> str:
    words = []
    for count, outcome in zip(counts, ("was True", "was False", "read a number"), strict=True):
        if count:
            words.append(f"{outcome} {count} times" if count > 1 else f"{outcome} once")
    return " and ".join(words) or "was not reached"


def has_compiled(model: torch.nn.Module) -> bool:
    """True if a module is compiled by torch: it does not run line by line."""
    return any(is_compiled(module) for module in model.modules())
