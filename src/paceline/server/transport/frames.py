"""The wire format of messages: a prefix of 20 bytes, a msgpack header with a strict schema, raw bytes.

Nothing is unpickled, and nothing is allocated before it is known to be of a size that this message may have.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from paceline.server import setup
from paceline.server.protocol import messages

MAGIC, VERSION = b"PCLN", 1
PREFIX = struct.Struct("<4sBBHIQ")  # magic, version, kind, range, bytes of header and payload
# The most bytes of a header, by kind of message, then of a payload. A length is checked against its bound before memory
# is taken up for it: a stranger's length is no reason to allocate.
HELLO_BYTES = 2**12  # before the sender is known
HEADER_BYTES = 2**16
LONG_HEADER_BYTES = 2**24  # of those that list every segment or worker
LAYOUT_BYTES = 2**26  # of a payload: a name, shape and dtype for each parameter
STATUS_BYTES = 2**22  # of a payload
MAX_COUNT = 2**53


class FrameError(Exception):
    """A peer sent something that is no frame of this protocol: its connection is closed."""


class Prefix(NamedTuple):
    """The first 20 bytes of a frame."""

    kind: int
    key_range: int
    header_bytes: int
    payload_bytes: int


class Codec(NamedTuple):
    """The functions that pack a field, and that check and unpack what came."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class MessageFormat(NamedTuple):
    """A message's class, its fields' codecs, the largest header, and whether raw bytes follow as its last field."""

    kind: type
    codecs: tuple[Codec, ...]
    header_bytes: int = HEADER_BYTES
    has_payload: bool = False


def read_prefix(content: bytes | bytearray | memoryview) -> Prefix:
    """Read the first bytes of a frame.

    Raises:
        FrameError: it is none, of another version, of no kind, or longer than its kind may be.
    """
    magic, version, kind, number, header_bytes, payload_bytes = PREFIX.unpack(content)
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"it begins with {bytes(magic)!r}, version {version}")
    form = FORMS.get(kind)
    if form is None:
        raise FrameError(f"there is no message of kind {kind}")
    if header_bytes > form.header_bytes or (payload_bytes and not form.has_payload):
        raise FrameError(f"a {form.kind.__name__} of {header_bytes} and {payload_bytes} bytes")
    return Prefix(kind, number, header_bytes, payload_bytes)


def read_header(prefix: Prefix, content: bytes | bytearray | memoryview) -> Any:
    """Read the message, with None for its payload.

    Raises:
        FrameError: its header is not what its kind's should be.
    """
    form = FORMS[prefix.kind]
    try:
        # A list of values without names: the codecs say what stands at each place.
        fields = msgpack.unpackb(content, use_list=True, strict_map_key=True, raw=False)
    except Exception as error:  # msgpack raises ValueError, and classes of its own
        raise FrameError(f"a {form.kind.__name__} whose header is no msgpack: {error}") from None
    if not isinstance(fields, list) or len(fields) != len(form.codecs):
        raise FrameError(f"a {form.kind.__name__} with other fields")
    values = [codec.unpack(value) for codec, value in zip(form.codecs, fields, strict=True)]
    if form.has_payload and form.kind is not messages.Forward:  # a Forward's payload is in its update
        values.append(None)
    return form.kind(*values)


def with_payload(message: Any, payload: Any) -> Any:
    """Return a message that was read, with its raw bytes."""
    if isinstance(message, messages.Forward):
        return dataclasses.replace(message, update=dataclasses.replace(message.update, payload=payload))
    return dataclasses.replace(message, **{_last_field(message): payload})


def write_frame(number: int, message: Any, payload_bytes: int) -> bytes:
    """Return prefix and header of a message about range `number`."""
    kind = KINDS[type(message)]
    form = FORMS[kind]
    packed: list[Any] = []
    for codec, name in zip(form.codecs, type(message).__slots__, strict=False):  # the payload has no codec
        packed.append(codec.pack(getattr(message, name)))
    header: bytes = msgpack.packb(packed, use_bin_type=True)
    return PREFIX.pack(MAGIC, VERSION, kind, number, len(header), payload_bytes) + header


