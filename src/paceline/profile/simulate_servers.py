"""A worker's step with parameter servers that are not there, and what each of them would hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from paceline.nouns.profile import COMMUNICATION
from paceline.parallel.server import ServerParallel
from paceline.profile.allocation_trace import Allocations
from paceline.server.handle import Handle
from paceline.server.layout import AVERAGE, Segment
from paceline.server.link import Answer, Link
from paceline.server.optimizers import implementation_of, settings_of
from paceline.server.protocol.messages import Update
from paceline.server.settings import JobSettings
from paceline.server.tensors import FlatTensor, Segments


@dataclass(slots=True)
class _NoLink:
    """What a worker keeps for its connection: both ways, and where the next parameters come in."""

    gradients: list[FlatTensor]
    values: list[FlatTensor]
    spare: list[torch.Tensor] = field(default_factory=list)


class AbsentServers(Handle):
    """As `Handle`; pushes go nowhere, and the parameters stay as they are."""

    is_on_host = False  # the connection's memory is not where the step is computed

    def join_nobody(self, servers: int, recorder: Allocations | None) -> None:
        """Take up the memory of a connection to so many servers; `recorder` hears of it."""
        ranges = self.layout.ranges(servers)
        link = _NoLink(
            [FlatTensor(self.layout, own) for own in ranges], [FlatTensor(self.layout, own) for own in ranges]
        )
        link.spare = [torch.empty_like(flat.memory) for flat in link.values]
        held = [flat.memory for flat in (*link.gradients, *link.values)] + link.spare
        self.is_on_host = recorder is None
        if recorder is not None:
            recorder.note_all((("the servers' connection", one) for one in held), COMMUNICATION)
        self.link = cast(Link, link)

    def step(self, sent: Sequence[torch.Tensor | None], loss: float, weight: float, flags: int = 0) -> Answer:
        """Gather what would be sent."""
        flats = self._joined().gradients
        for flat in () if self.is_on_host else flats:
            flat.gather(sent)
        self.answer = Answer(self.clock + 1, [None] * len(flats))
        return self.answer

    def take(self) -> None:
        """Copy the parameters as they would have come."""
        if not self.is_on_host:
            super().take()


def join_nobody(
    parallel: ServerParallel, optimizer: torch.optim.Optimizer, samples: int, recorder: Allocations | None
) -> None:
    """Have a worker step as if its servers had answered.

    Raises:
        PlanError: the servers can't run the optimizer.
    """
    handle = AbsentServers(parallel.model, optimizer, samples)
    handle.join_nobody(parallel.plan.server, recorder)
    parallel.handle = handle


def servers_memory(parallel: ServerParallel, is_deterministic: bool) -> list[dict[str, int]]:
    """What each server holds: its own range of parameters, and those that it is a replica of.

    Returns:
        Bytes: `parameters`, `optimizer_state`, and `gradients`, the most that may be waiting there: one of each worker.
    """
    handle = cast(AbsentServers, parallel.handle)
    settings = JobSettings.of(parallel.plan)
    implementation = implementation_of(handle.optimizer, is_deterministic)
    groups = [settings_of(group) for group in handle.optimizer.param_groups]
    ranges = []
    for segments in handle.layout.ranges(settings.servers):
        store = Segments(handle.layout, segments, implementation, None, settings.workers, settings.admission())
        for number, segment in enumerate(segments):
            store.apply(_update(number, segment, store, groups))
        ranges.append((sum(segment.nbytes for segment in segments), _state_bytes(store)))
    answers = []
    for number in range(settings.servers):
        chains = [(number - back) % settings.servers for back in range(settings.replicas)]  # they go round
        own = [ranges[at] for at in chains if at < len(ranges)]  # a small model has fewer ranges than servers
        parameters = sum(nbytes for nbytes, _ in own)
        state = sum(nbytes for _, nbytes in own)
        waiting = ranges[number][0] * settings.workers if number < len(ranges) else 0
        answers.append({"parameters": parameters, "optimizer_state": state, "gradients": waiting})
    return answers


def _update(number: int, segment: Segment, store: Segments, groups: Sequence[dict[str, Any]]) -> Update:
    settings = groups[segment.group] if segment.group != AVERAGE else {}
    note = {"weight": 1.0, "absent": [], "settings": settings}
    return Update(number, (), note, torch.zeros_like(store.values.whole[number]))


def _state_bytes(store: Segments) -> int:
    optimizers = [optimizer for optimizer in store.optimizers if optimizer is not None]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
