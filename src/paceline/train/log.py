"""What the loop logs by itself: numbers over all ranks, text and pictures, as events of the job."""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.parts import shown

PICTURES = "pictures"  # a folder of the run directory
_RESERVED = ("event", "step", "epoch", "at")  # fields that every such event has
_LONGEST_NAME = 200
_MOST_TEXT = 100_000  # characters


def field_of(name: str) -> str:
    """Return the field of the event `logged` that has a number of this name."""
    return f"logged_{name}" if name in _RESERVED else name


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


def reduced(values: Mapping[str, Any], comm: AxisComm) -> dict[str, float]:
    """Return numbers over all ranks. Collective.

    Args:
        values: by name, a number, or a sum and its weight.
        comm: all ranks.

    Raises:
        UsageError: a value is neither; or a name is none.
        WorkloadError: ranks have other names.
    """
    pairs = {checked_name(name): _pair(name, value) for name, value in values.items()}
    names = sorted(pairs)
    _check_same_names(names, comm)
    if not names:
        return {}
    table = torch.stack([pairs[name] for name in names])  # (names, 2)
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
        if value.numel() != 1 or value.is_complex():
            return None
        value = value.detach()  # a loss may be logged as it is
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _check_same_names(names: list[str], comm: AxisComm) -> None:
    """Raise WorkloadError on every rank unless all have the same names. Collective."""
    if comm.size == 1:
        return
    text = "\n".join(["", *names]) or "\n"  # torch.frombuffer takes no empty buffer
    gathered = comm.all_gather(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    rows = [bytes(row.tolist()).decode().strip("\n") for row in gathered]
    for rank, row in enumerate(rows):
        if row != rows[0]:
            here, there = (each.replace("\n", ", ") or "nothing" for each in (rows[0], row))
            raise WorkloadError(
                "job.log should get the same names on every rank",
                f"rank {comm.peers[0]} logs {here}, and rank {comm.peers[rank]} logs {there}",
                "call it on every rank, with (0, 0) where a rank has nothing to add",
            )


def checked_text(name: str, text: Any) -> str:
    """Return a text.

    Raises:
        UsageError: it is none, or too long.
    """
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        found = f"it has {len(text):,} characters" if isinstance(text, str) else f"it is {shown(text)}"
        raise UsageError(f"can't log {name!r} as text", found, f"write a str of at most {_MOST_TEXT:,} characters")
    return text


def write_picture(name: str, picture: Any, step: int, run_dir: Path | None) -> Path:
    """Write a picture as a PNG file; return its path.

    Args:
        name: of the picture.
        picture: a figure of matplotlib, an image of Pillow, or an array or tensor: (H, W), (H, W, 3) or (H, W, 4), of
            uint8, or of numbers from 0 to 1.
        step: to which it belongs.
        run_dir: of the job; a temporary folder where None.

    Raises:
        UsageError: it is none of these, or Pillow is missing.
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-pictures-")) if run_dir is None else run_dir / PICTURES
    folder.mkdir(exist_ok=True)
    path = folder / f"{_file_name(name)}-{step:08}.png"
    if hasattr(picture, "savefig"):
        picture.savefig(path, format="png")
    elif hasattr(picture, "save") and hasattr(picture, "mode"):
        picture.save(path, format="PNG")
    else:
        _image_of(name, picture).save(path, format="PNG")
    return path


def _file_name(name: str) -> str:
    """Return a name without what a path can't have; other names give other ones."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-")
    return plain if plain == name else f"{plain or 'picture'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _image_of(name: str, picture: Any) -> Any:
    """Return an array as an image of Pillow."""
    try:
        from PIL import Image
    except ImportError:
        fix = "pip install pillow, or hand in a figure of matplotlib"
        raise UsageError(f"can't log {name!r} as a picture", "Pillow is not installed", fix) from None
    values = torch.as_tensor(picture).detach().cpu() if hasattr(picture, "shape") else None
    if values is None or not _is_picture(values.shape):
        found = f"it is {shown(picture)}" if values is None else f"its shape is {tuple(values.shape)}"
        fix = "hand in a figure of matplotlib, an image of Pillow, or an array of height, width and 3 or 4 channels"
        raise UsageError(f"can't log {name!r} as a picture", found, fix)
    if values.dtype != torch.uint8:
        values = (values.double().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(values.numpy())


def _is_picture(shape: torch.Size) -> bool:
    return 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4)))
