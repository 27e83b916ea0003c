"""Gradients that travel together: one flat tensor, a slice of it for each parameter.

At the end of the flat tensor stands one number per parameter that says whether this rank has a gradient
for it, so a parameter that no rank used keeps no gradient, as it would in one process, and one that
some rank used gets the sum of those that did.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.dtensor_parts import like_parameter, local
from paceline.comm.reducer import Reducer
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.optim import foreach_copy_, foreach_mul_

MakeReducer = Callable[[Sequence[torch.Size], int, torch.dtype, torch.device], Reducer]


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device, and the reducer that sums their gradients."""

    parameters: list[torch.nn.Parameter]
    reducer: Reducer
    slices: list[list[torch.Tensor]]  # by inbox, then by parameter: shaped like the parameter
    results: list[torch.Tensor]  # by parameter: views of the outbox, which become the gradients
    filled: set[int] = field(default_factory=set)  # parameters whose gradient is in the inbox, or pending
    pending: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # small gradients, to be copied in together
    is_sent: bool = False
    has_parts: bool = field(init=False)  # some parameter is one rank's part of it

    def __post_init__(self) -> None:
        self.has_parts = any(local(parameter) is not parameter for parameter in self.parameters)

    @property
    def flags(self) -> int:
        """Return the index in the flat tensor at which the flags begin: they say who has a gradient."""
        return self.reducer.outbox.numel() - len(self.parameters)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this rank's part of each parameter's gradient; None where there is none."""
        if self.has_parts:
            return [local_gradient(parameter) for parameter in self.parameters]
        return [parameter.grad for parameter in self.parameters]

    def clear(self) -> None:
        """Begin a step: nobody has a gradient yet."""
        self.filled.clear()
        self.pending.clear()
        self.is_sent = False

    def fill(self, index: int, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Copy a gradient in, times `scale` where the reducer wants that first.

        Raises:
            WorkloadError: the gradient came twice (re-entrant checkpointing), so the first was not all.
        """
        self._check_is_first(index, gradient)
        place = self.slices[self.reducer.turn][index]
        if scale is None:
            place.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=place)
        self.filled.add(index)

    def hold(self, index: int, gradient: torch.Tensor) -> None:
        """Keep a small gradient until `send` copies all of them in by one call.

        Raises:
            WorkloadError: the gradient came twice.
        """
        self._check_is_first(index, gradient)
        self.pending.append((index, gradient))
        self.filled.add(index)

    def _check_is_first(self, index: int, gradient: torch.Tensor) -> None:
        if self.is_sent or index in self.filled:
            raise WorkloadError(
                "each parameter should get one gradient in a step's backward pass",
                f"one of shape {tuple(gradient.shape)} was accumulated twice, as re-entrant checkpointing does",
                "write checkpoint(..., use_reentrant=False), and call backward() on nothing else while the step's runs",
            )

    def fill_all(self, gradients: Sequence[torch.Tensor | None], scale: torch.Tensor | None) -> None:
        """Copy in the gradients of all parameters that have one, times `scale` where the reducer wants that first."""
        present = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
        self._copy_in(present, scale)
        self.filled.update(index for index, _ in present)

    def _copy_in(self, gradients: Sequence[tuple[int, torch.Tensor]], scale: torch.Tensor | None) -> None:
        if not gradients:
            return
        slices = self.slices[self.reducer.turn]
        places = [slices[index] for index, _ in gradients]
        foreach_copy_(places, [gradient for _, gradient in gradients])
        if scale is not None:
            foreach_mul_(places, scale)

    def send(self, scale: torch.Tensor | None = None) -> None:
        """Copy in what is pending, zero what has no gradient on this rank, and start the sum.

        Args:
            scale: the factor of pending gradients, where the reducer wants it first.
        """
        self._copy_in(self.pending, scale)
        self.pending.clear()
        own_flags = self.reducer.inboxes[self.reducer.turn][self.flags :]
        if len(self.filled) == len(self.parameters):
            own_flags.fill_(1)
        else:
            flags = torch.zeros(len(self.parameters), dtype=own_flags.dtype)
            for index in range(len(self.parameters)):
                if index in self.filled:
                    flags[index] = 1
                else:
                    # Else the inbox still has the gradient of the step that filled it last.
                    self.slices[self.reducer.turn][index].zero_()
            own_flags.copy_(flags, non_blocking=True)
        self.is_sent = True
        self.reducer.begin()

    def receive(self, scale: torch.Tensor | None) -> None:
        """Wait for the sum and make it the parameters' gradients."""
        self.reducer.finish(scale)
        self.install()

    def install(self) -> None:
        """Make the sum, which has arrived, the parameters' gradients."""
        # Of what this rank has a gradient for, some rank has one: where that is all, nothing is read, for which the
        # host would wait.
        if len(self.filled) == len(self.parameters):
            ranks_with_gradient = [1.0] * len(self.parameters)
        else:
            # The flags are summed and scaled like the gradients, so only zero or not has a meaning.
            ranks_with_gradient = self.reducer.outbox[self.flags :].tolist()
        for parameter, result, ranks in zip(self.parameters, self.results, ranks_with_gradient, strict=True):
            if self.has_parts:
                set_local_gradient(parameter, result if ranks else None)
            else:
                parameter.grad = result if ranks else None


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient."""
    gradient = parameter.grad
    return None if gradient is None else local(gradient)


def set_local_gradient(parameter: torch.nn.Parameter, value: torch.Tensor | None) -> None:
    """Put this rank's part of a gradient back."""
    if value is not None and hasattr(parameter, "to_local"):
        value = like_parameter(value, parameter)
    parameter.grad = value


