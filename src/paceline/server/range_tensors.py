"""Keep a range's parameters in memory: a worker copies them in and out, a server updates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save

from paceline.comm.squared_norm import square_norm
from paceline.nouns.errors import CheckpointError
from paceline.nouns.reading import parse_whole, shown
from paceline.server.optimizers import build, set_group
from paceline.server.protocol.admission import Mode
from paceline.server.protocol.messages import Push, Update
from paceline.server.server_layout import AVERAGE, KeyRange, Segment, ServerLayout
from paceline.torch_private.optim import foreach_mul_

STOPPING, MEAN = 1, 2  # flags of a push: a worker was asked to stop; its gradient is that of its mean already
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a flat tensor's memory."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def views_of(payload: Any) -> Sequence[memoryview]:
    """Return the bytes of a message's payload: a flat tensor, or bytes."""
    return [bytes_of(payload)] if isinstance(payload, torch.Tensor) else [memoryview(payload)]


class FlatTensor:
    """One range's segments as one block of memory, with a view of every piece.

    Args:
        layout: of the job.
        segments: of the range.
    """

    def __init__(self, layout: ServerLayout, segments: Sequence[Segment]) -> None:
        self.layout = layout
        self.segments = segments
        # One block, in the order of segments: it is sent and received as one payload, without a copy.
        self.memory = torch.zeros(sum(segment.nbytes for segment in segments), dtype=torch.uint8)
        self.whole: list[torch.Tensor] = []  # by segment, all of its elements
        self.views: list[list[torch.Tensor]] = []  # by segment and piece
        first_byte = segments[0].begin
        for segment in segments:
            offset = segment.begin - first_byte
            elements = self.memory[offset : offset + segment.nbytes].view(_DTYPES[segment.dtype])
            self.whole.append(elements)
            self.views.append(pieces_of(elements, segment))

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> list[list[int]]:
        """Copy tensors in, by entry; return by segment the numbers of the pieces whose tensor is None."""
        absent: list[list[int]] = []
        with torch.no_grad():
            for segment, views in zip(self.segments, self.views, strict=True):
                absent_pieces: list[int] = []
                absent.append(absent_pieces)
                for number, (piece, view) in enumerate(zip(segment.pieces, views, strict=True)):
                    tensor = tensors[piece.entry]
                    if tensor is None:
                        # Noted, as a gradient of zeros is not the same: weight decay and momentum would move the
                        # parameter.
                        absent_pieces.append(number)
                        view.zero_()
                    else:
                        view.copy_(tensor.detach().reshape(-1)[piece.start : piece.start + piece.count])
        return absent

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy everything out, by entry."""
        flats: dict[int, torch.Tensor] = {}  # by entry: its elements in order
        with torch.no_grad():
            for segment, views in zip(self.segments, self.views, strict=True):
                for piece, view in zip(segment.pieces, views, strict=True):
                    if piece.entry not in flats:
                        flats[piece.entry] = tensors[piece.entry].detach().reshape(-1)
                    flats[piece.entry][piece.start : piece.start + piece.count].copy_(view)
            for entry, flat in flats.items():
                tensor = tensors[entry].detach()
                # What `reshape` copied goes back: a transposed weight, or one of memory_format=torch.channels_last.
                if not tensor.is_contiguous():
                    tensor.copy_(flat.view(tensor.shape))


def pieces_of(elements: torch.Tensor, segment: Segment) -> list[torch.Tensor]:
    """Return a segment's pieces, as views of all its elements."""
    size = elements.element_size()
    pieces: list[torch.Tensor] = []
    for piece in segment.pieces:
        start = piece.offset // size
        pieces.append(elements[start : start + piece.count])
    return pieces


