"""Read the events that a job and its servers' coordinator write, one line of JSON each; docs/events.md lists a job's.

An event that is yielded has the fields of its kind in their types. Fields that are not known may have any.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError
from paceline.nouns.reading import (
    COUNT,
    LARGEST,
    LONGEST_LINE,
    NUMBER,
    Form,
    LineFollower,
    fault_of,
    lines_backwards,
    parse_json,
)
from paceline.nouns.step_record import StepRecord

_LONGEST_KIND = 100  # characters
_KIND = re.compile(rb'\{"event": ?"(\w+)"')  # as a job writes its events
_OF_ANY = {"at?": float, "step?": (COUNT, None), "epoch?": NUMBER}
_NOT_NUMBERS = ("event", "step", "epoch", "at")
_OF_EVERY_STEP = ("step", "position", "samples", "loss", "memory_bytes")
_NAMED = {"name?": str, "path?": str, "found?": str, "url?": str, "seconds?": float}


def _form_of_step() -> dict[str, Form]:
    """Return the form of the event `step`, which is a StepRecord and the time at which it was written."""
    form: dict[str, Form] = {"at": float}
    for field in fields(StepRecord):
        kind = COUNT if field.type == "int" else NUMBER
        if field.name in _OF_EVERY_STEP:
            form[field.name] = kind
        else:
            form[f"{field.name}?"] = (kind, bool, None) if field.type == "bool" else (kind, None)
    return form


# Required is what a reader can't do without: jobs of before version 1 lack some fields.
_FORMS: dict[str, dict[str, Form]] = {
    "start": {"total_steps": COUNT, "world_size?": COUNT, "restart?": COUNT, "takes_over?": bool},
    "own_batches": {"total_steps": COUNT},
    "step": _form_of_step(),
    "checkpoint": {**_NAMED, "path": str, "removed?": [str]},
    "copied": {**_NAMED, "path": str, "url": str},
    "resumed": {"step": COUNT, "position": COUNT, "path?": str, "takes_over?": bool},
    "stopped": {"asked?": [COUNT]},
    "evaluation": {"step": COUNT},
    "text": {"name?": str, "text?": str},
    "end": {"ledger?": list},
    # Of parameter servers.
    "servers_started": {"mode": str},
    "coordinator_back": {"mode": str},
    "waiting": {"worker": COUNT, "step": COUNT, "silent_s": NUMBER, "is_connected": bool},
    "back": {"worker": COUNT, "waited_s": NUMBER},
    "left_out": {"worker": COUNT},
    "joined_again": {"worker": COUNT},
    "given_up": {"pid": COUNT, "silent_s": NUMBER, "worker?": COUNT, "rank?": COUNT},
    "notice": {"text": str},
    "servers_ended": {"counted": (COUNT, None), "gradients": COUNT},
}  # fmt: skip
_FORMS |= dict.fromkeys(("saved", "checkpoint_failed", "copy_failed", "picture"), _NAMED)
FORMS = {kind: {**_OF_ANY, **form} for kind, form in _FORMS.items()}


def decoded(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events in lines of JSON; a line that is none, such as one that a full disk cut off, is left out."""
    for line in content.splitlines():
        if len(line) > LONGEST_LINE:
            continue
        try:
            event = parse_json(line, "an event", dict)
        except ReadError:
            continue
        kind = event.get("event")
        if not isinstance(kind, str) or len(kind) > _LONGEST_KIND:
            continue
        if fault_of(event, FORMS.get(kind, _OF_ANY)) is None:
            yield event


def events_after(follower: LineFollower) -> Iterator[dict[str, Any]]:
    """Yield the events that have been written since a follower has read last; nothing where there is no file yet."""
    try:
        for _, line in follower.lines():
            yield from decoded(line)
    except OSError:
        return


def newest_first(path: Path, kinds: Container[str] = (), most_bytes: int = LARGEST) -> Iterator[dict[str, Any]]:
    """Yield the events in a file, the last one first; nothing where it can't be read.

    Args:
        path: the path of the file.
        kinds: the kinds of events that are wanted; empty: all.
        most_bytes: the largest number of bytes that are read, from the file's end.
    """
    for line in lines_backwards(path, most_bytes):
        kind = kind_of(line)
        if not kinds or not kind or kind in kinds:
            yield from (event for event in decoded(line) if not kinds or event["event"] in kinds)


def kind_of(line: bytes) -> str:
    """Return the kind of the event in a line without decoding it; "" where the line does not begin with it."""
    kind = _KIND.match(line)
    return "" if kind is None else kind[1].decode()


def numbers_in(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event `evaluation` or `logged`, by name."""
    return {
        name: value
        for name, value in event.items()
        if name not in _NOT_NUMBERS and isinstance(value, int | float) and not isinstance(value, bool)
    }
