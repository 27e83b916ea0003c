"""Parameters on servers, as a worker holds them: push gradients, pull what the servers made of everybody's.

Paceline's own `server` strategy goes through this, and so may a person's loop:

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
    """One worker's.

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
        self.model, self.optimizer = model, optimizer
        self.tensors, self.layout = laid_out(model, optimizer, samples)
        self.link: Link | None = None
        self.answer = Answer(0, [])
        self.steps = 0

    def join(
        self, where: str, worker: int, steps: int, options: Mapping[str, Any], credentials: Credentials | None = None
    ) -> int:
        """Join the job, and take its parameters; the step to begin with.

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
        """Whether all steps are taken."""
        return self.clock >= self.steps

    def push(self, loss: float, weight: float) -> Answer:
        """Push the parameters' gradients, wait, and take the next parameters.

        Args:
            loss: summed over this worker's samples.
            weight: how many there were; gradients are of the sum.

        Raises:
            PeerLostError: the servers have gone.
        """
        gradients = [None if entry.group == AVERAGE else tensor.grad for entry, tensor in self._both()]
        buffers = [tensor if entry.group == AVERAGE else None for entry, tensor in self._both()]
        sent = [buffer if buffer is not None else gradient for buffer, gradient in zip(buffers, gradients, strict=True)]
        answer = self.step(sent, loss, weight)
        self.take()
        for tensor in self.tensors:
            tensor.grad = None
        return answer

    def step(self, sent: Sequence[torch.Tensor | None], loss: float, weight: float, flags: int = 0) -> Answer:
        """Push what `sent` has for each entry, and wait for the next parameters; `take` puts them into the model.

        Args:
            sent: gradients of parameters, values of buffers; None where there is none.
            loss, weight: of this worker's samples.
            flags: `tensors.STOPPING`, `tensors.MEAN`.

        Raises:
            PeerLostError: the servers have gone.
        """
        link = self._joined()
        groups = [settings_of(group) for group in self.optimizer.param_groups]
        facts = {"loss": float(loss), "weight": float(weight), "flags": flags}
        notes = []
        for flat in link.gradients:
            absent = flat.gather(sent)
            notes.append(
                [
                    {**facts, "absent": gone, "settings": groups[segment.group] if segment.group != AVERAGE else {}}
                    for segment, gone in zip(flat.segments, absent, strict=True)
                ]
            )
        self.answer = link.step(notes)
        return self.answer

    def take(self) -> None:
        """Put the parameters that have come into the model."""
        for flat in self._joined().values:
            flat.scatter(self.tensors)

    def take_optimizer_state(self) -> None:
        """Put what the servers keep into the worker's optimizer."""
        link = self._joined()
        states = states_of(self.layout, link.ranges, link.read_state())
        for (entry, tensor), state in zip(self._both(), states, strict=True):
            if entry.group != AVERAGE and state:
                self.optimizer.state[tensor] = {key: value.to(_place_of(key, tensor)) for key, value in state.items()}

    def close(self) -> None:
        """Leave: nobody waits for this worker any more."""
        if self.link is not None:
            self.link.end()

    def _joined(self) -> Link:
        if self.link is None:
            raise UsageError("the servers' parameters", "this worker has not joined them", "call join first")
        return self.link

    def _both(self) -> list[tuple[Entry, torch.Tensor]]:
        return list(zip(self.layout.entries, self.tensors, strict=True))

    def _first(self, segments: Sequence[Segment]) -> bytes:
        states: list[Mapping[str, Any]] = [
            dict(self.optimizer.state.get(tensor, {})) if entry.group != AVERAGE else {}
            for entry, tensor in self._both()
        ]
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
            f"the option {min(unknown)!r}", "there are clip_norm, is_deterministic and credentials", "leave it out"
        )
    handle = Handle(model, optimizer)
    handle.join(where, worker, steps, options, Credentials(Path(folder)) if folder else None)
    return handle


def laid_out(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: int
) -> tuple[list[torch.Tensor], ServerLayout]:
    """What the servers keep of a model: the optimizer's parameters in its order, then the buffers of numbers.

    Raises:
        PlanError: the servers can't run the optimizer, or keep a dtype.
    """
    kind, groups = describe(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: list[torch.Tensor] = []
    entries: list[Entry] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            tensors.append(parameter)
            entries.append(_entry(names[id(parameter)], parameter, number))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.numel():
            tensors.append(buffer)
            entries.append(_entry(name, buffer, AVERAGE))
    return tensors, ServerLayout(tuple(entries), kind, tuple(groups), samples)


def _entry(name: str, tensor: torch.Tensor, group: int) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise PlanError(
            f"{name} on a parameter server", f"it is of {dtype}", f"servers keep {', '.join(BYTES)}; use one of these"
        )
    return Entry(name, tuple(tensor.shape), dtype, group)


def _place_of(key: str, parameter: torch.Tensor) -> torch.device:
    """Where torch's optimizers keep a state: counts of steps on the CPU, all else beside the parameter."""
    return torch.device("cpu") if key == "step" else parameter.device


__all__ = ["MEAN", "STOPPING", "Handle", "connect", "laid_out"]
