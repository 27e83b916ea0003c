"""Train with parameters that are on servers: push gradients, and pull the parameters that result.

Paceline's own `server` strategy uses it, and so may a training loop of your own: see `connect`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.nouns.errors import LossError, PlanError, UsageError
from paceline.server.link import Answer, Link
from paceline.server.optimizers import describe, implementation_of, settings_of
from paceline.server.range_tensors import MEAN, STOPPING, first_content, states_of
from paceline.server.server_layout import AVERAGE, BYTES, Entry, Segment, ServerLayout
from paceline.server.transport.address import Address, Credentials


class Handle:
    """One worker's model and optimizer, trained by the servers. `connect` makes it.

    Args:
        model: whose parameters and buffers of numbers are trained; they are changed in place.
        optimizer: over its parameters. The servers run it; its groups' settings, as a schedule leaves them, go with
            every push.
        samples: of the job's data set; 0 where it has none. Workers with different numbers are refused.

    Attributes:
        clock: the step that comes next, from 0.
        is_done: True if all steps are taken.
        answer (Answer): what the servers said last.

    Raises:
        PlanError: the servers can't run the optimizer, or keep a dtype.

    Examples:
        Each push carries the learning rate of its step:

        >>> from paceline.server.handle import connect
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = connect("unix:coordinator", 0, model, optimizer, steps=3)
        >>> while not handle.is_done:
        ...     optimizer.param_groups[0]["lr"] = 0.1 * 0.5**handle.clock
        ...     total, count = loss(model, (x[:16], y[:16]))
        ...     total.backward()
        ...     answer = handle.push(total.item(), count)
        >>> handle.clock
        3
        >>> handle.close()
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
        """The step that comes next, from 0.

        Returns:
            Steps that this worker has taken. One that takes a lost worker's place begins at that worker's step; in
            other modes than sync it is known only by its last heartbeat.
        """
        return self.answer.clock

    @property
    def is_done(self) -> bool:
        """True if all steps are taken.

        Returns:
            True once `clock` is the number of steps that `connect` was given.
        """
        return self.clock >= self.steps

    def push(self, loss: float, weight: float) -> Answer:
        """Push the parameters' gradients, wait, and take the next parameters.

        The gradients are gone afterwards. How long it waits for other workers is a matter of the mode.

        Args:
            loss: summed over this worker's samples.
            weight: how many there were; gradients are of the sum.

        Returns:
            What the servers say; its `clock` is the step that comes next.

        Raises:
            LossError: the loss or its weight is NaN; nothing was pushed.
            PeerLostError: the servers have gone.

        Examples:
            >>> from paceline.server.handle import connect
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            >>> handle = connect("unix:coordinator", 0, model, optimizer, steps=1)
            >>> before = model.weight.detach().clone()
            >>> total, count = loss(model, (x, y))
            >>> total.backward()
            >>> handle.push(total.item(), count).clock
            1
            >>> torch.equal(model.weight, before), model.weight.grad
            (False, None)
            >>> handle.close()
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
            sent: the gradients of parameters and the values of buffers; None where there is none.
            loss, weight: the loss sum and the weight of this worker's samples.
            flags: the sum of the flags `tensors.STOPPING` and `tensors.MEAN`, where they hold.

        Raises:
            LossError: the loss or its weight is NaN: the servers would take no such frame, and all would wait.
            PeerLostError: the servers have gone.
        """
        link = self._joined()
        if math.isnan(loss) or math.isnan(weight):
            raise LossError(
                "the loss and its weight that go to the servers should be numbers",
                f"the loss is {float(loss)}, its weight {float(weight)}",
                "look for the samples at which the loss is none, or lower the learning rate",
            )
        groups = [settings_of(self.optimizer, group) for group in self.optimizer.param_groups]
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
        """Copy the optimizer state that the servers keep into the worker's optimizer.

        Raises:
            UsageError: this worker has not joined the servers.
            PeerLostError: the servers have gone.

        Examples:
            Save model and optimizer after the last step:

            >>> from paceline.server.handle import connect
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            >>> handle = connect("unix:coordinator", 0, model, optimizer, steps=1)
            >>> total, count = loss(model, (x, y))
            >>> total.backward()
            >>> answer = handle.push(total.item(), count)
            >>> handle.take_optimizer_state()
            >>> handle.close()
            >>> torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
            >>> optimizer.state[model.weight]["exp_avg"].shape
            torch.Size([1, 4])
        """
        link = self._joined()
        states = states_of(self.layout, link.ranges, link.read_state())
        for (entry, tensor), state in zip(self._entries_and_tensors(), states, strict=True):
            if entry.group == AVERAGE or not state:
                continue
            # State comes on the CPU. torch expects it where its own optimizer would have made it.
            placed = {key: value.to(_device_of_state(key, tensor)) for key, value in state.items()}
            self.optimizer.state[tensor] = placed

    def close(self) -> None:
        """Leave the job: nobody waits for this worker any more.

        Examples:
            Leave also where the loop raises, so that the other workers need not find out by silence:

            >>> import contextlib
            >>> from paceline.server.handle import connect
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with contextlib.closing(connect("unix:coordinator", 0, model, optimizer, steps=2)) as handle:
            ...     while not handle.is_done:
            ...         total, count = loss(model, (x, y))
            ...         total.backward()
            ...         answer = handle.push(total.item(), count)
        """
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
        model: the same on every worker. Its parameters become those that the servers have.
        optimizer: the same on every worker, over the model's parameters.
        steps: that every worker takes.
        options: `clip_norm`, the largest norm of the whole gradient; `is_deterministic`, the optimizer as torch runs it
            in one process, bit for bit; `credentials`, a folder, for an address that can leave this host.

    Returns:
        This worker's place in the job; its model has the servers' parameters.

    Raises:
        UsageError: there is no such option, or the address can't be read.
        PlanError: the servers can't run the optimizer.
        WorkloadError: the workers' models differ.
        PeerLostError: nobody answers.

    Examples:
        >>> from paceline.server.handle import connect
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = connect("unix:coordinator", 0, model, optimizer, steps=20, clip_norm=1.0)
        >>> means = []
        >>> while not handle.is_done:
        ...     total, count = loss(model, (x, y))
        ...     total.backward()
        ...     answer = handle.push(total.item(), count)
        ...     means.append(total.item() / count)
        >>> handle.close()
        >>> means[-1] < means[0]
        True
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
        fix = "use one of these"
        if tensor.is_complex():
            fix = (
                "hold its real and imaginary parts in one real parameter (torch.view_as_complex of it computes the "
                "same), or train it by replicate or shard"
            )
        raise PlanError(
            f"can't keep {name} on a parameter server",
            f"it is of {dtype}",
            f"servers keep {', '.join(BYTES)}; {fix}",
        )
    return Entry(name, tuple(tensor.shape), dtype, group)


def _device_of_state(key: str, parameter: torch.Tensor) -> torch.device:
    """Return the device of a state of torch's optimizers: counts of steps on the CPU, all else with the parameter."""
    return torch.device("cpu") if key == "step" else parameter.device


__all__ = ["MEAN", "STOPPING", "Handle", "connect", "laid_out"]
