"""Gradients that travel together: one flat tensor, a slice of it for each parameter.

At the end of the flat tensor stands one number per parameter that says whether this rank has a gradient
for it, so a parameter that no rank used keeps no gradient, as it would in one process, and one that
some rank used gets the sum of those that did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.comm.wire import Wire
from paceline.nouns.buckets import group_parameters

MakeWire = Callable[[Sequence[torch.Size], int, torch.dtype, torch.device], Wire]


@dataclass(slots=True)
class Bucket:
    """Parameters of one dtype and device, and the wire that sums their gradients."""

    parameters: list[torch.nn.Parameter]
    wire: Wire
    slices: list[list[torch.Tensor]]  # by inbox, then by parameter: shaped like the parameter
    results: list[torch.Tensor]
    filled: int = 0  # parameters whose gradient is in the inbox
    is_sent: bool = False

    @property
    def flags(self) -> int:
        """Where in the flat tensor the numbers that say who has a gradient begin."""
        return self.wire.outbox.numel() - len(self.parameters)

    def clear(self) -> None:
        """Begin a step: nobody has a gradient yet."""
        self.filled, self.is_sent = 0, False
        self.wire.inboxes[self.wire.turn][self.flags :] = 0

    def fill(self, index: int, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Copy a gradient in, times `scale` where the wire wants that first.

        Raises:
            RuntimeError: the gradient came twice (re-entrant checkpointing), so the first was not all.
        """
        inbox = self.wire.inboxes[self.wire.turn]
        if self.is_sent or inbox[self.flags + index]:
            raise RuntimeError("a gradient was accumulated twice in one backward pass")
        place = self.slices[self.wire.turn][index]
        if scale is None:
            place.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=place)
        inbox[self.flags + index] = 1
        self.filled += 1

    def send(self) -> None:
        """Zero what has no gradient on this rank, and start the sum."""
        if self.filled < len(self.parameters):
            inbox = self.wire.inboxes[self.wire.turn]
            for index, has_gradient in enumerate(inbox[self.flags :].tolist()):
                if not has_gradient:
                    self.slices[self.wire.turn][index].zero_()
        self.is_sent = True
        self.wire.begin()

    def receive(self, scale: torch.Tensor) -> None:
        """Wait for the sum and make it the parameters' gradients."""
        self.wire.finish(scale)
        for parameter, result, ranks in zip(
            self.parameters, self.results, self.wire.outbox[self.flags :].tolist(), strict=True
        ):
            parameter.grad = result if ranks else None


def make_buckets(parameters: Sequence[torch.nn.Parameter], limit_bytes: int, make_wire: MakeWire) -> list[Bucket]:
    """Buckets of at most `limit_bytes` (or one larger parameter), last parameter first."""
    groups = group_parameters([(p.nbytes, _kind(p)) for p in parameters], limit_bytes)
    return [_bucket([parameters[index] for index in group], make_wire) for group in groups]


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _bucket(parameters: list[torch.nn.Parameter], make_wire: MakeWire) -> Bucket:
    shapes = [parameter.shape for parameter in parameters]
    wire = make_wire(shapes, len(parameters), *_kind(parameters[0]))
    slices = [_slices(inbox, shapes) for inbox in wire.inboxes]
    return Bucket(list(parameters), wire, slices, _slices(wire.outbox, shapes))


def _slices(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    parts = flat[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
