"""The wire format of messages: a prefix of 20 bytes, a msgpack header with a strict schema, raw bytes.

Nothing is unpickled, and nothing is allocated before it is known to be of a size that this message may have.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

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
        # A list of values without names: the form says what stands at each place.
        packed = _DECODERS[prefix.kind].decode(content)
    except ValueError as error:  # msgspec's own errors, and UnicodeDecodeError
        raise FrameError(f"a {form.kind.__name__} with a wrong header: {error!s:.200}") from None
    values = [field.unpack(value) for field, value in zip(form.fields, packed, strict=True)]
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
    for field, name in zip(form.fields, type(message).__slots__, strict=False):  # the payload is no field
        packed.append(field.pack(getattr(message, name)))
    header = _ENCODER.encode(packed)
    return PREFIX.pack(MAGIC, VERSION, kind, number, len(header), payload_bytes) + header


def payload_of(message: object) -> Any:
    """Return the payload that follows the header: the message's last field; None where nothing follows."""
    if not FORMS[KINDS[type(message)]].has_payload:
        return None
    if isinstance(message, messages.Forward):
        return message.update.payload
    return getattr(message, _last_field(message))


def _last_field(message: Any) -> str:
    return str(list(type(message).__slots__)[-1])


def _same(value: object) -> Any:
    return value


class Field(NamedTuple):
    """The schema of a field in the header, and the functions that turn a value into what it describes, and back."""

    schema: Any
    pack: Callable[[Any], Any] = _same
    unpack: Callable[[Any], Any] = _same


Count = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_COUNT)]  # -1 stands for none, as in versions, nodes and clocks
Worker = tuple[Count, Count]
Clock = tuple[Count, Count, Count]  # a worker's name and incarnation, and its clock
Number = int | float  # msgspec would take a whole number for a float, and NaN: `_float` refuses both
Setting = int | float | bool | None
Settings = dict[str, Setting | list[Setting]]  # of a torch optimizer's group, where lists are tuples, such as betas


class Note(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What travels beside parameters. Replicas keep and forward it, so it has no other keys."""

    loss: Number | UnsetType = UNSET
    weight: Number | UnsetType = UNSET
    flags: Count | UnsetType = UNSET
    norm: Number | UnsetType = UNSET
    counted: Count | UnsetType = UNSET
    absent: list[Count] | UnsetType = UNSET
    settings: Settings | UnsetType = UNSET


class GradientNote(Note, kw_only=True, forbid_unknown_fields=True):
    """What travels beside a gradient: a store can't do without these."""

    loss: Number
    weight: Number
    flags: Count
    absent: list[Count]
    settings: Settings


def _plain(value: object) -> int | float:
    """Return a number of a subclass, such as a learning rate of numpy, as Python's own: msgspec takes no other."""
    for kind in (float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} can't be sent")


def _float(value: object) -> float:
    # Infinity may come: it is the norm of a gradient that is not finite.
    if type(value) is not float or math.isnan(value):
        raise FrameError(f"{value!r:.60} where a number with a fraction should be")
    return value


def _note(value: Note | None) -> dict[str, Any] | None:
    if value is None:
        return None
    note = {name: item for name, item in msgspec.structs.asdict(value).items() if item is not UNSET}
    for name in ("loss", "weight", "norm"):
        if name in note:
            _float(note[name])
    return note


def _clocks(value: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    return {(name, incarnation): clock for name, incarnation, clock in value}


def _pack_clocks(clocks: Any) -> list[Any]:
    return [(*worker, clock) for worker, clock in clocks.items()]


def _pushes(value: Any) -> tuple[tuple[tuple[int, int], int], ...]:
    return tuple(_clocks(value).items())


def _pack_pushes(pushes: Any) -> list[Any]:
    return _pack_clocks(dict(pushes))


def _applied(value: Any) -> dict[int, dict[tuple[int, int], int]]:
    # Segments are numbered from 0 without gaps, so their numbers are not sent.
    return {segment: _clocks(clocks) for segment, clocks in enumerate(value)}


def _pack_applied(applied: Any) -> list[Any]:
    return [_pack_clocks(applied[segment]) for segment in sorted(applied)]


def _rounds(value: Any) -> dict[int, int]:
    return dict(enumerate(value))


def _pack_rounds(rounds: Any) -> list[Any]:
    return [rounds[segment] for segment in sorted(rounds)]


def _partials(value: Any) -> dict[int, float]:
    return {number: _float(partial) for number, partial in value}


def _pack_partials(partials: Any) -> list[Any]:
    return [(number, float(partial)) for number, partial in partials.items()]


def _update(value: Any) -> messages.Update:
    segment, pushes, note, share, partial = value
    # The payload is None until the bytes after the header have come: see `with_payload`.
    return messages.Update(segment, _pushes(pushes), _note(note), None, _float(share), _float(partial))


def _pack_update(update: messages.Update) -> list[Any]:
    pushes = _pack_pushes(update.pushes)
    return [update.segment, pushes, update.note, float(update.share), float(update.partial)]


INT = Field(Count)
BOOL = Field(bool)
FLOAT = Field(Number, unpack=_float)
TEXT = Field(str)
WORKER = Field(Worker)
JOINING = Field(Worker | None)
NODES = Field(tuple[Count, ...])
NOTE = Field(Note | None, unpack=_note)
NOTE_OF_GRADIENT = Field(GradientNote, unpack=_note)
CLOCKS = Field(list[Clock], _pack_clocks, _clocks)
APPLIED = Field(list[list[Clock]], _pack_applied, _applied)
ROUNDS = Field(list[Count], _pack_rounds, _rounds)
PARTIALS = Field(list[tuple[Count, Number]], _pack_partials, _partials)
UPDATE = Field(tuple[Count, list[Clock], GradientNote, Number, Number], _pack_update, _update)


class MessageFormat(NamedTuple):
    """A message's class, its fields, the largest header, and whether raw bytes follow as its last field."""

    kind: type
    fields: tuple[Field, ...]
    header_bytes: int = HEADER_BYTES
    has_payload: bool = False


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
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {}
for _kind, _form in FORMS.items():
    _DECODERS[_kind] = msgspec.msgpack.Decoder(tuple[tuple(field.schema for field in _form.fields)])  # type: ignore[misc]
