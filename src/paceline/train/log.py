"""What the loop logs by itself: numbers over all ranks and texts, as events of the job, and pictures, as PNG files."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.torch_private.operations import FakeTensor
from paceline.train.event_log import Events

PREFIX = "logged_"
_RESERVED = ("event", "step", "epoch", "at")  # fields that every such event has
_LONGEST_NAME = 200
_MOST_TEXT = 100_000  # characters
FOLDER = "pictures"  # of the run directory
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of pictures that PNG has; Pillow writes no others


class JobLog:
    """Writes to a job's events and sinks what its loop logs, until the job is closed.

    Args:
        events: the events of the job.
        run_dir: the run directory, for pictures; None: there is none.
    """

    def __init__(self, events: Events, run_dir: Path | None) -> None:
        self.events = events
        self.pictures = Pictures(run_dir)
        self.closed_step: int | None = None

    def check_open(self, call: str) -> None:
        """Raise UsageError once events and sinks have ended."""
        if self.closed_step is not None:
            raise UsageError(
                f"{call} writes to the job's events and sinks",
                f"they have ended: job.close() ended the job after step {self.closed_step}",
                f"call {call} before job.close()",
            )

    def numbers(self, values: Mapping[str, Any], comm: AxisComm, device: torch.device, step: int) -> dict[str, float]:
        """Write numbers over all ranks, and return them. Collective; arguments and errors are those of `reduced`."""
        numbers = reduced(values, comm, device)
        if numbers:
            fields = {field_of(name): number for name, number in numbers.items()}
            self.events.write({"event": "logged", "step": step, **fields})
        return numbers

    def text(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        event = {"event": "text", "name": checked_name(name), "text": checked_text(name, text)}
        self.events.write({**event, "step": step})

    def picture(self, name: str, picture: Any, step: int, notice: Callable[[str], None]) -> None:
        """Write a picture, or say by `notice` why it can't be."""
        checked_name(name)
        if not self.events.is_open:
            return
        try:
            path = self.pictures.write(name, picture, step)
        except OSError as error:  # a full disk ends no training
            notice(f"the picture {name!r} of step {step} can't be written ({error.strerror})")
            return
        self.events.write({"event": "picture", "name": name, "path": path, "step": step})

    def close(self, step: int) -> None:
        """Close events, sinks and pictures: the job has ended after a step."""
        self.closed_step = step
        self.events.close()
        self.pictures.close()


def field_of(name: str) -> str:
    """Return the field of the event `logged` that has a number of this name."""
    # Names that have the prefix get it too, so that taking it off gives the name.
    return f"{PREFIX}{name}" if name in _RESERVED or name.startswith(PREFIX) else name


def checked_name(name: Any) -> str:
    """Return a name.

    Raises:
        UsageError: it is no text, empty, too long, or has characters that don't print.
    """
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(
            "what is logged has a name",
            f"it is {shown(name)}",
            f"write a text of 1 to {_LONGEST_NAME} printable characters, such as 'accuracy' or 'held out/accuracy'",
        )
    return name


def no_names(values: Any) -> UsageError:
    """Return the error of values without names."""
    return UsageError(
        "job.log takes numbers by their names",
        f"it is {shown(values)}",
        "write job.log(accuracy=0.9), or a dict: job.log({'held out/accuracy': 0.9})",
    )


def reduced(values: Mapping[str, Any], comm: AxisComm, device: torch.device) -> dict[str, float]:
    """Return numbers over all ranks. Collective.

    Args:
        values: the values by name: a number, or a sum and its weight.
        comm: the communicator of all ranks.
        device: the device of the sums.

    Raises:
        UsageError: a value is neither; or a name is none.
        WorkloadError: ranks have other names.
    """
    names = sorted(map(checked_name, values))
    _check_same_names(names, comm)
    if not names:
        return {}
    table = torch.stack([_pair(name, values[name]) for name in names]).to(device)  # (names, 2)
    comm.all_reduce(table)
    return {
        name: total / weight if weight else math.nan
        for name, (total, weight) in zip(names, table.tolist(), strict=True)
    }


def _pair(name: str, value: Any) -> torch.Tensor:
    """Return sum and weight in float64; a number counts once on each rank."""
    parts = value if isinstance(value, tuple | list) else (value, 1)
    numbers = [_number(part) for part in parts]
    if len(numbers) != 2 or None in numbers:
        raise UsageError(
            f"can't log {name!r}",
            f"it is {shown(value)}",
            "write a number, or a sum and its weight, which are added up over the ranks and divided: "
            f"job.log({_as_keyword(name)}=((predictions == labels).sum(), len(labels))); "
            "text goes to job.log_text, a picture to job.log_picture",
        )
    return torch.tensor(numbers, dtype=torch.float64)


def _as_keyword(name: str) -> str:
    return name if name.isidentifier() else "name"