def payload_of(message: Any) -> Any:
    """Return what follows the header: the message's last field; None where nothing does."""
    if not FORMS[KINDS[type(message)]].has_payload:
        return None
    if isinstance(message, messages.Forward):
        return message.update.payload
    return getattr(message, _last_field(message))


def _last_field(message: Any) -> str:
    return str(list(type(message).__slots__)[-1])


def _refuse(what: str, value: Any) -> FrameError:
    return FrameError(f"{value!r:.60} where {what} should be")


def _int(value: Any) -> int:
    # `type`, not isinstance: True is an int to isinstance. -1 stands for none, as in versions, nodes and clocks.
    if type(value) is not int or not -1 <= value < MAX_COUNT:
        raise _refuse("a count", value)
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _refuse("true or false", value)
    return value


def _float(value: Any) -> float:
    # Infinity may come: it is the norm of a gradient that is not finite.
    if type(value) is not float or math.isnan(value):
        raise _refuse("a number", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _refuse("a text", value)
    return value


def _list(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise _refuse("a list", value)
    return value


def _worker(value: Any) -> tuple[int, int]:
    name, incarnation = _list(value, 2)
    return _int(name), _int(incarnation)


def _ints(value: Any) -> list[int]:
    return [_int(item) for item in _list(value)]


def _nodes(value: Any) -> tuple[int, ...]:
    return tuple(_ints(value))


def _clocks(value: Any) -> dict[tuple[int, int], int]:
    entries = [_list(item, 3) for item in _list(value)]
    clocks: dict[tuple[int, int], int] = {}
    for name, incarnation, clock in entries:
        worker = (_int(name), _int(incarnation))
        clocks[worker] = _int(clock)
    return clocks


def _pack_clocks(clocks: Any) -> list[Any]:
    return [[*worker, clock] for worker, clock in clocks.items()]


def _pushes(value: Any) -> tuple[tuple[tuple[int, int], int], ...]:
    return tuple(_clocks(value).items())


def _pack_pushes(pushes: Any) -> list[Any]:
    return _pack_clocks(dict(pushes))


def _applied(value: Any) -> dict[int, dict[tuple[int, int], int]]:
    # Segments are numbered from 0 without gaps, so their numbers are not sent.
    return {segment: _clocks(clocks) for segment, clocks in enumerate(_list(value))}


def _pack_applied(applied: Any) -> list[Any]:
    return [_pack_clocks(applied[segment]) for segment in sorted(applied)]


def _rounds(value: Any) -> dict[int, int]:
    return dict(enumerate(_ints(value)))


def _pack_rounds(rounds: Any) -> list[Any]:
    return [rounds[segment] for segment in sorted(rounds)]


def _joining(value: Any) -> tuple[int, int] | None:
    return None if value is None else _worker(value)


def _pack_joining(joining: Any) -> list[Any] | None:
    return None if joining is None else list(joining)


def _partials(value: Any) -> dict[int, float]:
    partials: dict[int, float] = {}
    for pair in _list(value):
        number, partial = _list(pair, 2)
        partials[_int(number)] = _float(partial)
    return partials


def _pack_partials(partials: Any) -> list[Any]:
    return [[number, float(partial)] for number, partial in partials.items()]


def _settings(value: Any) -> dict[str, Any]:
    if type(value) is not dict or any(type(key) is not str for key in value):
        raise _refuse("an optimizer's settings", value)
    # Values reach a torch optimizer's groups. Lists are tuples there, such as betas.
    for setting in value.values():
        numbers = setting if type(setting) is list else [setting]
        for number in numbers:
            if type(number) not in (int, float, bool, type(None)):
                raise _refuse("an optimizer's setting", number)
    return value


_NOTE: dict[str, Callable[[Any], Any]] = {
    "loss": _float,
    "weight": _float,
    "flags": _int,
    "norm": _float,
    "counted": _int,
    "absent": _ints,
    "settings": _settings,
}
_OF_GRADIENT = {"loss", "weight", "flags", "absent", "settings"}  # what a store can't do without


def _note(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    # Also keys are bounded: replicas keep and forward the note.
    if type(value) is not dict or not value.keys() <= _NOTE.keys():
        raise _refuse("a push's note", value)
    return {key: _NOTE[key](item) for key, item in value.items()}


def _note_of_gradient(value: Any) -> dict[str, Any]:
    note = _note(value)
    if note is None or not note.keys() >= _OF_GRADIENT:
        raise _refuse("a gradient's note", value)
    return note


def _same(value: Any) -> Any:
    return value


INT = Codec(_same, _int)
BOOL = Codec(_same, _bool)
FLOAT = Codec(_same, _float)
TEXT = Codec(_same, _text)
WORKER = Codec(list, _worker)
NODES = Codec(list, _nodes)
NOTE = Codec(_same, _note)
NOTE_OF_GRADIENT = Codec(_same, _note_of_gradient)
CLOCKS = Codec(_pack_clocks, _clocks)
PUSHES = Codec(_pack_pushes, _pushes)
APPLIED = Codec(_pack_applied, _applied)
ROUNDS = Codec(_pack_rounds, _rounds)
JOINING = Codec(_pack_joining, _joining)
PARTIALS = Codec(_pack_partials, _partials)


def _pack_update(update: messages.Update) -> list[Any]:
    pushes = PUSHES.pack(update.pushes)
    return [update.segment, pushes, update.note, float(update.share), float(update.partial)]


def _update(value: Any) -> messages.Update:
    segment, pushes, note, share, partial = _list(value, 5)
    # The payload is None until the bytes after the header have come: see `with_payload`.
    return messages.Update(
        _int(segment), _pushes(pushes), _note_of_gradient(note), None, _float(share), _float(partial)
    )


UPDATE = Codec(_pack_update, _update)

# A message's number on the wire is its place in this list, so a new one goes to its end; its fields have no names
# there.
_CONFIGURATION = (INT, NODES, CLOCKS, JOINING, INT, NODES)
_LIST: tuple[MessageFormat, ...] = (
    MessageFormat(setup.Hello, (TEXT, INT, INT, TEXT, TEXT), HELLO_BYTES, has_payload=True),
    MessageFormat(setup.Welcome, (INT, INT)),
    MessageFormat(setup.StartServers, (TEXT,), has_payload=True),
    MessageFormat(setup.Addresses, (TEXT,), LONG_HEADER_BYTES),
    MessageFormat(setup.Install, (NODES,), has_payload=True),
    MessageFormat(setup.Installed, (INT,)),
    MessageFormat(setup.ReadState, (INT,)),
    MessageFormat(setup.StateRead, (INT,), has_payload=True),
    MessageFormat(setup.Refused, (TEXT, TEXT, TEXT, TEXT)),
    MessageFormat(setup.AskStatus, (WORKER,)),
    MessageFormat(setup.Status, (), has_payload=True),
    MessageFormat(messages.Configuration, _CONFIGURATION, LONG_HEADER_BYTES),
    MessageFormat(messages.Push, (INT, WORKER, INT, INT, INT, NOTE_OF_GRADIENT), has_payload=True),
    MessageFormat(messages.Pushed, (INT, INT, INT)),
    MessageFormat(messages.Pull, (INT, WORKER, INT, INT)),
    MessageFormat(messages.Pulled, (INT, INT, INT, INT, NOTE), has_payload=True),
    MessageFormat(messages.Stale, (INT,)),
    MessageFormat(messages.Forward, (INT, INT, UPDATE), has_payload=True),
    MessageFormat(messages.Forwarded, (INT, INT)),
    MessageFormat(messages.Missing, (INT, INT)),
    MessageFormat(messages.State, (INT, INT, APPLIED, ROUNDS, PARTIALS, NOTE), LONG_HEADER_BYTES, has_payload=True),
    MessageFormat(messages.Partial, (INT, INT, FLOAT, BOOL)),
    MessageFormat(messages.Heartbeat, (INT, INT, INT)),
    MessageFormat(messages.WorkerHeartbeat, (WORKER, INT, INT, BOOL)),
)
FORMS = dict(enumerate(_LIST, 1))
KINDS = {form.kind: kind for kind, form in FORMS.items()}
