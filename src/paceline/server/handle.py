"""Train with parameters that are on servers: push gradients, and pull the parameters that result.

Paceline's own `server` strategy uses it, and so may a training loop of your own:

    handle = connect("unix:/run/job/coordinator", 0, model, optimizer, steps=1000)
    while not handle.is_done:
        loss_sum, count = ...                      # of this worker's samples
        loss_sum.backward()
        handle.push(float(loss_sum), count)        # and the model has the next parameters
    handle.close()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.nouns.errors import PlanError, UsageError
from paceline.server.layout import AVERAGE, BYTES, Entry, Segment, ServerLayout
from paceline.server.link import Answer, Link
from paceline.server.optimizers import describe, implementation_of, settings_of
from paceline.server.tensors import MEAN, STOPPING, first_content, states_of
from paceline.server.transport.address import Address, Credentials


class Handle:
    """One worker's model and optimizer, trained by the servers.

    Args:
        model: whose parameters and buffers of numbers are trained; they are changed in place.
        optimizer: over its parameters. The servers run it; its groups' settings, as a schedule leaves them, go with
            every push.

    Attributes:
        clock: the step that comes next.
        answer: what the servers said last.

    Raises:
        PlanError: the servers can't run the optimizer, or keep a dtype.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: int = 0) -> None:
        self.model = model
        self.optimizer = optimizer
        self.tensors, self.layout = laid_out(model, optimizer, samples)
        self.link: Link | None = None
        self.answer = Answer(0, [])
        self.steps = 0

    def join(
        self, where: str, worker: int, steps: int, options: Mapping[str, Any], credentials: Credentials | None = None
    ) -> int:
        """Join the job, take its parameters, and return the step to begin with.

        Args:
            where: the coordinator's address, `unix:PATH` or `HOST:PORT`.
            worker: this worker's number.
            steps: that every worker takes.
            options: `clip_norm`, largest norm of the whole gradient, and `is_deterministic`.
            credentials: for whatever leaves the host.

        Raises:
            PacelineError: the servers refuse this worker, or are not there.
        """
        self.steps = steps
        settings = {
            "steps": steps,
            "clip_norm": options.get("clip_norm"),
            "implementation": implementation_of(self.optimizer, bool(options.get("is_deterministic"))),
            "is_strict": True,
        }
        self.link = Link(Address.parse(where), worker, self.layout, settings, self._first, credentials)
        self.answer = self.link.begin()
        self.take()
        return self.answer.clock

    @property
    def clock(self) -> int:
        """The step that comes next."""
        return self.answer.clock

    @property
    def is_done(self) -> bool:
        """True if all steps are taken."""
        return self.clock >= self.steps

    def push(self, loss: float, weight: float) -> Answer:
        """Push the parameters' gradients, wait, and take the next parameters.

        Args:
            loss: summed over this worker's samples.
            weight: how many there were; gradients are of the sum.

        Raises:
            PeerLostError: the servers have gone.
        """
        sent: list[torch.Tensor | None] = []
        for entry, tensor in self._entries_and_tensors():
            is_buffer = entry.group == AVERAGE
            # Buffers, such as running statistics, have no gradient: servers take the mean of their values.
            sent.append(tensor if is_buffer else tensor.grad)
        answer = self.step(sent, loss, weight)
        self.take()
        for tensor in self.tensors:
            tensor.grad = None
        return answer

    def step(self, sent: Sequence[torch.Tensor | None], loss: float, weight: float, flags: int = 0) -> Answer:
        """Push one tensor for each entry, and wait for the next parameters; `take` copies them into the model.

        Args:
            sent: gradients of parameters, values of buffers; None where there is none.
            loss, weight: of this worker's samples.
            flags: `tensors.STOPPING`, `tensors.MEAN`.

        Raises:
            PeerLostError: the servers have gone.
        """
        link = self._joined()
        groups = [settings_of(group) for group in self.optimizer.param_groups]
        of_step = {"loss": float(loss), "weight": float(weight), "flags": flags}
        # Settings go with every gradient: the learning-rate schedule is the worker's Python code.
        notes: list[list[dict[str, Any]]] = []  # by range and segment
        for flat in link.gradients:
            notes_of_range: list[dict[str, Any]] = []
            for segment, absent in zip(flat.segments, flat.gather(sent), strict=True):
                settings = groups[segment.group] if segment.group != AVERAGE else {}
                notes_of_range.append({**of_step, "absent": absent, "settings": settings})
            notes.append(notes_of_range)
        self.answer = link.step(notes)
        return self.answer

    def take(self) -> None:
        """Copy the parameters that have come into the model."""
        for flat in self._joined().values:
            flat.scatter(self.tensors)

    def take_optimizer_state(self) -> None:
        """Copy the optimizer state that the servers keep into the worker's optimizer."""
        link = self._joined()
        states = states_of(self.layout, link.ranges, link.read_state())
        for (entry, tensor), state in zip(self._entries_and_tensors(), states, strict=True):
            if entry.group == AVERAGE or not state:
                continue
            # State comes on the CPU. torch expects it where its own optimizer would have made it.
            placed = {key: value.to(_device_of_state(key, tensor)) for key, value in state.items()}
            self.optimizer.state[tensor] = placed

    def close(self) -> None:
        """Leave the job: nobody waits for this worker any more."""
        if self.link is not None:
            self.link.end()

    def _joined(self) -> Link:
        if self.link is None:
            raise UsageError("can't read the servers' parameters", "this worker has not joined them", "call join first")
        return self.link

    def _entries_and_tensors(self) -> list[tuple[Entry, torch.Tensor]]:
        return list(zip(self.layout.entries, self.tensors, strict=True))

    def _first(self, segments: Sequence[Segment]) -> bytes:
        """Return a range's first content; the link calls it if this worker is to send it."""
        states: list[Mapping[str, Any]] = []
        for entry, tensor in self._entries_and_tensors():
            has_state = entry.group != AVERAGE
            states.append(dict(self.optimizer.state.get(tensor, {})) if has_state else {})
        return first_content(self.layout, segments, self.tensors, states)


