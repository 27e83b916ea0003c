"""Simulate a worker's step with parameter servers that don't run, and compute what each of them would hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from paceline.nouns.profile import COMMUNICATION
from paceline.parallel.engine.declared import DeclaredEngine
from paceline.parallel.server import ServerEngine
from paceline.profile.allocation_trace import Allocations
from paceline.server.handle import Handle
from paceline.server.link import Answer, Link
from paceline.server.optimizers import implementation_of, settings_of
from paceline.server.protocol.messages import Update
from paceline.server.range_tensors import FlatTensor, Segments
from paceline.server.server_layout import AVERAGE, Segment
from paceline.server.settings import JobSettings


@dataclass(slots=True)
class _NoLink:
    """The memory of a worker's connection: gradients out, parameters in, and room for the next parameters."""

    gradients: list[FlatTensor]
    values: list[FlatTensor]
    spare: list[torch.Tensor] = field(default_factory=list)


class AbsentServers(Handle):
    """A `Handle` whose pushes go nowhere, and whose parameters stay as they are."""

    is_on_host = False  # the connection's memory is not where the step is computed

    def join_nobody(self, servers: int, recorder: Allocations | None) -> None:
        """Allocate the memory of a connection to so many servers, and enter it in `recorder`."""
        ranges = self.layout.ranges(servers)
        gradients = [FlatTensor(self.layout, segments) for segments in ranges]
        values = [FlatTensor(self.layout, segments) for segments in ranges]
        link = _NoLink(gradients, values)
        link.spare = [torch.empty_like(flat.memory) for flat in values]
        self.is_on_host = recorder is None
        if recorder is not None:
            buffers = [flat.memory for flat in (*gradients, *values)] + link.spare
            recorder.record_all((("the servers' connection", buffer) for buffer in buffers), COMMUNICATION)
        self.link = cast(Link, link)

    def step(self, sent: Sequence[torch.Tensor | None], loss: float, weight: float, flags: int = 0) -> Answer:
        """Gather what would be sent; parameters come back as None, unchanged."""
        flats = self._joined().gradients
        if not self.is_on_host:
            for flat in flats:
                flat.gather(sent)
        self.answer = Answer(self.clock + 1, [None] * len(flats))
        return self.answer

    def take(self) -> None:
        """Copy the parameters as they would have come."""
        if not self.is_on_host:
            super().take()


def join_absent_servers(
    parallel: DeclaredEngine, optimizer: torch.optim.Optimizer, samples: int, recorder: Allocations | None
) -> list[dict[str, int]]:
    """Let a worker step as if its servers had answered; return what each server would hold.

    Nothing, and an empty list, where ranks exchange tensors without servers.

    Raises:
        PlanError: the servers can't run the optimizer.
    """
    if not isinstance(parallel, ServerEngine):
        return []
    handle = AbsentServers(parallel.model, optimizer, samples)
    handle.join_nobody(parallel.plan.server, recorder)
    parallel.handle = handle
    return servers_memory(parallel, parallel.workload.deterministic)


def servers_memory(parallel: ServerEngine, is_deterministic: bool) -> list[dict[str, int]]:
    """Compute what each server holds: its own range of parameters, and those that it is a replica of.

    Returns:
        Bytes: `parameters`, `optimizer_state`, and `gradients`, the most that may be waiting there: one of each worker.
    """
    handle = cast(AbsentServers, parallel.handle)
    settings = JobSettings.of(parallel.plan)
    implementation = implementation_of(handle.optimizer, is_deterministic)
    groups = [settings_of(handle.optimizer, group) for group in handle.optimizer.param_groups]
    sizes = []  # of each range: bytes of its parameters and of the optimizer's state
    # The store that a server would run takes one update of zeros, and what it then holds is counted.
    for segments in handle.layout.ranges(settings.servers):
        store = Segments(handle.layout, segments, implementation, None, settings.workers, settings.admission())
        for number, segment in enumerate(segments):
            store.apply(_update(number, segment, store, groups))  # so that the optimizer makes its state
        sizes.append((sum(segment.nbytes for segment in segments), _state_bytes(store)))
    servers = []
    for server in range(settings.servers):
        nbytes = {"parameters": 0, "optimizer_state": 0, "gradients": 0}
        for distance in range(settings.replicas):
            number = (server - distance) % settings.servers  # a range's replicas are on the servers after it, round
            if number < len(sizes):  # a small model has fewer ranges than servers
                parameter_bytes, state_bytes = sizes[number]
                nbytes["parameters"] += parameter_bytes
                nbytes["optimizer_state"] += state_bytes
        if server < len(sizes):
            nbytes["gradients"] = sizes[server][0] * settings.workers
        servers.append(nbytes)
    return servers


def _update(number: int, segment: Segment, store: Segments, groups: Sequence[dict[str, Any]]) -> Update:
    settings = groups[segment.group] if segment.group != AVERAGE else {}  # no optimizer updates buffers
    note = {"weight": 1.0, "absent": [], "settings": settings}
    return Update(number, (), note, torch.zeros_like(store.values.whole[number]))


def _state_bytes(store: Segments) -> int:
    nbytes = 0
    for optimizer in store.optimizers:
        if optimizer is None:
            continue
        for state in optimizer.state.values():
            nbytes += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return nbytes
