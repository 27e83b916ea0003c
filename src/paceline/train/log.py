"""What the loop logs by itself: numbers over all ranks, and texts, as events of the job; pictures are in `pictures`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.parts import shown

PREFIX = "logged_"
_RESERVED = ("event", "step", "epoch", "at")  # fields that every such event has
_LONGEST_NAME = 200
_MOST_TEXT = 100_000  # characters


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
        values: by name, a number, or a sum and its weight.
        comm: all ranks.
        device: of the sums.

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
    """Return a text that can be encoded.

    Raises:
        UsageError: it is none, or too long.
    """
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        found = f"it has {len(text):,} characters" if isinstance(text, str) else f"it is {shown(text)}"
        raise UsageError(f"can't log {name!r} as text", found, f"write a str of at most {_MOST_TEXT:,} characters")
    return text.encode("utf-8", "replace").decode()  # half a character, of bytes read as text, fits in no file