def _number(value: Any) -> float | None:
    """Return a number, a tensor's or numpy's of one element too; None for what is none."""
    if isinstance(value, str | bytes | complex):
        return None
    if isinstance(value, FakeTensor):  # `paceline plan` goes through the loop without values
        return math.nan
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            return None
        value = value.detach()  # a loss may be logged as it is
        if hasattr(value, "full_tensor"):  # a parameter of which one rank has the element; all ranks are here
            value = value.full_tensor()
    elif getattr(value, "size", 0) == 1 and hasattr(value, "item"):  # numpy's
        value = value.item()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _check_same_names(names: list[str], comm: AxisComm) -> None:
    """Raise WorkloadError on every rank unless all have the same names. Collective."""
    if comm.size == 1:
        return
    rows = comm.all_gather_text("\n".join(names))
    for rank, row in enumerate(rows):
        if row != rows[0]:
            of_first, of_rank = (names_of_rank.replace("\n", ", ") or "nothing" for names_of_rank in (rows[0], row))
            raise WorkloadError(
                "job.log should get the same names on every rank",
                f"rank {comm.peers[0]} logs {of_first}, and rank {comm.peers[rank]} logs {of_rank}",
                "call it on every rank, with (0, 0) where a rank has nothing to add",
            )


def checked_text(name: str, text: Any) -> str:
    """Return a text that can be encoded.

    Raises:
        UsageError: it is none, or too long.
    """
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        found = f"it has {len(text):,} characters" if isinstance(text, str) else f"it is {shown(text)}"
        raise UsageError(f"can't log {name!r} as text", found, f"write a str of at most {_MOST_TEXT:,} characters")
    return text.encode("utf-8", "replace").decode()  # half a character, of bytes read as text, fits in no file


class Pictures:
    """The pictures of a job.

    Args:
        run_dir: the run directory of the job. None: they are in a temporary folder until `close`.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir
        self.temporary: tempfile.TemporaryDirectory[str] | None = None

    def write(self, name: str, picture: Any, step: int) -> str:
        """Write a picture as a PNG file; return its path, in the run directory where there is one.

        Args:
            name: the name of the picture.
            picture: a figure of matplotlib, an image of Pillow, or an array or tensor: (H, W), (H, W, 3) or (H, W, 4),
                of uint8, or of numbers from 0 to 1.
            step: the step to which it belongs.

        Raises:
            UsageError: it is none of these, or Pillow is missing.
            OSError: it can't be written; nothing is left of it.
        """
        write = _writer_of(name, picture)
        folder = self._folder()
        path = folder / f"{_file_name(name)}-{step:08}.png"
        # Whoever looks sees a whole picture: under another name until it is.
        unfinished = path.with_suffix(".unfinished")
        try:
            write(unfinished)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return str(path if self.run_dir is None else path.relative_to(self.run_dir))

    def close(self) -> None:
        """Remove the temporary folder; what is in a run directory stays."""
        if self.temporary is not None:
            self.temporary.cleanup()
            self.temporary = None

    def _folder(self) -> Path:
        if self.run_dir is not None:
            folder = self.run_dir / FOLDER
            folder.mkdir(exist_ok=True)
            return folder
        if self.temporary is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="paceline-pictures-", ignore_cleanup_errors=True)
        return Path(self.temporary.name)


def _writer_of(name: str, picture: Any) -> Any:
    """Return a function of a path that writes the picture there."""
    if hasattr(picture, "savefig"):
        return lambda path: picture.savefig(path, format="png")
    image = picture
    if not (hasattr(picture, "save") and hasattr(picture, "mode")):
        image = _image_of(name, picture)
    elif image.mode == "F":
        image = _image_of(name, _values_of(image))
    elif image.mode not in _MODES:
        image = image.convert("RGB")
    return lambda path: image.save(path, format="PNG")


def _file_name(name: str) -> str:
    """Return a name without what a path can't have; other names give other ones."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-")
    return plain if plain == name else f"{plain or 'picture'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _values_of(picture: Any) -> torch.Tensor | None:
    """Return an array's values; None for what is none, or has none that can be drawn."""
    if isinstance(picture, torch.Tensor):
        return picture.detach().cpu()
    import numpy as np

    values = np.array(picture)  # a copy: one that can be written to, in order
    return torch.from_numpy(values) if values.dtype.kind in "biuf" and values.dtype.itemsize <= 8 else None


def _image_of(name: str, picture: Any) -> Any:
    """Return an array as an image of Pillow."""
    try:
        from PIL import Image
    except ImportError:
        fix = "pip install pillow, or hand in a figure of matplotlib"
        raise UsageError(f"can't log {name!r} as a picture", "Pillow is not installed", fix) from None
    values = _values_of(picture) if hasattr(picture, "shape") else None
    found = None
    if values is None:
        found = f"it is {shown(picture)}"
    elif not _is_picture(values.shape):
        found = f"its shape is {tuple(values.shape)}"
    elif values.is_complex():
        found = "its numbers are complex"
    elif not values.is_floating_point() and values.dtype != torch.uint8 and (values.min() < 0 or values.max() > 1):
        found = f"it has whole numbers of {values.dtype} from {values.min()} to {values.max()}"
    if found:
        fix = "hand in a figure of matplotlib, an image of Pillow, or an array of uint8, or of numbers from 0 to 1, of "
        raise UsageError(f"can't log {name!r} as a picture", found, f"{fix}height and width, and 3 or 4 channels")
    assert values is not None
    if values.dtype != torch.uint8:
        values = (values.double().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(values.numpy())


def _is_picture(shape: torch.Size) -> bool:
    return 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4)))
