"""Read the events that a job and its servers' coordinator write, one line of JSON each; docs/events.md lists a job's.

An event that is yielded has the fields of its kind in their types. Fields that are not known may have any.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.nouns.errors import ReadError
from paceline.nouns.reading import COUNT, LONGEST_LINE, NUMBER, Form, fault_of, lines_of, parse_json, regular

_LONGEST_KIND = 100  # characters
_OF_ANY = {"at?": float, "step?": (COUNT, None), "epoch?": NUMBER}
_NAMED = {"name?": str, "path?": str, "found?": str, "url?": str, "seconds?": float}
# Required is what a reader can't do without: jobs of before version 1 lack some fields.
_FORMS: dict[str, dict[str, Form]] = {
    "start": {"total_steps": COUNT, "world_size?": COUNT, "restart?": COUNT, "takes_over?": bool},
    "own_batches": {"total_steps": COUNT},
    "step": {
        "step": COUNT, "position": COUNT, "samples": COUNT, "loss": NUMBER, "at": float, "memory_bytes": COUNT,
        "seconds?": (NUMBER, None), "weight?": (NUMBER, None), "sent_bytes?": (NUMBER, None),
        "gradient_norm?": (NUMBER, None), "loss_scale?": (NUMBER, None),
    },
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


def events_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in a file; nothing where it can't be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            for line in lines_of(file):
                yield from decoded(line)
    except OSError:
        return