def connect(
    where: str,
    worker: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    **options: Any,
) -> Handle:
    """Join the servers' job as one of its workers, with a loop of your own.

    Args:
        where: the coordinator's address, `unix:PATH` or `HOST:PORT`.
        worker: this worker's number, from 0.
        model, optimizer: the same on every worker.
        steps: that every worker takes.
        options: `clip_norm`; `is_deterministic`, the optimizer as torch runs it in one process, bit for bit;
            `credentials`, a folder, for an address that can leave this host.

    Raises:
        PlanError: the servers can't run the optimizer.
        WorkloadError: the workers' models differ.
        PeerLostError: nobody answers.
    """
    folder = options.pop("credentials", None)
    unknown = options.keys() - {"clip_norm", "is_deterministic"}
    if unknown:
        raise UsageError(
            f"there is no option {min(unknown)!r}",
            "there are clip_norm, is_deterministic and credentials",
            "leave it out",
        )
    credentials = Credentials(Path(folder)) if folder else None
    handle = Handle(model, optimizer)
    handle.join(where, worker, steps, options, credentials)
    return handle


def laid_out(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: int
) -> tuple[list[torch.Tensor], ServerLayout]:
    """Return the tensors that servers keep, and their layout: the optimizer's parameters in order, then float buffers.

    Raises:
        PlanError: the servers can't run the optimizer, or keep a dtype.
    """
    kind, groups = describe(optimizer)
    # Optimizers have no names. By id, as tensors compare by element.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: list[torch.Tensor] = []
    entries: list[Entry] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            tensors.append(parameter)
            entries.append(_entry(names[id(parameter)], parameter, number))
    for name, buffer in model.named_buffers():
        # Others, such as a count of batches, have no mean; one without elements has nothing to send.
        if buffer.is_floating_point() and buffer.numel():
            tensors.append(buffer)
            entries.append(_entry(name, buffer, AVERAGE))
    return tensors, ServerLayout(tuple(entries), kind, tuple(groups), samples)


def _entry(name: str, tensor: torch.Tensor, group: int) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise PlanError(
            f"can't keep {name} on a parameter server",
            f"it is of {dtype}",
            f"servers keep {', '.join(BYTES)}; use one of these",
        )
    return Entry(name, tuple(tensor.shape), dtype, group)


def _device_of_state(key: str, parameter: torch.Tensor) -> torch.device:
    """Return where torch's optimizers keep a state: counts of steps on the CPU, all else beside the parameter."""
    return torch.device("cpu") if key == "step" else parameter.device


__all__ = ["MEAN", "STOPPING", "Handle", "connect", "laid_out"]
