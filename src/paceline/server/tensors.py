"""Parameters in their segments: as a worker fills and reads them, and as a server keeps and updates them."""

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
from paceline.server.layout import AVERAGE, Segment, ServerLayout
from paceline.server.optimizers import build, set_group
from paceline.server.protocol.admission import Mode
from paceline.server.protocol.messages import Push, Update

STOPPING, MEAN = 1, 2  # flags of a push: a worker was asked to stop; its gradient is that of its mean already
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A flat tensor's memory."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def views_of(payload: Any) -> Sequence[memoryview]:
    """The bytes of a message's payload: a flat tensor, or bytes."""
    return [bytes_of(payload)] if isinstance(payload, torch.Tensor) else [memoryview(payload)]


class FlatTensor:
    """One range's segments as one block of memory, with a view of every piece.

    Args:
        layout: of the job.
        segments: of the range.
    """

    def __init__(self, layout: ServerLayout, segments: Sequence[Segment]) -> None:
        self.layout, self.segments = layout, segments
        self.memory = torch.zeros(sum(segment.nbytes for segment in segments), dtype=torch.uint8)
        self.whole, self.views = [], []
        begin = segments[0].begin
        for segment in segments:
            at = segment.begin - begin
            self.whole.append(self.memory[at : at + segment.nbytes].view(_DTYPES[segment.dtype]))
            self.views.append(pieces_of(self.whole[-1], segment))

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> list[list[int]]:
        """Copy tensors in, by entry; of each segment the pieces whose tensor is None."""
        absent: list[list[int]] = []
        with torch.no_grad():
            for segment, views in zip(self.segments, self.views, strict=True):
                absent.append([])
                for number, (piece, view) in enumerate(zip(segment.pieces, views, strict=True)):
                    tensor = tensors[piece.entry]
                    if tensor is None:
                        absent[-1].append(number)
                        view.zero_()
                    else:
                        view.copy_(tensor.detach().reshape(-1)[piece.start : piece.start + piece.count])
        return absent

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy everything out, by entry."""
        with torch.no_grad():
            for segment, views in zip(self.segments, self.views, strict=True):
                for piece, view in zip(segment.pieces, views, strict=True):
                    flat = tensors[piece.entry].detach().view(-1)
                    flat[piece.start : piece.start + piece.count].copy_(view)


def pieces_of(whole: torch.Tensor, segment: Segment) -> list[torch.Tensor]:
    """A segment's pieces, as views."""
    size = whole.element_size()
    return [whole[piece.offset // size : piece.offset // size + piece.count] for piece in segment.pieces]


class Segments:
    """What a server keeps of one range: see `store.Store`.

    Args:
        layout: of the job.
        segments: of the range.
        implementation: of the optimizer.
        clip_norm: largest norm of the whole gradient; None for no clipping.
        workers: how many the job has; a buffer that one of them pushes alone moves by that part.
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
        self.layout, self.segments, self.implementation = layout, segments, implementation
        self.clip_norm, self.workers, self.mode = clip_norm, workers, mode
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.values = FlatTensor(self.layout, self.segments)
        self.optimizers: list[torch.optim.Optimizer | None] = []
        self.parameters = [[torch.nn.Parameter(view) for view in views] for views in self.values.views]
        for segment, parameters in zip(self.segments, self.parameters, strict=True):
            if segment.group == AVERAGE:
                self.optimizers.append(None)
                continue
            settings = self.layout.groups[segment.group]
            self.optimizers.append(build(self.layout.optimizer, parameters, settings, self.implementation))

    def combine(self, pushes: Sequence[Push]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The gradient of the mean loss: sums added up in the order given, as one process adds micro-batches up."""
        notes = [push.note for push in pushes]
        segment = self.segments[pushes[0].segment]
        pieces = range(len(segment.pieces))
        absent = [number for number in pieces if all(number in note["absent"] for note in notes)]
        weight = sum(note["weight"] for note in notes)
        total: torch.Tensor = pushes[0].payload
        if segment.group == AVERAGE:
            self._average(segment, pushes, total)
        elif len(pushes) > 1 or not notes[0]["flags"] & MEAN:
            for push in pushes:
                if push.note["flags"] & MEAN:
                    push.payload.mul_(push.note["weight"])
            for push in pushes[1:]:
                total.add_(push.payload)
            if weight:
                torch._foreach_mul_([total], torch.tensor(weight, dtype=torch.float64).reciprocal())
        flags = STOPPING if any(note["flags"] & STOPPING for note in notes) else 0
        loss = sum(note["loss"] for note in notes)
        facts = {"loss": float(loss), "weight": float(weight), "flags": flags, "absent": absent}
        return total, {**facts, "settings": notes[0]["settings"]}

    def _average(self, segment: Segment, pushes: Sequence[Push], total: torch.Tensor) -> None:
        """The mean over the workers whose forward passes changed a buffer."""
        views = [pieces_of(push.payload, segment) for push in pushes]
        for number, view in enumerate(pieces_of(total, segment)):
            changed = [
                own[number] for own, push in zip(views, pushes, strict=True) if number not in push.note["absent"]
            ]
            if changed:
                view.copy_(torch.stack([one.double() for one in changed]).mean(0))

    def measure(self, updates: Sequence[Update]) -> float:
        """The squared norm of this range's gradient."""
        total = torch.zeros((), dtype=torch.float64)
        for update in updates:
            segment = self.segments[update.segment]
            if segment.group == AVERAGE or self.clip_norm is None:
                continue
            for number, view in enumerate(pieces_of(update.payload, segment)):
                if number not in update.note["absent"]:
                    total += square_norm(view)
        return float(total) if torch.isfinite(total) else float("inf")

    def finish(self, update: Update, partials: Sequence[float]) -> Update:
        """The gradient, clipped by the norm of all ranges together."""
        norm = torch.tensor(sum(partials), dtype=torch.float64).sqrt()
        if self.clip_norm is None:
            return update
        if self.segments[update.segment].group != AVERAGE and torch.isfinite(norm):
            torch._foreach_mul_([update.payload], (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        number = float(norm) if torch.isfinite(norm) else float("inf")
        return dataclasses.replace(update, note={**update.note, "norm": number})

    def apply(self, update: Update) -> None:
        """The optimizer's step on one segment. A batch that weighs nothing, or a norm without end, changes nothing."""
        note, number = update.note, update.segment
        if not note["weight"] or note.get("norm") == float("inf"):
            return
        optimizer, parameters = self.optimizers[number], self.parameters[number]
        pieces = pieces_of(update.payload, self.segments[number])
        with torch.no_grad():
            if optimizer is None:
                part = 1.0 if self.mode.is_by_rounds else 1 / self.workers
                for index, (parameter, view) in enumerate(zip(parameters, pieces, strict=True)):
                    if index not in note["absent"]:
                        parameter.lerp_(view, part) if part < 1 else parameter.copy_(view)
                return
            for index, (parameter, view) in enumerate(zip(parameters, pieces, strict=True)):
                parameter.grad = None if index in note["absent"] else view
            set_group(optimizer, note["settings"], update.share)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None

    def read(self) -> torch.Tensor:
        """The parameters. Under sync nobody applies anything before all have read; otherwise they are copied."""
        return self.values.memory if self.mode.kind == "sync" else self.values.memory.clone()

    def content(self) -> bytes:
        """Parameters and optimizer state, as safetensors."""
        tensors = {f"value/{number}": whole for number, whole in enumerate(self.values.whole)}
        for number, optimizer in enumerate(self.optimizers):
            for index, parameter in enumerate(self.parameters[number]):
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"state/{number}/{index}/{key}"] = value.detach().contiguous()
        # Cloned: safetensors refuses tensors that share memory, as the segments of a range do.
        return save({name: tensor.clone() for name, tensor in tensors.items()})

    def restore(self, content: bytes) -> None:
        """Take over what `content` gave.

        Raises:
            CheckpointError: it is not of this range.
        """
        try:
            tensors = load(bytes(content))
            self.clear()
            for number, whole in enumerate(self.values.whole):
                value = tensors.pop(f"value/{number}")
                if value.dtype != whole.dtype or value.shape != whole.shape:
                    raise KeyError(f"a segment of {tuple(value.shape)} where {tuple(whole.shape)} are")
                whole.copy_(value)
            for name, value in tensors.items():
                segment, piece, key = _place_of_state(name)
                optimizer, parameter = self.optimizers[segment], self.parameters[segment][piece]
                if value.numel() != 1 and value.shape != parameter.shape:
                    raise KeyError(f"{key} of {tuple(value.shape)} where {tuple(parameter.shape)} are")
                if optimizer is not None:
                    optimizer.state[parameter][key] = value
        except (safetensors.SafetensorError, KeyError, ValueError, IndexError) as error:
            raise CheckpointError(
                "the state of a range of parameters", f"it can't be read ({error})", "report this, with both versions"
            ) from None


def _place_of_state(name: str) -> tuple[int, int, str]:
    """Segment, piece and key of `state/SEGMENT/PIECE/KEY`.

    Raises:
        ValueError: the name is another.
    """
    _, segment, piece, key = name.split("/")
    numbers = parse_whole(segment), parse_whole(piece)
    if numbers[0] is None or numbers[1] is None:
        raise ValueError(f"a name {shown(name)}")
    return numbers[0], numbers[1], key


def first_content(
    layout: ServerLayout,
    segments: Sequence[Segment],
    tensors: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
) -> bytes:
    """What a worker hands to the servers at the start: a range of its parameters, and of its optimizer's state.

    Args:
        layout: of the job.
        segments: of the range.
        tensors: by entry.
        states: by entry; empty before the first step.
    """
    flat = FlatTensor(layout, segments)
    flat.gather(tensors)
    packed = {f"value/{number}": whole.clone() for number, whole in enumerate(flat.whole)}
    for number, segment in enumerate(segments):
        for index, piece in enumerate(segment.pieces):
            for key, value in states[piece.entry].items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                if tensor.numel() > 1 or tuple(tensor.shape) == layout.entries[piece.entry].shape != ():
                    tensor = tensor.reshape(-1)[piece.start : piece.start + piece.count]
                packed[f"state/{number}/{index}/{key}"] = tensor.detach().clone()
    return save(packed)


def states_of(
    layout: ServerLayout, ranges: Sequence[Sequence[Segment]], contents: Sequence[bytes]
) -> list[dict[str, Any]]:
    """By entry the optimizer's state, put together from what the servers gave.

    Raises:
        CheckpointError: that is something else.
    """
    try:
        return _states_of(layout, ranges, contents)
    except (safetensors.SafetensorError, KeyError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            "the optimizer's state on the servers", f"it can't be read ({error})", "report this, with both versions"
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
            if value.numel() != piece.count or (value.dim() == 0 and entry.shape != ()):
                states[piece.entry][key] = value
                continue
            whole = states[piece.entry].setdefault(key, torch.zeros(entry.numel, dtype=value.dtype))
            whole.view(-1)[piece.start : piece.start + piece.count] = value
            states[piece.entry][key] = whole.view(entry.shape) if piece.start + piece.count == entry.numel else whole
    return states