class Segments:
    """The parameters of one range and their optimizers, as a server keeps them: see `store.Store`.

    Args:
        layout: of the job.
        segments: of the range.
        implementation: of the optimizer.
        clip_norm: largest norm of the whole gradient; None for no clipping.
        workers: the number of the job's workers; a buffer that only one of them pushes moves by that part.
        mode: when gradients become an update.
    """

    def __init__(
        self,
        layout: ServerLayout,
        segments: Sequence[Segment],
        implementation: Mapping[str, Any],
        clip_norm: float | None,
        workers: int,
        mode: Mode,
    ) -> None:
        self.layout = layout
        self.segments = segments
        self.implementation = implementation
        self.clip_norm = clip_norm
        self.workers = workers
        self.mode = mode
        self.clear()

    def clear(self) -> None:
        """Forget everything: parameters are zeros, optimizers are new."""
        self.values = FlatTensor(self.layout, self.segments)
        self.optimizers: list[torch.optim.Optimizer | None] = []  # by segment; buffers have none
        self.parameters: list[list[torch.nn.Parameter]] = []  # by segment and piece, views of `values`
        for segment, views in zip(self.segments, self.values.views, strict=True):
            # Each piece is a parameter of its own. torch's optimizers here update elements one by one, so the bits are
            # the same.
            parameters = [torch.nn.Parameter(view) for view in views]
            self.parameters.append(parameters)
            if segment.group == AVERAGE:
                self.optimizers.append(None)
                continue
            settings = self.layout.groups[segment.group]
            self.optimizers.append(build(self.layout.optimizer, parameters, settings, self.implementation))

    def combine(self, pushes: Sequence[Push]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the gradient of the mean loss: gradients of sums, added in the order given, over the weight.

        One process adds micro-batches in the same order. The first push's payload becomes the result.
        """
        notes = [push.note for push in pushes]
        segment = self.segments[pushes[0].segment]
        weight = sum(note["weight"] for note in notes)
        total: torch.Tensor = pushes[0].payload
        if segment.group == AVERAGE:
            self._average(segment, pushes, total)
        # A push of a mean is multiplied back to a sum only where it is added to others: otherwise that would round it
        # twice.
        elif len(pushes) > 1 or not notes[0]["flags"] & MEAN:  # a single mean is the result already
            self._sum(pushes, total)
            if weight:
                foreach_mul_([total], torch.tensor(weight, dtype=torch.float64).reciprocal())
        is_stopping = any(note["flags"] & STOPPING for note in notes)
        loss = sum(note["loss"] for note in notes)
        return total, {
            "loss": float(loss),
            "weight": float(weight),
            "flags": STOPPING if is_stopping else 0,
            "absent": self._absent_everywhere(segment, notes),
            "settings": notes[0]["settings"],
        }

    def _absent_everywhere(self, segment: Segment, notes: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the pieces of which no worker has a gradient."""
        absent: list[int] = []
        for number in range(len(segment.pieces)):
            if all(number in note["absent"] for note in notes):
                absent.append(number)
        return absent

    def _sum(self, pushes: Sequence[Push], total: torch.Tensor) -> None:
        """Add the gradients of the summed loss to `total`, which is the first push's payload."""
        for push in pushes:
            if push.note["flags"] & MEAN:
                push.payload.mul_(push.note["weight"])
        for push in pushes[1:]:
            total.add_(push.payload)

    def _average(self, segment: Segment, pushes: Sequence[Push], total: torch.Tensor) -> None:
        """Write the mean over the workers whose forward passes changed a buffer to `total`."""
        pieces_by_push = [pieces_of(push.payload, segment) for push in pushes]
        for number, view in enumerate(pieces_of(total, segment)):
            changed: list[torch.Tensor] = []
            for push, pieces in zip(pushes, pieces_by_push, strict=True):
                if number not in push.note["absent"]:
                    # In float64: the mean of several values is rounded to the buffer's dtype once.
                    changed.append(pieces[number].double())
            if changed:
                view.copy_(torch.stack(changed).mean(0))

    def measure(self, updates: Sequence[Update]) -> float:
        """Return the squared norm of this range's gradient; infinity where it is not finite."""
        # Added up in float64, row by row (comm/squared_norm.py): the number of servers changes the norm by float64's
        # rounding at most.
        total = torch.zeros((), dtype=torch.float64)
        for update in updates:
            segment = self.segments[update.segment]
            if segment.group == AVERAGE or self.clip_norm is None:
                continue
            for number, view in enumerate(pieces_of(update.payload, segment)):
                if number not in update.note["absent"]:
                    total += square_norm(view)
        # Infinity, as no NaN can be sent: see `frames._float`.
        return float(total) if torch.isfinite(total) else float("inf")

    def finish(self, update: Update, partials: Sequence[float]) -> Update:
        """Return the update with its gradient clipped by the norm of all ranges together."""
        if self.clip_norm is None:
            return update
        # Of the summed squares of all ranges, buffers excluded: the norm that one process clips by.
        norm = torch.tensor(sum(partials), dtype=torch.float64).sqrt()
        if self.segments[update.segment].group != AVERAGE and torch.isfinite(norm):
            # As torch.nn.utils.clip_grad_norm_ computes it, 1e-6 included.
            foreach_mul_([update.payload], (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        number = float(norm) if torch.isfinite(norm) else float("inf")
        return dataclasses.replace(update, note={**update.note, "norm": number})

    def apply(self, update: Update) -> None:
        """Step the optimizer of one segment. A batch that weighs nothing, or an infinite norm, changes nothing."""
        note = update.note
        # The same decision on every replica, only by the update's note. It counts nevertheless: clocks go on.
        if not note["weight"] or note.get("norm") == float("inf"):
            return
        optimizer = self.optimizers[update.segment]
        pieces = pieces_of(update.payload, self.segments[update.segment])
        with torch.no_grad():
            if optimizer is None:
                self._move_buffers(update, pieces)
                return
            parameters = self.parameters[update.segment]
            for index, (parameter, view) in enumerate(zip(parameters, pieces, strict=True)):
                # None, not zeros: torch's optimizers skip such a parameter, weight decay and momentum included.
                parameter.grad = None if index in note["absent"] else view
            set_group(optimizer, note["settings"], update.share)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None

    def _move_buffers(self, update: Update, pieces: Sequence[torch.Tensor]) -> None:
        """Set buffers to the mean of a round; outside of rounds move them towards one worker's by its part."""
        weight = 1.0 if self.mode.is_by_rounds else 1 / self.workers
        for index, (buffer, view) in enumerate(zip(self.parameters[update.segment], pieces, strict=True)):
            if index in update.note["absent"]:
                continue
            if weight < 1:
                buffer.lerp_(view, weight)
            else:
                buffer.copy_(view)

    def read(self) -> torch.Tensor:
        """Return the parameters. Under sync nobody applies anything before all have read; otherwise copy them."""
        if self.mode.kind == "sync":
            return self.values.memory
        return self.values.memory.clone()

    def content(self) -> bytes:
        """Return parameters and optimizer state, as safetensors."""
        tensors = {f"value/{number}": values for number, values in enumerate(self.values.whole)}
        for number, optimizer in enumerate(self.optimizers):
            if optimizer is None:
                continue
            for index, parameter in enumerate(self.parameters[number]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"state/{number}/{index}/{key}"] = value.detach().contiguous()
        # Cloned: safetensors refuses tensors that share memory, as the segments of a range do.
        return save({name: tensor.clone() for name, tensor in tensors.items()})

    def restore(self, content: bytes) -> None:
        """Take over what `content` returned.

        Raises:
            CheckpointError: it is not of this range.
        """
        try:
            tensors = load(bytes(content))
            # Optimizer state is by parameter object, and clear() makes new ones.
            self.clear()
            for number, values in enumerate(self.values.whole):
                value = tensors.pop(f"value/{number}")
                if value.dtype != values.dtype or value.shape != values.shape:
                    raise KeyError(f"a segment of {tuple(value.shape)} where {tuple(values.shape)} are")
                values.copy_(value)
            for name, value in tensors.items():
                segment, piece, key = _place_of_state(name)
                optimizer = self.optimizers[segment]
                parameter = self.parameters[segment][piece]
                # A count of steps is one number, whatever the piece's shape.
                if value.numel() != 1 and value.shape != parameter.shape:
                    raise KeyError(f"{key} of {tuple(value.shape)} where {tuple(parameter.shape)} are")
                if optimizer is not None:
                    optimizer.state[parameter][key] = value
        except (safetensors.SafetensorError, KeyError, ValueError, IndexError) as error:
            raise CheckpointError(
                "can't read the state of a range of parameters",
                f"it is not of this range, or of another version ({error})",
                "report this, with both versions",
            ) from None


def _place_of_state(name: str) -> tuple[int, int, str]:
    """Read segment, piece and key out of `state/SEGMENT/PIECE/KEY`.

    Raises:
        ValueError: the name is another.
    """
    _, segment_text, piece_text, key = name.split("/")
    segment = parse_whole(segment_text)
    piece = parse_whole(piece_text)
    if segment is None or piece is None:
        raise ValueError(f"a name {shown(name)}")
    return segment, piece, key


def first_content(
    layout: ServerLayout,
    segments: Sequence[Segment],
    tensors: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
) -> bytes:
    """Return the bytes that a worker sends to the servers at the start: a range of its parameters and its state.

    Args:
        layout: the job's layout.
        segments: the segments of the range.
        tensors: the tensor of each entry.
        states: the optimizer's state of each entry; empty before the first step.
    """
    flat = FlatTensor(layout, segments)
    flat.gather(tensors)
    packed = {f"value/{number}": values.clone() for number, values in enumerate(flat.whole)}
    for number, segment in enumerate(segments):
        for index, piece in enumerate(segment.pieces):
            shape = layout.entries[piece.entry].shape
            for key, value in states[piece.entry].items():
                packed[f"state/{number}/{index}/{key}"] = _piece_of_state(value, piece, shape).detach().clone()
    return save(packed)


def _piece_of_state(value: Any, piece: KeyRange, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the part of one optimizer state that belongs to a piece of the parameter; a count of steps as it is."""
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    # One element is a count of steps, unless the parameter has one element and is no scalar itself.
    is_like_parameter = tensor.numel() > 1 or tuple(tensor.shape) == shape != ()
    if not is_like_parameter:
        return tensor
    return tensor.reshape(-1)[piece.start : piece.start + piece.count]


def states_of(
    layout: ServerLayout, ranges: Sequence[Sequence[Segment]], contents: Sequence[bytes]
) -> list[dict[str, Any]]:
    """Return the optimizer's state by entry, put together from what the servers sent.

    Raises:
        CheckpointError: that is something else.
    """
    try:
        return _states_of(layout, ranges, contents)
    except (safetensors.SafetensorError, KeyError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            "can't read the optimizer's state on the servers",
            f"it is not of this range, or of another version ({error})",
            "report this, with both versions",
        ) from None


def _states_of(
    layout: ServerLayout, ranges: Sequence[Sequence[Segment]], contents: Sequence[bytes]
) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = [{} for _ in layout.entries]
    for segments, content in zip(ranges, contents, strict=True):
        for name, value in load(bytes(content)).items():
            if not name.startswith("state/"):
                continue
            number, index, key = _place_of_state(name)
            piece = segments[number].pieces[index]
            entry = layout.entries[piece.entry]
            state = states[piece.entry]
            is_count = value.numel() != piece.count or (value.dim() == 0 and entry.shape != ())
            if is_count:  # of steps: the same in all pieces
                state[key] = value
                continue
            end = piece.start + piece.count
            # Pieces of one parameter may be in several segments and on several servers, and come in this order.
            flat = state.setdefault(key, torch.zeros(entry.numel, dtype=value.dtype))
            flat.view(-1)[piece.start : end] = value
            state[key] = flat.view(entry.shape) if end == entry.numel else flat
    return states