def make_buckets(parameters: Sequence[torch.nn.Parameter], limit_bytes: int, make_reducer: MakeReducer) -> list[Bucket]:
    """Return buckets of at most `limit_bytes` (or one larger parameter), last parameter first.

    The backward pass makes the gradients in about that order.
    """
    groups = group_parameters([(local(parameter).nbytes, _kind(parameter)) for parameter in parameters], limit_bytes)
    buckets = []
    for group in groups:
        members = [parameters[index] for index in group]
        buckets.append(_bucket(members, make_reducer))
    return buckets


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _bucket(parameters: list[torch.nn.Parameter], make_reducer: MakeReducer) -> Bucket:
    shapes = [local(parameter).shape for parameter in parameters]
    # The flat tensor: each parameter's elements one after another, then one flag per parameter.
    reducer = make_reducer(shapes, len(parameters), *_kind(parameters[0]))
    slices = [_slices(inbox, shapes) for inbox in reducer.inboxes]
    return Bucket(list(parameters), reducer, slices, _slices(reducer.outbox, shapes))


def _slices(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return views of a flat tensor in these shapes, one after another from its beginning."""
    sizes = [shape.numel() for shape in shapes]
    slices = flat[: sum(sizes)].split(sizes)
    return [values.view(shape) for values, shape in zip(slices, shapes, strict=True)]


def group_parameters(sizes: Sequence[tuple[int, Hashable]], limit_bytes: int) -> list[list[int]]:
    """Group parameters, last first, into buckets of one kind and at most `limit_bytes` (or one larger one).

    Backward passes reach the last parameters first, so the first bucket is complete first.

    Args:
        sizes: for each parameter its number of bytes and its kind (dtype and device).
        limit_bytes: the largest number of bytes of a bucket that has several parameters.

    Returns:
        The parameters' indices, bucket by bucket.
    """
    # Only neighbours share a bucket: with another order a bucket would wait for gradients from all over the model.
    buckets: list[list[int]] = []
    bucket_kind: Hashable = None  # of the last bucket
    held_bytes = 0
    for index in reversed(range(len(sizes))):
        nbytes, kind = sizes[index]
        if not buckets or kind != bucket_kind or held_bytes + nbytes > limit_bytes:
            buckets.append([])
            bucket_kind = kind
            held_bytes = 0
        buckets[-1].append(index)
        held_bytes += nbytes
    return buckets
